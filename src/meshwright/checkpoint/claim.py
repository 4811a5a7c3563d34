"""Become the one writer of a checkpoint directory, in which all ranks see what rank 0 writes."""

from __future__ import annotations

import os
import socket
import time
from contextlib import ExitStack, suppress
from pathlib import Path

from meshwright.checkpoint.disk import LATEST, TEMPORARY, Disk
from meshwright.checkpoint.errors import CheckpointError
from meshwright.checkpoint.lease import Lease
from meshwright.comm.control import Control

VISIBLE_S = 10.0
"""Seconds that a network file system may take to show one host a file that another one has made."""


def claim(directory: Path, ranks: Control, lease: Lease, disk: Disk) -> None:
    """Take the lease on rank 0, remove what dead saves left, and see that all ranks have this directory.

    Afterwards `lease` can `check` on every rank. Raises CheckpointError on all ranks, without the lease, when
    another run is alive, and when a rank sees another directory than rank 0.
    """
    with ExitStack() as undo:
        lease.follow(*ranks.on_first(lambda: _take(directory, lease, disk, undo, ranks.size > 1)))
        proof = _proof(directory, lease)
        try:
            ranks.together(lambda: _see(proof, ranks.rank, disk))
        finally:
            if ranks.rank == 0:
                with suppress(OSError):  # the next claim sweeps it, too
                    proof.unlink(missing_ok=True)
        undo.pop_all()


def _take(directory: Path, lease: Lease, disk: Disk, undo: ExitStack, prove: bool) -> tuple[str, int]:
    """Take the lease, whose identity is returned, sweep, and write what other ranks look for."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        lease.acquire()
        undo.callback(lease.release)
        for kind in ("step", "old", "common", "fetch", LATEST):
            for path in sorted(directory.glob(f"{TEMPORARY}{kind}-*")):
                disk.remove_tree(path)
        if prove:
            os.close(disk.create(_proof(directory, lease)))
        return lease.identity
    except OSError as error:
        raise CheckpointError(
            f"checkpoint directory {directory} cannot be used: {error.strerror or error}; "
            "set checkpoint.dir to one that this user may write"
        ) from error


def _proof(directory: Path, lease: Lease) -> Path:
    """Return a file of rank 0 that others look for, by a name that no file system can have remembered."""
    return directory / f"{TEMPORARY}common-{lease.identity[0]}"


def _see(proof: Path, rank: int, disk: Disk) -> None:
    """Raise CheckpointError unless this rank, if not the first, finds the file within `VISIBLE_S`."""
    deadline = time.monotonic() + VISIBLE_S
    while rank > 0:
        try:
            with disk.opened(proof):
                return
        except OSError as error:
            if time.monotonic() > deadline:
                raise CheckpointError(
                    f"rank {rank} on {socket.gethostname()} does not see in {proof.parent} what rank 0 wrote "
                    f"there ({error.strerror}); set checkpoint.dir, or --out, to a folder that all share"
                ) from error
            time.sleep(0.1)
