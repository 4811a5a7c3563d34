"""Faults in a run from outside: they are armed when they are due, and what becomes of each is taken down."""

from __future__ import annotations

import json
import math
import os
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any

from meshwright.chaos.faults import KINDS, Fault, FaultPlan, Hit
from meshwright.checkpoint.directory import history
from meshwright.checkpoint.disk import LATEST
from meshwright.runs.record import Row, read_run
from meshwright.runs.record import now as utc_now

POLL_S = 0.02
TOLD_S = 10.0
"""The run gets so long to record an event that reports a fault, before the next one is armed."""
ENDS = ("failure", "hang")
"""Kinds of a supervisor's events after which all ranks have ended."""
INTERNAL = ("noticed", "furthest", "stacks", "dumps")
"""Fields of a supervisor's event that the log of faults leaves out."""


@dataclass
class Course:
    """Course of one fault: where it hit, and what was reported about it; times are `time.monotonic`."""

    fault: Fault
    hit: Hit
    noticed: float | None = None
    told: str = ""
    """Kind of the event that the supervisor told, "" if it told none."""
    message: str = ""
    target: str | None = None
    """Name of the checkpoint that was damaged, or LATEST."""

    @property
    def placed(self) -> Fault:
        """The fault at the place where it hit, which hits it again in a replay."""
        return replace(self.fault, step=self.hit.step, generation=max(0, self.hit.starts - 1))


