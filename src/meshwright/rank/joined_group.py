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

_learned: tuple[Any, tuple[int, int]] | None = None
"""A group, and this process's local rank in it with the ranks of its host: hosts of a group do not change."""


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
    import torch.distributed as dist

    if _learned is not None and _learned[0] is dist.group.WORLD:
        return _learned[1]
    return rank, size


def learn_hosts() -> None:
    """Learn from each other's host names which ranks share a host, in one collective of all ranks."""
    import torch.distributed as dist

    global _learned
    group, own = dist.group.WORLD, socket.gethostname()
    if _learned is not None and _learned[0] is group:
        return
    hosts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(hosts, own)
    _learned = group, (hosts[: dist.get_rank()].count(own), hosts.count(own))
