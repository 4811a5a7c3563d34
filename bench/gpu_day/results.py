"""The results of a part: rows in a JSON file that is whole at any time, and what was left out."""

from __future__ import annotations

import json
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from meshwright.atomic import write

Row = dict[str, Any]
RUNNING, DONE, FAILED, STOPPED, LEFT_OUT = "running", "done", "failed", "stopped", "left out"
"""States of a part: a part that was stopped has reached its limit, and one that is left out was not begun."""


@dataclass
class Result:
    """The file of a part."""

    part: str
    kind: str
    state: str = RUNNING
    why: str = ""
    """The last lines of the log of a part that failed, or the reason why it is left out."""
    seconds: float = 0.0
    command: str = ""
    nominal: bool = False
    """True if the device was faked, so that times mean nothing."""
    rows: list[Row] = field(default_factory=list)
    left_out: list[Row] = field(default_factory=list)
    """Things that the part did not come to: `what` and `why`."""

    def save(self, path: Path) -> None:
        """Write the file; a reader finds the old results or the new ones."""
        write(path, json.dumps(asdict(self), indent=1) + "\n")

    @classmethod
    def read(cls, path: Path) -> Result:
        """The results in a file. Raises `OSError`."""
        return cls(**json.loads(path.read_text(encoding="utf-8")))


@dataclass
class Task:
    """The task of a part's process, which is handed to it as JSON."""

    part: str
    kind: str
    options: dict[str, Any]
    device: str
    """"cuda", or "fake" for one that is faked."""
    gpus: int
    seconds: float
    """From its start on the part may take so long."""
    out: str
    """Its file of results."""
    ranks: int = 1
    """Ranks that the part is started as."""


class Work:
    """A part at work: its options, the time that is left, and its results, which are written as they come."""

    def __init__(self, task: Task, writes: bool = True) -> None:
        self.task, self.options = task, task.options
        self.faked = task.device == "fake"
        self._until = time.monotonic() + task.seconds
        self._path = Path(task.out) if writes else None
        self.result = Result(task.part, task.kind, nominal=self.faked)
        self._save()

    @property
    def left(self) -> float:
        """Seconds until the part is stopped."""
        return self._until - time.monotonic()

    @property
    def folder(self) -> Path:
        """The folder of the day's results."""
        return Path(self.task.out).parent

    def add(self, row: Row) -> None:
        """Add a row to the results."""
        self.result.rows.append(row)
        print(json.dumps(row), flush=True)
        self._save()

    def leave_out(self, what: str, why: str = "no time was left") -> None:
        """Note that something was not done."""
        self.result.left_out.append({"what": what, "why": why})
        self._save()

    def attempt(self, told: Row, measure: Callable[[], Row]) -> None:
        """Add a row of what is `told` and measured; of an error its first line as `error`."""
        self.add(told | _attempted(measure))

    def add_to_last(self, measure: Callable[[], Row]) -> None:
        """Add what is measured to the last row, or `error`, as `attempt` does."""
        self.add(self.result.rows.pop() | _attempted(measure))

    def _save(self) -> None:
        if self._path is not None:
            self.result.save(self._path)


def _attempted(measure: Callable[[], Row]) -> Row:
    try:
        return measure()
    except Exception as error:
        traceback.print_exc()
        return {"error": reason_of(error)}


def reason_of(error: BaseException) -> str:
    """The type of an error and the first line of what it says."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:300] if lines else ''}"
