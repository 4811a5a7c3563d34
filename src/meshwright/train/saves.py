"""Saves of a training run: when one is due, what follows from one that fails, and what is reported."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from meshwright.checkpoint.errors import SaveError
from meshwright.checkpoint.interval import AutoInterval
from meshwright.checkpoint.retention import is_permanent
from meshwright.checkpoint.save_plan import Tensors
from meshwright.checkpoint.store import CheckpointStore
from meshwright.comm.control import Control
from meshwright.spec import RunSpec
from meshwright.train.callbacks import Observers

MOST_FAILED = 3
"""Saves in a row that may fail where `recovery.on_save_error` is "continue"; then one more is tried."""
RETRY_S = 2.0
"""Seconds before a last save that failed is tried once more."""


class Saves:
    """The saves of one run on one rank. All ranks call `save`, `settle` and `save_last` at the same steps.

    Ranks may learn of the end of a save behind training a step apart, but have counted as many failures when
    they save again.
    """

    def __init__(self, spec: RunSpec, control: Control, store: CheckpointStore, observers: Observers) -> None:
        self.store, self.observers = store, observers
        self.saved: int | None = None
        """The step that was saved last, or is being saved."""
        self._spec = spec
        self._last = 0
        """The step at which this start of the run began, or tried to save last."""
        self._writing: int | None = None
        """The step of a save whose end has not been told."""
        self._failed = 0
        """Saves in a row that failed."""
        auto = spec.checkpoint.every == "auto"
        self._auto = AutoInterval(control, spec.recovery.mtbf_hours) if auto else None

    def due(self, step: int) -> bool:
        """True if the step just done is to be saved."""
        if is_permanent(step, self._spec.checkpoint.keep_every):
            return True
        if self._auto is not None:
            return step - self._last >= self._auto.steps
        every = self._spec.checkpoint.every
        return isinstance(every, int) and every > 0 and step % every == 0

    def start(self, step: int, saved: bool = True) -> None:
        """Go on from `step`; `saved` tells that its state is on disk."""
        self._last = step
        self.saved = step if saved else None
        if saved:
            self.store.copy(step)

    def note_step(self, seconds: float) -> None:
        """Note the duration of a step, from which the interval between saves may follow."""
        if self._auto is not None:
            self._auto.note_step(seconds, self._writing is not None)

    def save(self, step: int, tensors: Tensors, kept: Mapping[str, Any], asynchronous: bool) -> None:
        """Save the state after `step`; a failure of the disk is told, or raises SaveError: `_note_failed`."""
        begun = time.perf_counter()
        self.settle()
        if self._auto is not None and (chosen := self._auto.choose()) is not None:
            self.observers.on_event("checkpoint_interval", chosen)
        self._last = self._writing = step
        try:
            self.store.save(step, tensors, kept, asynchronous and self._failed < MOST_FAILED)
            self.saved = step
            if self._auto is not None:
                self._auto.note_save(time.perf_counter() - begun)
        except SaveError as error:
            self._note_failed(error)
        self.tell()

    def save_last(self, step: int, save: Callable[[], None]) -> None:
        """See that `step`, the last one, is on disk; `save` saves it, and is called again if that fails."""
        self.settle()
        if self.saved != step:
            save()
        if self.saved != step:
            self._failed = MOST_FAILED  # no later save would make up for it
            time.sleep(RETRY_S)
            save()

    def settle(self) -> None:
        """Wait for the save in flight, and learn on every rank how it ended."""
        try:
            self.store.wait()
        except SaveError as error:
            self._note_failed(error)
        self.tell()

    def poll(self) -> None:
        """Learn how a save behind training ended, without waiting for it; called at every step."""
        try:
            self.store.poll()
        except SaveError as error:
            self._note_failed(error)

    def close(self) -> None:
        """Finish the save in flight, and give the folder back; a failure of the disk is told as in `save`.

        So it does not take the place of another error that ends the run, from which a new start may go on.
        """
        try:
            self.store.close()
        except SaveError as error:
            self._note_failed(error)
        self._tell_copies()

    def tell(self) -> None:
        """Report a checkpoint when it is published, which with an asynchronous save is some steps later, and
        what has become of its copy in the second tier."""
        if self._writing is not None and self.store.published == self._writing:
            self.observers.on_event("checkpoint", {"step": self._writing})
            self._writing, self._failed = None, 0
        self._tell_copies()

    def _tell_copies(self) -> None:
        for kind, fields in self.store.second_tier.events():
            self.observers.on_event(kind, fields)

    def wait_for_copies(self, seconds: float) -> None:
        """Return when all is in the second tier, after so many seconds of rank 0 at most; collective."""
        self.store.second_tier.wait(seconds)
        self.tell()

    def _note_failed(self, error: SaveError) -> None:
        """End the run for a save that failed, or report it, as `recovery.on_save_error` says.

        A failure that this rank has noted before is not noted again.
        """
        if self._writing is None:
            return
        step, self._writing, self.saved = self._writing, None, None
        self._failed += 1
        if self._auto is not None:
            self._auto.note_save(None)
        if self._spec.recovery.on_save_error == "stop":
            raise error
        if self._failed > MOST_FAILED:
            raise SaveError(f"{error}; attempts before it failed, too") from error
        self.observers.on_event("save_failed", {"step": step, "in_a_row": self._failed})
        self.store.warnings.append(f"{error}; the run tries again at its next save")
