"""Snapshots of a run that has no memory for any; `snapshots.py` has those of one that does."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from meshwright.checkpoint.save_plan import Tensors


class NoSnapshots:
    """Snapshots where there is no memory for any: none is due, and none is found."""

    def due(self, step: int) -> bool:
        """Return True, on all ranks alike, if the state after `step` is to be kept."""
        return False

    def save(
        self, step: int, tensors: Tensors, state: Callable[[], Mapping[str, Any]], form: str = ""
    ) -> None:
        """Keep `tensors` (this rank's) of `step`, and the JSON `state`, equal on all ranks."""
        raise AssertionError("no snapshot is due")

    def fence(self) -> None:
        """Let what training issues from now on, which may change the state, wait for copies of it."""

    def settle(self) -> None:
        """Return when the last snapshot is whole; raise the error that it has ended in, if any."""

    def clear(self) -> None:
        """Drop what this rank has kept."""

    def newest(self) -> int | None:
        """Return the last step of which the ranks together have kept all parts, or None; collective."""
        return None

    def load(
        self, step: int, tensors: Tensors, check: Callable[[dict[str, Any]], None], form: str = ""
    ) -> dict[str, Any]:
        """Fill `tensors` in place from the snapshot of `step`, and return its state."""
        raise AssertionError("there is no snapshot")
