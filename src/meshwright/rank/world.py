"""Environment of a rank: its place in the world, its device, and the mesh of the layout."""

from __future__ import annotations

import logging
import mmap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from hashlib import sha256
from pathlib import Path

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

import meshwright
from meshwright.comm.call_check import same_calls
from meshwright.comm.control import Control, new_scope
from meshwright.comm.heartbeat import BYTES, Heartbeat
from meshwright.comm.mesh import Mesh, build_mesh
from meshwright.comm.process_groups import Groups
from meshwright.comm.waiting import while_others_wait
from meshwright.kernels import cpu_kernels
from meshwright.kernels.attention_backend import attention_backend
from meshwright.kernels.half_precision_products import products_in_fp32
from meshwright.parallel.precision import formats, use_fast_fp32_matmul
from meshwright.rank.env import (
    Supervision,
    keep_compiled_code,
    keep_freed_memory,
    limit_threads,
    worker,
)
from meshwright.rank.failure import errors_recorded
from meshwright.rank.gpu import bind_to_node, device_index
from meshwright.rank.joined_group import joined_device, learn_hosts
from meshwright.rank.process_group import process_group
from meshwright.spec import RunSpec
from meshwright.spec.other_models import other_models
from meshwright.spec.rules import ranks_match


@contextmanager
def device_of(folder: Path | None = None, met_at: Store | None = None) -> Iterator[torch.device]:
    """This process's device, in the world of its ranks (`worker`), or alone; its group lasts as long.

    A default group that there is already is used, and stays, as do the number of threads that its owner has
    chosen and afterwards the precision of products. `folder` is one that all ranks have
    (`rank/rendezvous.py`), and `met_at` the store of ranks that have met already.
    """
    if (joined := joined_device()) is not None:
        learn_hosts()
        before = torch.get_float32_matmul_precision()
        use_fast_fp32_matmul(joined)
        try:
            with errors_recorded():
                yield joined
        finally:
            torch.set_float32_matmul_precision(before)
        return
    place = worker()
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    limit_threads(place.local_world_size if place else 1)
    if kind == "cpu":
        keep_freed_memory()
    with process_group(place, kind, folder, met_at):
        use_fast_fp32_matmul(torch.device(kind))
        local_rank = place.local_rank if place else 0
        yield torch.device(kind, device_index(local_rank)) if kind == "cuda" else torch.device("cpu")


@contextmanager
def groups_of(
    spec: RunSpec, folder: Path | None = None, met_at: Store | None = None
) -> Iterator[tuple[torch.device, Groups]]:
    """This rank's device and its groups in the world of its ranks (`worker`), or of this process alone.

    Raises `UserError` on all ranks if one has another spec, code, torch or kind of device than rank 0: its
    replicas would train another model, and write it into the same checkpoints.
    """
    place, embedded = worker(), dist.is_initialized()
    ranks_match(spec, place.world_size if place else 1)
    with device_of(folder, met_at) as device:
        if device.type == "cuda" and spec.train.numa_binding == "node" and not embedded:
            bind_to_node(device)
        with _groups_on(spec, device, own_heartbeat()) as groups:
            yield device, groups


@contextmanager
def _groups_on(spec: RunSpec, device: torch.device, heartbeat: Heartbeat) -> Iterator[Groups]:
    """This rank's groups in the default group, whose ranks agree on the spec and their software."""
    # It warns that a tensor which two axes cut takes two gathers to put together: that is how it is cut.
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    if spec.train.compile:
        keep_compiled_code()
    compute = formats(spec.precision).compute
    with products_in_fp32(device, compute), attention_backend(spec, device):
        if device.type == "cpu" and compute != torch.float64:
            cpu_kernels.library()  # compiled now, since the watch for hangs sees ranks that wait in a step
        groups = Groups(device.type, heartbeat=heartbeat)
        start = groups.connections.control(
            "control", dist.get_world_size(), new_scope(), groups.timeout, groups.heartbeat
        )
        software = {"meshwright": code_version(), "torch": torch.__version__, "device": device.type}
        start.agree(spec.to_json() | software, "start all ranks with the same run file, flags and software")
        yield groups


@contextmanager
def mesh_of(
    spec: RunSpec, limit: timedelta | None = None, folder: Path | None = None, met_at: Store | None = None
) -> Iterator[Mesh]:
    """The mesh of the layout over the world of `groups_of`; `folder` and `met_at` are as in `device_of`.

    With a `limit`, ranks wait no longer than it for each other, and their calls are compared (`same_calls`).
    """
    with groups_of(spec, folder, met_at) as (device, groups), mesh_on(spec, device, groups, limit) as mesh:
        yield mesh


@contextmanager
def mesh_on(
    spec: RunSpec, device: torch.device, groups: Groups, limit: timedelta | None = None
) -> Iterator[Mesh]:
    """The mesh of a layout that takes all ranks of the world; `limit` is as in `mesh_of`."""
    mesh = _mesh(spec, device, groups)
    others = {name: _mesh(other, device, groups) for name, other in other_models(spec).items()}
    mesh = replace(mesh, others=others)
    if limit is None:
        yield mesh
        return
    with same_calls(mesh, limit):
        groups.limit(limit)
        yield mesh


def _mesh(spec: RunSpec, device: torch.device, groups: Groups) -> Mesh:
    experts, alone = spec.model.moe is not None, spec.own_step_group is not None
    layout, apart = (spec.of_step_group().layout, False) if alone else (spec.layout, spec.step_groups > 1)
    mesh = build_mesh(layout, device, spec.model.kv_heads, groups, experts, apart)
    assert mesh is not None  # the layout has as many ranks as the world
    return mesh


def own_heartbeat() -> Heartbeat:
    """Return this rank's heartbeat, in the memory of its supervisor if it has one."""
    place, supervision = worker(), Supervision.given()
    if place is None or supervision is None:
        return Heartbeat()
    memory = mmap.mmap(supervision.heartbeats, place.local_world_size * BYTES)
    heartbeat = Heartbeat(memoryview(memory)[place.local_rank * BYTES :])
    heartbeat.publish_collectives()
    return heartbeat


def code_version() -> str:
    """Return the version of this package, with the start of the SHA-256 of its source files."""
    folder, found = Path(meshwright.__file__).parent, sha256()
    for file in sorted(folder.rglob("*.py")):
        found.update(f"{file.relative_to(folder)} {file.stat().st_size}\n".encode() + file.read_bytes())
    return f"{meshwright.__version__} ({found.hexdigest()[:12]})"


def once_per_host(control: Control, work: Callable[[], object]) -> None:
    """Run `work` on the first rank of each machine, and return on all ranks when it has ended on all
    machines; it may take hours (`comm/waiting.py`)."""
    place = worker()
    while_others_wait(control, place is None or place.local_rank == 0, work)
