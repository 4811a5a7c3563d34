"""Callbacks of an engine, with the names of transformers' `TrainerCallback`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any


class EngineCallback:
    """Calls that an `Engine` makes on every rank; these do nothing. An error ends the engine's call."""

    def on_step_begin(self, engine: Any) -> None:
        """The first `forward_backward` of a step begins."""

    def on_step_end(self, engine: Any, row: dict[str, Any]) -> None:
        """A step is done; `row` is what `step` returns."""

    def on_log(self, engine: Any, row: dict[str, Any]) -> None:
        """As `on_step_end`, every `train.log_every` steps."""

    def on_save(self, engine: Any, checkpoint: Path) -> None:
        """A checkpoint is published."""


def called(callbacks: Sequence[EngineCallback], name: str, *arguments: Any) -> None:
    """Make a call of each callback, in order."""
    for callback in callbacks:
        getattr(callback, name)(*arguments)
