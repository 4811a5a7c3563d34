"""The second tier of a run that keeps its checkpoints in one place; `second_tier.py` has that of others."""

from __future__ import annotations

from pathlib import Path

from meshwright.checkpoint.fetch import CheckState
from meshwright.checkpoint.uploads import Event


class NoSecondTier:
    """A second tier where there is none: nothing is sent, waited for or fetched."""

    def published(self, path: Path) -> None:
        """On rank 0: take note of a checkpoint that was just published."""

    def send(self, path: Path) -> None:
        """On rank 0: take note of the checkpoint that the run starts from, or goes back to."""

    def in_use(self) -> set[str]:
        """Return the names of checkpoints that must not be removed yet."""
        return set()

    def events(self) -> list[Event]:
        """Return what has happened since the last call, as (kind, fields); nothing but on rank 0."""
        return []

    def fetch(self, check: CheckState) -> None:
        """Fetch the newest checkpoint if the directory has none, or an older one; collective.

        `check` is given its state first, and may raise `UserError`.
        """

    def wait(self, seconds: float) -> None:
        """Return when all is sent, after so many seconds of rank 0 at most; collective."""

    def close(self) -> None:
        """Send no more, and say what is not sent."""
