"""Who watches a run: five calls, which the trainer makes on rank 0 without knowing who answers them.

`info` of `on_start` holds "spec" (the run's JSON), "step" (steps completed before this start: 0, or those of
the checkpoint that it resumes from), "last_step" (after which this start ends), "total_steps" (of the whole
run) and whatever else describes the run, such as "parameters", "layout" and "device".
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, Protocol

from meshwright.spec import UserError


class Observer(Protocol):
    """Callbacks of the training loop, in this order: one start, steps with evaluations and events, one
    end."""

    def on_start(self, info: dict[str, Any]) -> None:
        """The run begins, or goes on from a checkpoint."""

    def on_step(self, row: dict[str, Any]) -> None:
        """A training row: "step" (1-based) with loss, grad_norm, lr, tokens_per_second, mfu, ..."""

    def on_eval(self, row: dict[str, Any]) -> None:
        """A validation row: "step" with val_loss, of text val_bits_per_byte, with `train.ema` val_loss_ema.

        With a mixture, val_sources has the loss and, of text, bits_per_byte of each source.
        """

    def on_event(self, kind: str, fields: dict[str, Any]) -> None:
        """Something that happened beside the steps: a checkpoint, a skipped step."""

    def on_end(self, result: dict[str, Any]) -> None:
        """The run reached its last step."""

    def close(self) -> None:
        """Release files, threads and the terminal, however the run ended; may be called twice."""


class Observers(ExitStack):
    """Several observers as one, called in the order given.

    What only watches a run does not end it: an observer that fails after the start is reported in a warning,
    once until it works again, and misses that call. `close`, or leaving its `with` block, closes every
    observer, also when one of them fails.
    """

    def __init__(self, observers: Sequence[Observer]) -> None:
        super().__init__()
        self.observers = tuple(observers)
        self._failing: set[int] = set()
        for observer in reversed(self.observers):  # callbacks run in the reverse order
            self.callback(observer.close)

    def on_start(self, info: dict[str, Any]) -> None:
        for observer in self.observers:
            observer.on_start(info)

    def on_step(self, row: dict[str, Any]) -> None:
        self._tell(lambda observer: observer.on_step(row))

    def on_eval(self, row: dict[str, Any]) -> None:
        self._tell(lambda observer: observer.on_eval(row))

    def on_event(self, kind: str, fields: dict[str, Any]) -> None:
        self._tell(lambda observer: observer.on_event(kind, fields))

    def on_end(self, result: dict[str, Any]) -> None:
        """Tell every observer; then raise the first `UserError`, as of a result that cannot be written."""
        errors = self._tell(lambda observer: observer.on_end(result))
        for error in errors:
            if isinstance(error, UserError):
                raise error

    def _tell(self, call: Callable[[Observer], None]) -> list[Exception]:
        """Make a call of each observer, and return the errors of those that failed."""
        errors: list[Exception] = []
        for number, observer in enumerate(self.observers):
            try:
                call(observer)
            except Exception as error:
                errors.append(error)
                if number not in self._failing:
                    told = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
                    warnings.warn(
                        f"{type(observer).__name__} misses a part of the run, which goes on: {told}",
                        stacklevel=3,
                    )
                self._failing.add(number)
            else:
                self._failing.discard(number)
        return errors
