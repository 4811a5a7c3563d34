"""One rank of a training run: what it opens, writes and shows around the loop of `train`."""

from __future__ import annotations

import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from meshwright.api.diagnosis import examined
from meshwright.api.folders import make_folder
from meshwright.api.ranks import Result
from meshwright.api.start_checks import check_here
from meshwright.rank.env import Supervision, worker
from meshwright.spec import RunSpec

if TYPE_CHECKING:
    from meshwright.chaos.inject import Injection
    from meshwright.checkpoint.lease import Lease
    from meshwright.comm.mesh import Mesh
    from meshwright.train.callbacks import Observers
    from meshwright.train.loop import TrainingRun


def train_worker(
    spec: RunSpec,
    *,
    out: Path,
    resume: str | None = None,
    quiet: bool = False,
    address: str | None = None,
    doctor: bool = False,
) -> Result:
    """Train as one rank of the world of torchrun, or alone; every rank returns the result.

    The run's ranks in other worlds reach this one at `address`, by default on this host. With `doctor` the
    ranks' hosts are examined first (`examined`).
    """
    from meshwright.checkpoint.lease import STALE_S, Lease
    from meshwright.infer.soft_target_source import soft_targets_of
    from meshwright.rank.network import own_address
    from meshwright.rank.out_of_memory import memory_errors_told
    from meshwright.rank.world import mesh_of
    from meshwright.report.run_page import write_report
    from meshwright.train.open_run import open_run
    from meshwright.weights.initial_weights import open_weights

    supervision = Supervision.given()
    with memory_errors_told(spec), ExitStack() as stack:
        met_at = stack.enter_context(examined(spec, out, quiet)) if doctor else None
        mesh = stack.enter_context(mesh_of(spec, folder=out, met_at=met_at))
        stale_s = STALE_S if supervision is None else supervision.lease_seconds
        # What restarts a run by itself asks for "auto", and may come before the other host's process is gone.
        lease = Lease(out, "meshwright", stale_s, wait=resume == "auto")
        observers = _begin(spec, mesh, out, resume, lease, quiet, stack)
        injection = _injection(supervision)
        run = open_run(
            spec, mesh, out, observers, check="lazy", lease=lease,
            slots=() if supervision is None else supervision.snapshots,
            disk=injection.disk if injection else None,
            soft_targets=lambda corpus: soft_targets_of(spec, mesh, corpus, out),
            host="127.0.0.1" if address is None else own_address(address)[0],
            weights=lambda: open_weights(spec),
        )  # fmt: skip
        if injection is not None:
            injection.attach(run)
        mesh.control.together(lambda: _keep_tokenizer(run))
        result = run.execute(resume)
        _add_figures(result, run, supervision)
        mesh.control.together(lambda: observers.on_end(result))
        if mesh.control.rank == 0:
            write_report(out)
    return result


def _begin(
    spec: RunSpec, mesh: Mesh, out: Path, resume: str | None, lease: Lease, quiet: bool, stack: ExitStack
) -> Observers:
    """Check the start on all ranks, and open the corpus; then rank 0 makes the folder and takes the lease.

    The lease and the observers, which only rank 0 has, are closed with `stack`.
    """
    from meshwright.data.corpus import open_corpus
    from meshwright.rank.world import once_per_host
    from meshwright.runs.status import write_status
    from meshwright.train.callbacks import Observers
    from meshwright.weights.initial_weights import open_weights

    first, ranks = mesh.control.rank == 0, mesh.control

    def check() -> None:
        if first:
            check_here(spec, out, resume)
            if resume is None:
                open_weights(spec)

    def start() -> Observers:
        check()
        if not first:
            return Observers([])
        make_folder(out)
        observers = _observers(spec, out, stack.enter_context(lease), quiet)
        write_status(out, "running")
        return observers

    ranks.together(check)
    once_per_host(ranks, lambda: open_corpus(spec))  # if it fails, there is no folder yet
    return stack.enter_context(ranks.together(start))


def _observers(spec: RunSpec, out: Path, lease: Lease, quiet: bool) -> Observers:
    """Return what rank 0 writes and shows of a run in the folder `out`."""
    from meshwright.report.live_report import LiveReport
    from meshwright.report.progress import Progress
    from meshwright.report.trackers import make_trackers
    from meshwright.runs.record import RunRecord
    from meshwright.train.callbacks import Observers

    shown = [] if quiet else [Progress()]
    folder = out.resolve()
    name = folder.name if spec.own_step_group is None else f"{folder.parent.name}/{folder.name}"
    trackers = make_trackers(spec.train.trackers, out, name, spec.to_json())
    return Observers([RunRecord(out, lease), *shown, LiveReport(out, lease), *trackers])


def _keep_tokenizer(run: TrainingRun) -> None:
    """Give the run's folder the files that reading and writing text needs, if it has none."""
    from meshwright.data.kept_tokenizer import keep_tokenizer

    if run.mesh.control.rank == 0 and not (run.out / "tokenizer.json").exists():
        make_folder(run.out)
        keep_tokenizer(run.spec, run.corpus.tokenizer if run.corpus.has_text else None, run.out)


def _add_figures(result: Result, run: TrainingRun, supervision: Supervision | None) -> None:
    """Add to the result of a run its starts, the time of all of them, a text, and how far xz compresses."""
    from meshwright.comm.waiting import while_others_wait
    from meshwright.infer.sample import held_out_sample

    result["restarts"] = supervision.generation if supervision is not None else 0
    if supervision is not None and supervision.generation:  # the time of all starts, not of the last one
        result["seconds"] = time.monotonic() - supervision.began
    result["sample"] = held_out_sample(run.trainer, run.corpus)
    ranks = run.mesh.control
    eval_tokens = run.spec.train.eval_tokens
    while_others_wait(ranks, ranks.rank == 0, lambda: result.update(run.corpus.compressed(eval_tokens)))


def _injection(supervision: Supervision | None) -> Injection | None:
    """Return what injects faults into this rank, if its supervisor has a plan of them."""
    place = worker()
    if place is None or supervision is None or not supervision.faults:
        return None
    from meshwright.chaos.inject import Injection

    return Injection(supervision, place)
