"""Who watches a run: five calls, which the trainer makes on rank 0 without knowing who answers them.

`info` of `on_start` holds "spec" (the run's JSON), "step" (steps completed before this start: 0, or those of
the checkpoint that it resumes from), "last_step" (after which this start ends), "total_steps" (of the whole
run) and whatever else describes the run, such as "parameters", "layout" and "device".
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any, Protocol


class Observer(Protocol):
    """Callbacks of the training loop, in this order: one start, steps with evaluations and events, one
    end."""

    def on_start(self, info: dict[str, Any]) -> None:
        """The run begins, or goes on from a checkpoint."""

    def on_step(self, row: dict[str, Any]) -> None:
        """A training row: "step" (1-based) with loss, grad_norm, lr, tokens_per_second, mfu, ..."""

    def on_eval(self, row: dict[str, Any]) -> None:
        """A validation row: "step" with val_loss and val_bits_per_byte."""

    def on_event(self, kind: str, fields: dict[str, Any]) -> None:
        """Something that happened beside the steps: a checkpoint, a skipped step."""

    def on_end(self, result: dict[str, Any]) -> None:
        """The run reached its last step."""

    def close(self) -> None:
        """Release files, threads and the terminal, however the run ended; may be called twice."""


class Observers(ExitStack):
    """Several observers as one, called in the order given.

    `close`, or leaving its `with` block, closes every observer, also when one of them fails.
    """

    def __init__(self, observers: Sequence[Observer]) -> None:
        super().__init__()
        self.observers = tuple(observers)
        for observer in reversed(self.observers):  # callbacks run in the reverse order
            self.callback(observer.close)

    def on_start(self, info: dict[str, Any]) -> None:
        for observer in self.observers:
            observer.on_start(info)

    def on_step(self, row: dict[str, Any]) -> None:
        for observer in self.observers:
            observer.on_step(row)

    def on_eval(self, row: dict[str, Any]) -> None:
        for observer in self.observers:
            observer.on_eval(row)

    def on_event(self, kind: str, fields: dict[str, Any]) -> None:
        for observer in self.observers:
            observer.on_event(kind, fields)

    def on_end(self, result: dict[str, Any]) -> None:
        for observer in self.observers:
            observer.on_end(result)
