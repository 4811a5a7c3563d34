"""The process group of the world that this process is in."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store
from torch.distributed import ProcessGroup

from meshwright.comm import process_groups
from meshwright.rank.env import LOOPBACK, Supervision, Worker
from meshwright.rank.failure import errors_recorded
from meshwright.rank.flight_recorder import record_collectives
from meshwright.rank.gpu import device_index, refuse_shared
from meshwright.rank.network import check_loopback, interface_towards
from meshwright.rank.rendezvous import master, world_store
from meshwright.spec import UserError

ALLOCATOR = "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF"
"""Variables that set torch's allocator on GPUs, whichever of them is given."""
INTERFACE = "GLOO_SOCKET_IFNAME"
"""The variable that names the network interface on which gloo listens."""


def init_process_group(
    device_type: str,
    store: Store,
    rank: int,
    world_size: int,
    local_rank: int,
    folder: Path | None = None,
    timeout: timedelta = process_groups.TIMEOUT,
) -> ProcessGroup:
    """Join the world over its store: gloo on the CPU, NCCL on the GPU of a local rank (`rank/gpu.py`).

    NCCL's streams have high priority, so that a matrix product that fills the device does not delay messages.
    A GPU's memory is allocated in segments that grow, so that buffers of other sizes leave no gaps, unless
    the user has set the allocator. NCCL's flight recorder writes into `folder`.
    """
    backend, device, options = "gloo", None, None
    if device_type == "cuda":
        if not any(name in os.environ for name in ALLOCATOR):  # read when CUDA first allocates
            os.environ[ALLOCATOR[0]] = "expandable_segments:True"
        backend, device = "nccl", torch.device("cuda", device_index(local_rank))
        refuse_shared(store, rank, device.index)
        record_collectives(os.environ, folder)
        options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
        torch.cuda.set_device(device)
    dist.init_process_group(
        backend, timeout=timeout, device_id=device, pg_options=options,
        store=store, rank=rank, world_size=world_size,
    )  # fmt: skip
    group = dist.group.WORLD
    assert group is not None
    return group


@contextmanager
def process_group(
    place: Worker | None,
    device_type: str = "cpu",
    folder: Path | None = None,
    met_at: Store | None = None,
    timeout: timedelta = process_groups.TIMEOUT,
) -> Iterator[ProcessGroup]:
    """The world's group for the length of a block; `folder` is as in `world_store`.

    Ranks that have met already have `met_at`, their store. A collective may take as long as `timeout`.
    Without a `place`, or as the only rank that `meshwright` launched, the world is this process alone: its
    store is in its memory. Gloo, which always listens, does so on the loopback interface where all ranks are
    on this host, and else where others reach it. An error inside is recorded before the group goes down, so
    that it is older than the errors that its end brings about in the other ranks.
    """
    if device_type not in ("cpu", "cuda"):
        raise UserError(f"device: {device_type!r} is not run by this version; it runs 'cpu' and 'cuda'")
    alone = place is None or (place.launched and place.world_size == 1)
    rank, size = (place.rank, place.world_size) if place is not None and not alone else (0, 1)
    with ExitStack() as stack, _interface_chosen(place), _left_at_end(), errors_recorded():
        if device_type == "cpu" and os.environ.get(INTERFACE) == LOOPBACK:
            check_loopback()
        store: Store = dist.HashStore() if met_at is None else met_at  # type: ignore[attr-defined]
        if place is not None and not alone and met_at is None:
            store = stack.enter_context(world_store(place, process_groups.TIMEOUT, folder))
        supervision, local_rank = Supervision.given(), place.local_rank if place else 0
        dumps = folder / "flight-recorder" if folder is not None else None
        if supervision is not None and supervision.flight_recorder:
            dumps = Path(supervision.flight_recorder)
        group = init_process_group(device_type, store, rank, size, local_rank, dumps, timeout)
        yield group
        dist.barrier()  # no rank hangs up on one that still listens


@contextmanager
def _interface_chosen(place: Worker | None) -> Iterator[None]:
    """Block in which gloo listens on loopback where all ranks are on this host; else where others reach it.

    What the user has set stays. The environment is as before afterwards, since what this process starts or
    joins next may have other hosts.
    """
    chosen: str | None = None
    if INTERFACE not in os.environ:
        if place is None or place.local_world_size == place.world_size:
            chosen = LOOPBACK
        elif not place.launched:
            chosen = interface_towards(master(os.environ)[0])
    if chosen is None:
        yield
        return
    os.environ[INTERFACE] = chosen
    try:
        yield
    finally:
        os.environ.pop(INTERFACE, None)


@contextmanager
def _left_at_end() -> Iterator[None]:
    """Block that may join the default group, and leaves it."""
    try:
        yield
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