@dataclass
class Chaos:
    """Arms the faults of a plan one after another while the context lasts, and logs what becomes of them.

    Fault i is armed `due[i]` seconds after the start, and not before the run has got over the one before;
    without `due` all are armed at the start, each for its own place. `log` is a file of JSON lines, `run` the
    run's folder, and `checkpoints` the directory of its checkpoints.
    """

    plan: FaultPlan
    due: Sequence[float] | None
    log: Path
    run: Path
    checkpoints: Path
    unexplained: list[str] = field(default_factory=list)
    """Sentences of failures that no fault explains."""

    def __post_init__(self) -> None:
        self.began, self.began_at = time.monotonic(), datetime.now(UTC)
        self._ended = threading.Event()
        self._writing = threading.Lock()
        self._thread = threading.Thread(target=self._watch, name="chaos", daemon=True)
        self._told: dict[int, tuple[float | None, str, str]] = {}
        self._targets: dict[int, str] = {}
        self._logged: set[tuple[int, str]] = set()

    def __enter__(self) -> Chaos:
        self.log.write_text("", encoding="utf-8")
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join()
        for number in range(len(self.plan.hits.faults)):
            self._note(number)

    def courses(self) -> dict[int, Course]:
        """Return the courses of the faults that have hit, by their numbers."""
        hits = self.plan.hits
        found = {}
        for number, fault in enumerate(hits.faults):
            if hits[number].acted:
                told = self._told.get(number, (None, "", ""))
                found[number] = Course(fault, hits[number], *told, self._targets.get(number))
        return found

    def tell(self, kind: str, fields: dict[str, Any]) -> None:
        """Take down what the supervisor has noticed; after a failure or a hang no rank runs meanwhile."""
        noticed, message = fields.get("noticed", time.monotonic()), str(fields.get("message", ""))
        number = self._cause()
        if number is not None and (kind in ENDS or self.plan.hits.faults[number].kind == kind):
            self._told[number] = noticed, kind, message
            furthest = max(self.plan.hits[number].acted_step, int(fields.get("furthest", 0)))
            self.plan.hits.write(number, acted_step=furthest)
        elif kind in ENDS:
            self.unexplained.append(message)
        shown = {name: value for name, value in fields.items() if name not in INTERNAL}
        self._write(kind, noticed, {"fault": number, **shown})
        if number is not None and kind in ENDS and KINDS[self.plan.hits.faults[number].kind].damages:
            target = damage(self.plan.hits.faults[number], self.checkpoints, set(self._targets.values()))
            if target is not None:
                self._targets[number] = target
            self._write("damage", time.monotonic(), {"fault": number, "target": target})

    def _cause(self) -> int | None:
        """Return the fault that has hit last, unless it has been told or the run has got over it."""
        number = self.plan.hits.last()
        if number is None or number in self._told:
            return None
        hit = self.plan.hits[number]
        return number if hit.acted and not hit.back else None

    def event(self, number: int, target: str | None, until: float = math.inf) -> tuple[Row, float] | None:
        """Return the first event of the run's record that reports a fault before a time, and its own time.

        `target` is the name of what was damaged; times are `time.monotonic`.
        """
        expected = KINDS[self.plan.hits.faults[number].kind].event
        if expected is None or not (self.run / "run.json").exists():
            return None
        kind, words = expected[0], expected[1].format(target=target)
        acted = self.plan.hits[number].acted / 1e9 - 0.002  # the record's times are in milliseconds
        for event in read_run(self.run).events:
            when = self.began + (datetime.fromisoformat(event["time"]) - self.began_at).total_seconds()
            if event["kind"] == kind and words in str(event) and acted <= when < until:
                return event, when
        return None

    def _watch(self) -> None:
        hits = self.plan.hits
        if self.due is None:
            for number in range(len(hits.faults)):
                hits.write(number, armed=1)
        for number in range(len(hits.faults)):
            if self.due is not None:
                if self._ended.wait(max(0.0, self.began + self.due[number] - time.monotonic())):
                    return
                hits.write(number, armed=1)
            while not self._over(number):
                if self._ended.wait(POLL_S):
                    return
                self._note(number)
            self._note(number)

    def _over(self, number: int) -> bool:
        """True if the run has got over a fault and has recorded the event that reports it, or had time to."""
        back, kind = self.plan.hits[number].back, KINDS[self.plan.hits.faults[number].kind]
        if not back or kind.event is None or kind.damages:
            return back > 0
        return time.monotonic() > back / 1e9 + TOLD_S or self.event(number, None) is not None

    def _note(self, number: int) -> None:
        """Log that a fault has hit, and that the run has got over it, each once."""
        hits = self.plan.hits
        hit = hits[number]
        course = Course(hits.faults[number], hit)
        if hit.acted and (number, "fault") not in self._logged:
            self._logged.add((number, "fault"))
            self._write("fault", hit.acted / 1e9, {"fault": number, **asdict(course.placed)})
        if hit.back and (number, "back") not in self._logged:
            self._logged.add((number, "back"))
            self._write("back", hit.back / 1e9, {"fault": number, "resumed_step": hit.resumed_step})

    def _write(self, event: str, when: float, fields: dict[str, Any]) -> None:
        row = {"event": event, "at": round(when - self.began, 4), **fields, "time": utc_now()}
        with self._writing, self.log.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")


def damage(fault: Fault, checkpoints: Path, damaged: set[str]) -> str | None:
    """Damage the newest checkpoint, or LATEST, as a fault says, and return its name.

    It stays whole, and None is returned, where it is damaged already or there is no other good one.
    """
    good = [path for path in history(checkpoints) if path.name not in damaged and path.is_dir()]
    if len(good) < 2 or good[0] != history(checkpoints)[0]:
        return None
    if fault.kind == "cut-latest":
        os.truncate(checkpoints / LATEST, 0)
        return LATEST
    files = [path for path in sorted(good[0].iterdir()) if path.stat().st_size]
    path = files[fault.number % len(files)]
    size = path.stat().st_size
    if fault.kind == "cut-checkpoint":
        os.truncate(path, size // 2)
        return good[0].name
    with path.open("r+b") as file:
        file.seek(fault.number % size)
        byte = file.read(1)[0]
        file.seek(fault.number % size)
        file.write(bytes([byte ^ 1 << fault.number % 8]))
    return good[0].name
