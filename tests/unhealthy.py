"""The program of a health probe on a host with a fault: UNHEALTHY is FAULT/RANK, of one of its processes."""

from __future__ import annotations

import errno
import os
import signal
import time
from collections.abc import Callable
from unittest.mock import patch

import torch
import torch.distributed as dist

from meshwright.checkpoint.disk import Disk
from meshwright.launch import health_checks

ENVIRONMENT = "UNHEALTHY"


def main() -> None:
    """Make the checks, with the fault if it is this process's."""
    fault, _, rank = os.environ.get(ENVIRONMENT, "").partition("/")
    if fault and rank == os.environ["RANK"]:
        FAULTS[fault]()
    health_checks.main()


def _product() -> None:
    """The lowest bit of one number of a product is the other one."""
    exact = torch.Tensor.__matmul__

    def flipped(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        found = exact(left, right)
        if found.is_floating_point():
            found.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[found.itemsize])[7, 5] ^= 1
        return found

    patch.object(torch.Tensor, "__matmul__", flipped).start()


def _sum() -> None:
    exact: Callable[..., object] = dist.all_reduce

    def wrong(tensor: torch.Tensor) -> None:
        exact(tensor)
        tensor[3] += 1

    patch.object(dist, "all_reduce", wrong).start()


def _memory() -> None:
    health_checks.GIVEN_BACK_S = 0.3
    patch.object(health_checks, "free_memory", lambda: 1000).start()


def _disk() -> None:
    def fails(*_: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    patch.object(Disk, "write_file", fails).start()


def _stuck() -> None:
    def sleeps(*_: object) -> None:
        time.sleep(600)

    patch.object(health_checks, "check_collective", sleeps).start()


def _crash() -> None:
    os.kill(os.getpid(), signal.SIGBUS)


FAULTS: dict[str, Callable[[], None]] = {
    "product": _product,
    "sum": _sum,
    "memory": _memory,
    "disk": _disk,
    "stuck": _stuck,
    "crash": _crash,
}

if __name__ == "__main__":
    main()
