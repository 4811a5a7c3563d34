"""The default process group that this process has joined already: a rank's place in it, and its device.

Who embeds a run has made the group: a worker of Ray Train, a script that called `init_process_group`, a
trainer of reinforcement learning. It stays theirs: a run uses it, and leaves it as it is.
"""

from __future__ import annotations

import os
import socket
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

_LOCAL: dict[int, tuple[int, int]] = {}
"""Local rank and ranks of this host, by the identity of the group's store: hosts of a group do not change."""


def joined_world() -> tuple[int, int] | None:
    """The rank and the size of the default group; None without one, or in one that a dry run fakes."""
    dist: Any = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_available() or not dist.is_initialized() or dist.get_backend() == "fake":
        return None
    return dist.get_rank(), dist.get_world_size()


def joined_device() -> torch.device | None:
    """The device of the default group: the current CUDA device of NCCL, the CPU for gloo alone; None without
    a group."""
    import torch
    import torch.distributed as dist

    if not dist.is_initialized():
        return None
    cuda = "nccl" in dist.get_backend_config()
    return torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")


def place_on_host(rank: int, size: int) -> tuple[int, int]:
    """The local rank of a rank of the default group, and the group's ranks on this host.

    Without variables that tell them, and before `learn_hosts`, the ranks are taken to be on one host.
    """
    given = os.environ.get("LOCAL_RANK", ""), os.environ.get("LOCAL_WORLD_SIZE", "")
    if all(text.isdecimal() for text in given):
        return int(given[0]), int(given[1])
    return _LOCAL.get(id(_store()), (rank, size))


def learn_hosts() -> None:
    """Learn from each other's host names which ranks share a host; all ranks call it, and wait for all."""
    import torch.distributed as dist

    rank, size = dist.get_rank(), dist.get_world_size()
    store, own = _store(), socket.gethostname()
    if id(store) in _LOCAL or size == 1:
        return
    store.set(f"meshwright/host/{rank}", own)
    hosts = [store.get(f"meshwright/host/{other}").decode() for other in range(size)]
    _LOCAL[id(store)] = hosts[:rank].count(own), hosts.count(own)


def _store() -> Any:
    """The store of the default group."""
    from torch.distributed.distributed_c10d import _get_default_store

    return _get_default_store()
