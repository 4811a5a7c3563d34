"""Exceptions of checkpoints: each is one sentence with the file, the reason, and what was kept."""

from __future__ import annotations

from meshwright.spec.errors import UserError


class CheckpointError(UserError):
    """A checkpoint could not be written, found or read; what was published before is untouched."""

    gravity = 2


class BadCheckpointError(CheckpointError):
    """A published checkpoint is damaged or hostile: truncated, altered, missing a file, out of bounds.

    Loading the latest checkpoint falls back to the one before; a checkpoint asked for by number is refused.
    """

    gravity = 3
