"""Limits of this process: open files, locked memory, and the room of /dev/shm."""

from __future__ import annotations

import os
import resource
from pathlib import Path

from meshwright.doctor.finding import Finding
from meshwright.spec.layout import Layout
from meshwright.units import counted, gigabytes

OWN_FILES, OWN_FILES_CUDA = 48, 256
"""Files that a rank has open at least, beside connections: with 32 a run of two small ranks failed on a
processor, with 64 it did not (measured); drivers of GPUs open some dozens for each GPU (assumed)."""
NCCL_PEERS = 32
"""Ranks that NCCL connects one to in rings and trees, at most (assumed); gloo connects all of a group."""
USUAL_FILES = 1024
"""The limit that Linux gives; data in shards and large worlds take most of it."""
MOST_FILES = 65536
SHM, LEAST_SHM = Path("/dev/shm"), 16 << 20
"""NCCL's ranks on one host share about so many bytes each of /dev/shm."""
LEAST_LOCKED = 1 << 30
"""Bytes that a rank locks for messages of RDMA, at least (assumed)."""


def open_files(layout: Layout, cuda: bool) -> list[Finding]:
    """A limit of open files that is too low for a rank of a layout, with its connections."""
    limit, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    sizes = (layout.shard_ranks, layout.replicate, layout.cp, layout.tp, layout.pp, layout.world_size)
    connections = sum(min(size - 1, NCCL_PEERS) if cuda else size - 1 for size in sizes)
    needed = (OWN_FILES_CUDA if cuda else OWN_FILES) + 2 * connections
    if limit == resource.RLIM_INFINITY or limit >= max(USUAL_FILES, needed):
        return []
    fails = limit < needed
    why = (
        f"and a rank needs about {needed:,} for its files and connections"
        if fails
        else f"which is enough for {counted(layout.world_size, 'ranks')}, but not for data of many files"
    )
    by_root = "" if hard == resource.RLIM_INFINITY or hard >= MOST_FILES else ", as root or in limits.conf"
    return [
        Finding(
            "limits",
            fails,
            f"a process may have {limit:,} files open, {why}",
            f"raise the limit by ulimit -n {max(MOST_FILES, 2 * needed)}{by_root}, also in the scheduler's "
            f"service (LimitNOFILE) and containers (--ulimit nofile)",
        )
    ]


def locked_memory(infiniband: Path = Path("/sys/class/infiniband")) -> list[Finding]:
    """A limit of the memory that is locked for adapters of RDMA, which read and write it themselves."""
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if not any(infiniband.glob("*")) or limit == resource.RLIM_INFINITY or limit >= LEAST_LOCKED:
        return []
    return [
        Finding(
            "limits",
            True,
            f"a process may lock {gigabytes(limit)} of memory, and this host has InfiniBand, whose adapters "
            f"need buffers that are locked",
            "raise the limit by ulimit -l unlimited, also in the scheduler's service (LimitMEMLOCK=infinity) "
            "and containers (--ulimit memlock=-1)",
        )
    ]


def shared_memory(local_ranks: int, cuda: bool, folder: Path = SHM) -> list[Finding]:
    """A lack of room in /dev/shm for what the ranks of this host share through it.

    NCCL's ranks fail without; on processors ranks share memory by other means, and only programs beside them,
    such as loaders of data, would.
    """
    needed = LEAST_SHM * local_ranks
    try:
        status = os.statvfs(folder)
        free = status.f_bavail * status.f_frsize
    except OSError as error:
        free, reason = 0, f"{folder} cannot be used ({error.strerror})"
    else:
        reason = f"{folder} has {gigabytes(free)} free"
    if free >= needed:
        return []
    users = (
        "NCCL's ranks" if cuda else "programs that share memory between processes, such as loaders of data,"
    )
    return [
        Finding(
            "limits",
            cuda and local_ranks > 1,
            f"{reason}, and {users} need {gigabytes(needed)} for {counted(local_ranks, 'ranks')} of a host",
            "remove what is left there, or mount it larger (mount -o remount,size=8G /dev/shm; "
            "docker run --shm-size 8g)",
        )
    ]
