"""Exceptions of checkpoints: each is one sentence with the file, the reason, and what was kept."""

from __future__ import annotations

import errno
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

from meshwright.spec.errors import StorageError, UserError

T = TypeVar("T")
DAMAGE = {errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENXIO, errno.ENAMETOOLONG, None}
"""Errors of opening or reading a checkpoint's file that tell of what is there, not of the disk under it."""
PAUSES_S = (0.1, 1.0, 3.0)
"""Seconds before each further attempt to read what the file system did not give."""


class CheckpointError(UserError):
    """A checkpoint could not be written, found or read; what was published before is untouched."""

    gravity = 2


class LostLeaseError(CheckpointError):
    """Another run took the directory over while this one was stopped or cut off: it must write no more."""

    of_another_run = True


class InUseError(CheckpointError):
    """Another run holds the directory."""

    of_another_run = True


class VanishedError(CheckpointError, StorageError):
    """The folder of a run that writes in it is gone: moved, or its file system is away."""


class BadCheckpointError(CheckpointError):
    """A published checkpoint is damaged or hostile: truncated, altered, missing a file, out of bounds.

    Loading the latest checkpoint falls back to the one before; a checkpoint asked for by number is refused.
    """

    gravity = 3


class SaveError(CheckpointError, StorageError):
    """The disk or file system failed a save: a later one may work."""


class UnreadableError(CheckpointError, StorageError):
    """The disk or file system did not give a checkpoint's bytes, which may be good.

    That is no damage: nothing falls back to an older checkpoint, or is removed, because of it.
    """


def retried(work: Callable[[], T]) -> T:
    """Return what `work` returns; after an UnreadableError it is run again, with pauses, a few times."""
    for pause in PAUSES_S:
        with suppress(UnreadableError):
            return work()
        time.sleep(pause)
    return work()


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Raise BadCheckpointError, which names `path`, for any error in reading, parsing or checking it.

    Where the disk or file system does not answer, or does not permit it, UnreadableError is raised.
    """
    try:
        yield
    except CheckpointError:
        raise
    except OSError as error:
        reason = f"{path} cannot be read: {error.strerror or error}"
        if error.errno in DAMAGE:
            raise BadCheckpointError(reason) from error
        raise UnreadableError(
            f"{reason}; it may be good, so no older checkpoint is used: start again when the disk works"
        ) from error
    except (UserError, ValueError, RecursionError) as error:
        raise BadCheckpointError(f"{path} cannot be trusted: {error}") from error
