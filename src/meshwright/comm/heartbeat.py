"""A rank's heartbeat: where it is in its run, in memory that its supervisor reads.

A rank writes its step, its phase, and the collectives that it has started and waits for, into a few bytes
that it shares with the process that watches it: no message, no system call, about a microsecond a change.
Whoever reads it sees whether a rank moves, what it waits for, and how long it has waited in all.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from meshwright.comm import collective_log
from meshwright.comm.collective_log import CollectiveLog, GroupProgress

STEP_PHASES = ("data", "forward", "backward", "reduce", "optimiser")
"""Phases that each step has on each rank."""
PHASES = ("start", *STEP_PHASES, "save", "evaluate", "end")
"""Phases of a run."""
_FIELDS = struct.Struct("@qqqqqq32s")
"""In the machine's own form, since each number is then read and written whole."""
_OWN_BYTES = 128
BYTES = _OWN_BYTES + collective_log.BYTES
"""Room for one rank's heartbeat, and after it for what it publishes of its collectives: a multiple of a cache
line, so that ranks do not slow each other."""


class Beat(NamedTuple):
    """One rank's heartbeat."""

    changes: int
    """How often the heartbeat has been written; it grows as long as the rank moves."""
    step: int
    """Steps that the rank has completed."""
    phase: str
    started: int
    """Collectives that the rank has started in its present step."""
    waiting: int
    """Number of the collective that it waits for, from 1; 0 if it waits for none."""
    waited_ns: int
    """Time spent waiting since the rank began."""
    label: str
    """Axis and operation of the last collective that it waited for."""
    groups: tuple[GroupProgress, ...] = ()
    """Its collectives in each process group, where they are published."""

    @property
    def progress(self) -> tuple[int, ...]:
        """Numbers that change as long as the rank or its device moves."""
        return self.changes, *(each.finished for each in self.groups)

    @classmethod
    def of(cls, memory: memoryview, number: int) -> Beat:
        """Return heartbeat `number` of those in `memory`; one that was never written is all zeros."""
        offset = number * BYTES
        changes, step, phase, started, waiting, waited_ns, label = _FIELDS.unpack_from(memory, offset)
        text = label.rstrip(b"\0").decode()
        groups = tuple(GroupProgress.all_of(memory, offset + _OWN_BYTES))
        return cls(changes, step, PHASES[phase], started, waiting, waited_ns, text, groups)


class Heartbeat:
    """The writing side, for one thread at a time; without `memory` nobody reads it.

    `on_phase`, if set, is called with each phase and the number of completed steps, after they are written.
    """

    def __init__(self, memory: memoryview | None = None) -> None:
        self._memory = memoryview(bytearray(BYTES)) if memory is None else memory
        self._changes = self._step = self._phase = self._started = self._waiting = self._waited = 0
        self._label = b""
        self.on_phase: Callable[[str, int], None] | None = None
        self._stays = False
        self.collectives: CollectiveLog | None = None
        """Where collectives are noted, if somebody reads it."""

    def publish_collectives(self) -> CollectiveLog:
        """Publish from now on which collectives have been started and finished (`CollectiveLog.watch`)."""
        self.collectives = CollectiveLog(self._memory[_OWN_BYTES:BYTES])
        self.collectives.watch()
        return self.collectives

    @property
    def step(self) -> int:
        """Steps that the rank has completed."""
        return self._step

    @property
    def waited_ns(self) -> int:
        """Time spent waiting since the rank began."""
        return self._waited

    def phase(self, name: str, step: int | None = None) -> None:
        """Enter a phase; `step` is the number of completed steps, where that has changed."""
        if self._stays:
            return
        self._phase = PHASES.index(name)
        if step is not None:
            self._step, self._started = step, 0
        self._write()
        if self.on_phase is not None:
            self.on_phase(name, self._step)

    @contextmanager
    def stays(self) -> Iterator[None]:
        """Context in which the rank stays in its phase, such as "start" while code is compiled."""
        before, self._stays = self._stays, True
        try:
            yield
        finally:
            self._stays = before

    def start(self) -> int:
        """Count a collective that has been started, and return its number within the step."""
        self._started += 1
        self._write()
        return self._started

    @contextmanager
    def waits(self, label: str, number: int | None = None) -> Iterator[None]:
        """Wait inside the context: for a collective that has been started, or else for a new one.

        All ranks must wait alike. That may also be for the device, which ends what its rank has started.
        """
        self._waiting = self.start() if number is None else number
        self._label = label.encode()
        self._write()
        begun = time.monotonic_ns()
        try:
            yield
        finally:
            self._waited += time.monotonic_ns() - begun
            self._waiting = 0
            self._write()

    def _write(self) -> None:
        self._changes += 1
        _FIELDS.pack_into(
            self._memory,
            0,
            self._changes,
            self._step,
            self._phase,
            self._started,
            self._waiting,
            self._waited,
            self._label,
        )
