"""Python's cyclic garbage collection between steps, where all ranks run it after the same one.

An automatic collection begins at an allocation, on each rank at another time, and all others wait for that
rank in their next collective. Source: torchtitan (Liang et al. 2024) and Megatron-LM collect so, too.

Objects are not frozen: nothing looks through old ones but the rare full collections, and those that a run
froze would be kept in a process that goes on to the next run.
"""

from __future__ import annotations

import gc
from types import TracebackType

YOUNG, FULL = 50, 1000
"""Steps between collections of young objects, and of all."""


class SteppedCollection:
    """Context in which Python collects garbage in `after_step` only."""

    def __init__(self) -> None:
        self._steps = 0

    def __enter__(self) -> SteppedCollection:
        self._before = gc.isenabled()
        gc.disable()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._before:
            gc.enable()

    def after_step(self) -> None:
        """Collect what is due after as many steps as there were calls; after the first what starting left."""
        self._steps += 1
        if self._steps == 1 or self._steps % FULL == 0:
            gc.collect()
        elif self._steps % YOUNG == 0:
            gc.collect(1)
