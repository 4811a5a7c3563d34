"""Opening of a training run: its corpus, its world, its trainer and its folder of checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from meshwright.checkpoint.disk import Disk
from meshwright.checkpoint.lease import Lease
from meshwright.checkpoint.snapshots import snapshots_of
from meshwright.checkpoint.store import CheckpointStore
from meshwright.checkpoint.weights import Weights
from meshwright.comm.mesh import Mesh
from meshwright.data.corpus import Corpus, open_corpus
from meshwright.data.verification import Check
from meshwright.model.soft_targets import SoftTargetSource
from meshwright.optim.offload import MomentMemory, check_offload
from meshwright.profile.machine import free_memory
from meshwright.spec import RunSpec
from meshwright.train.callbacks import Observers
from meshwright.train.island_world import world_of
from meshwright.train.loop import TrainingRun
from meshwright.train.parts import Sources
from meshwright.train.step import Trainer


def open_run(
    spec: RunSpec,
    mesh: Mesh,
    out: Path,
    observers: Observers,
    check: Check = "files",
    lease: Lease | None = None,
    slots: Sequence[Sequence[int]] = (),
    disk: Disk | None = None,
    soft_targets: Callable[[Corpus], SoftTargetSource | None] = lambda _corpus: None,
    weights: Callable[[], Weights | None] = lambda: None,
    host: str = "127.0.0.1",
) -> TrainingRun:
    """Open the run of `spec` in the folder `out`; all ranks call this.

    `check` is what opening the corpus checks: "lazy" where another process of this host has just opened it.
    `lease` is that of the folder `out`, which rank 0 of the caller holds; `slots` are the supervisor's memory
    for snapshots, two or four descriptors for each rank of this host. Checkpoints are saved on `disk`.
    `soft_targets` gives those about a corpus to a run that learns from some; `weights` as `TrainingRun` takes
    it.
    """
    control = mesh.control
    corpus = control.together(lambda: open_corpus(spec, check))
    spec = spec.counted(corpus.train.samples)
    control.agree(
        {"the digest of data.corpus": corpus.digest},
        "give all hosts the same corpus, tokenizer and data.cache",
    )
    world = world_of(spec, mesh, out, host, observers.on_event)
    loader = world.loader(corpus)
    if "host" in (spec.train.offload, spec.train.offload_activations):
        control.together(lambda: check_offload(spec, mesh.device, mesh.pipeline.rank))
    memory = MomentMemory(spec.train, mesh.device, control, out)
    sources = Sources(soft_targets(corpus), world.arrivals)
    trainer = Trainer(spec, mesh, memory=memory, sources=sources)
    store = _claimed_store(spec, mesh, out, lease, disk)
    store.warnings += [remark] if (remark := spec.layout.remark) else []
    snapshots = snapshots_of(spec.recovery.snapshot_every, slots, mesh, free_memory, store.warnings)
    return TrainingRun(spec, mesh, out, observers, corpus, world, loader, trainer, store, snapshots, weights)


def _claimed_store(
    spec: RunSpec, mesh: Mesh, out: Path, lease: Lease | None, disk: Disk | None
) -> CheckpointStore:
    folder = spec.checkpoint.folder(out)
    store = CheckpointStore(
        folder,
        spec.checkpoint.keep,
        mesh.background,
        keep_every=spec.checkpoint.keep_every,
        lease=lease and lease.beside(folder),
        disk=disk,
        wire=mesh.wire,
        remote=spec.checkpoint.remote,
        remote_every=spec.checkpoint.remote_every,
    )
    store.claim()
    return store
