"""Exceptions of checkpoints: each is one sentence with the file, the reason, and what was kept."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from meshwright.spec.errors import UserError


class CheckpointError(UserError):
    """A checkpoint could not be written, found or read; what was published before is untouched."""

    gravity = 2


class LostLeaseError(CheckpointError):
    """Another run took the directory over while this one was stopped or cut off: it must write no more."""


class BadCheckpointError(CheckpointError):
    """A published checkpoint is damaged or hostile: truncated, altered, missing a file, out of bounds.

    Loading the latest checkpoint falls back to the one before; a checkpoint asked for by number is refused.
    """

    gravity = 3


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Raise BadCheckpointError, which names `path`, for any error in reading, parsing or checking it."""
    try:
        yield
    except CheckpointError:
        raise
    except OSError as error:
        raise BadCheckpointError(f"{path} cannot be read: {error.strerror or error}") from error
    except (UserError, ValueError, RecursionError) as error:
        raise BadCheckpointError(f"{path} cannot be trusted: {error}") from error
