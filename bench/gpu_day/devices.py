"""The device of a part: a GPU of this machine, or one that is faked."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gpu_day.results import Work

if TYPE_CHECKING:
    import torch

    from meshwright.comm.mesh import Mesh
    from meshwright.dryrun.memory_tracker import FakeMemory
    from meshwright.dryrun.trace import Trace
    from meshwright.hardware.cluster import Cluster
    from meshwright.spec import RunSpec


def prepare(work: Work) -> None:
    """Fake the device, where the part's is faked. Then torch must not have been imported."""
    if work.faked:
        from meshwright.fake_cuda.library import load

        load()
        from meshwright.fake_cuda.runtime import install, set_capability

        install()
        set_capability(tuple(work.options.get("capability", (9, 0))))


def device_here() -> torch.device:
    """This process's device: a rank has that of its place on the machine."""
    import torch

    from meshwright.rank.env import worker

    place = worker()
    return torch.device("cuda", 0 if place is None else place.local_rank)


@contextmanager
def fake_tensors(work: Work, device: torch.device) -> Iterator[None]:
    """Block in which tensors of a device that is faked have no memory; without effect on a GPU."""
    if not work.faked:
        yield
        return
    from meshwright.dryrun.memory_tracker import FakeMemory

    with FakeMemory(device):
        yield


@dataclass(frozen=True)
class Faked:
    """The record of a device that is faked: its memory, and the events of what runs on it."""

    memory: FakeMemory
    trace: Trace


@contextmanager
def world_of(work: Work, spec: RunSpec, device: torch.device) -> Iterator[tuple[Mesh, Faked | None]]:
    """This process's place in the world of a run, as one of its ranks."""
    from meshwright.comm.mesh import build_mesh
    from meshwright.parallel.precision import use_fast_fp32_matmul

    model = spec.model
    if not work.faked:
        from meshwright.rank.env import worker
        from meshwright.rank.process_group import process_group

        with process_group(worker(), "cuda"):
            use_fast_fp32_matmul(device)
            mesh = build_mesh(spec.layout, device, model.kv_heads, experts=model.moe is not None)
            assert mesh is not None
            yield mesh, None
        return
    from meshwright.dryrun.fake_world import FakeGroups, fake_world
    from meshwright.dryrun.memory_tracker import FakeMemory
    from meshwright.dryrun.trace import Trace
    from meshwright.fake_cuda.runtime import RUNTIME

    trace = Trace(device)
    memory = FakeMemory(device, observer=trace)
    with fake_world(spec.layout.world_size, 0), RUNTIME.observed(trace):
        groups = FakeGroups(device.type)
        mesh = build_mesh(spec.layout, device, model.kv_heads, groups, model.moe is not None)
        assert mesh is not None
        mesh.wire.observer, groups.heartbeat.on_phase = trace, trace.on_phase
        with memory:
            yield mesh, Faked(memory, trace)


def cluster_here(device: torch.device) -> Cluster | None:
    """The cluster of the catalogue that has this machine's GPUs; None for GPUs that it does not know."""
    import torch

    from meshwright.hardware.catalogue import cluster_of_gpu

    return cluster_of_gpu(torch.cuda.get_device_name(device))
