"""The GPU of a rank: which one it takes, that no other rank has it, and the processors that are near to it.

A launcher shows each rank either all GPUs of its host, of which it takes that of its local rank, or one, such
as Slurm's --gpus-per-task=1, which is device 0 whatever the local rank. Two ranks that see the same one would
compute in turns, and NCCL refuses them in the middle of the start.

On a host with several NUMA nodes a rank runs on the processors of the node that its GPU is at, so that copies
and launches do not cross to another (`torchrun --numa-binding node` does the same). Memory is allocated where
it is first written, hence there, too.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

import torch
from torch._C._distributed_c10d import Store

from meshwright.host import content, is_switched_on
from meshwright.spec import UserError

SYSFS = Path("/sys")
SHARED_ON_PURPOSE = "NCCL_MULTI_RANK_GPU_ENABLE", "NCCL_HOSTID"


def device_index(local_rank: int) -> int:
    """The number of a local rank's GPU among those that this process sees. Raises `UserError` without one."""
    found = torch.cuda.device_count()
    if found == 1:
        return 0
    if local_rank >= found:
        raise UserError(f"--nproc: rank {local_rank} of this machine has no GPU; it has {found}")
    return local_rank


def refuse_shared(store: Store, rank: int, index: int) -> None:
    """Raise `UserError` if a rank of the world that came before has the same GPU, by its UUID.

    NCCL takes several ranks on one if it is told to, by either variable of `SHARED_ON_PURPOSE`.
    """
    if any(is_switched_on(name) for name in SHARED_ON_PURPOSE):
        return
    uuid = str(torch.cuda.get_device_properties(index).uuid)
    first = int(store.compare_set(f"gpu/{uuid}", "", str(rank)))
    if first != rank:
        seen = torch.cuda.device_count()
        how = "the only one that it sees" if seen == 1 else f"number {index} of {seen} that it sees"
        raise UserError(
            f"LOCAL_RANK: rank {rank} has GPU {uuid} of {socket.gethostname()}, {how}, as rank {first} has; "
            f"give each rank a GPU of its own (CUDA_VISIBLE_DEVICES, Slurm's --gpus-per-task=1 or "
            f"--gpu-bind=single:1), or all ranks all GPUs, or start fewer ranks"
        )


def numa_cpus(device: torch.device, sysfs: Path = SYSFS) -> tuple[int, set[int]] | None:
    """The NUMA node that a GPU is at and the processors of it; None where the system tells of none."""
    properties: Any = torch.cuda.get_device_properties(device)
    domain, bus, place = (getattr(properties, f"pci_{each}_id", None) for each in ("domain", "bus", "device"))
    if domain is None or bus is None or place is None:
        return None
    node = content(sysfs / f"bus/pci/devices/{domain:04x}:{bus:02x}:{place:02x}.0/numa_node").strip()
    if not node.isdecimal():  # -1: one node, or a virtual machine that hides them
        return None
    listed = content(sysfs / f"devices/system/node/node{node}/cpulist")
    return int(node), _numbers(listed)


def bind_to_node(device: torch.device, sysfs: Path = SYSFS) -> None:
    """Let this thread, and those that it starts, run on processors near a GPU only, of those it may use.

    Nothing changes where the system tells of no node, or none of its processors may be used.
    """
    near = numa_cpus(device, sysfs)
    if near is None or not hasattr(os, "sched_setaffinity"):
        return
    allowed = near[1] & os.sched_getaffinity(0)
    if allowed:
        os.sched_setaffinity(0, allowed)


def bound_node(device: torch.device, sysfs: Path = SYSFS) -> int | None:
    """The NUMA node of a GPU, if this thread runs on its processors only."""
    near = numa_cpus(device, sysfs)
    if near is None or not hasattr(os, "sched_getaffinity"):
        return None
    return near[0] if os.sched_getaffinity(0) <= near[1] else None


def _numbers(listed: str) -> set[int]:
    """The numbers of a list of the kernel's, such as 0-3,8,10-11."""
    found: set[int] = set()
    for part in filter(None, listed.strip().split(",")):
        low, _, high = part.partition("-")
        found.update(range(int(low), int(high or low) + 1))
    return found
