"""Report of a rank's error to the user: written once to a file, and shown once by the launcher.

A rank that dies or hangs is noticed by its supervisor (`launch/supervisor.py`); without one, by the time
limits of process groups (`comm/process_groups.py`) and of host messages (`comm/control.py`).

The file is the one that torch's elastic agent names in TORCHELASTIC_ERROR_FILE, in that agent's JSON form, so
a plain torchrun shows it as well.
"""

from __future__ import annotations

import json
import os
import signal
import time
import traceback
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshwright import atomic
from meshwright.spec import UserError
from meshwright.spec.errors import (
    CRASH_LOOP,
    ECHOES,
    JOB_ENDS,
    CollectiveError,
    DataError,
    NumericalError,
    Stopped,
    StorageError,
    UnhealthyHostError,
)

INTERRUPTED = 130
"""Exit code of an interruption (128 + SIGINT)."""

KINDS = {
    kind.code: kind
    for kind in (
        UserError,
        CollectiveError,
        StorageError,
        DataError,
        NumericalError,
        UnhealthyHostError,
    )
}
"""Errors whose sentence says it all, by exit code."""

FATAL = tuple(sorted((*(code for code, kind in KINDS.items() if not kind.restart), CRASH_LOOP)))
"""Exit codes of ends that no new start of the same command mends, by which a job is not started again."""

_MEMORY = {
    True: "; the system has killed a process of this container or job for want of memory",
    False: "",
    None: "; the system may have run out of memory",
}
"""Hint about a rank that was ended by SIGKILL, by whether the system did so for want of memory."""


class RanksFailed(Exception):  # noqa: N818 - it says what happened
    """A rank ended in a way that is not a user's mistake; `code` is what the process should exit with."""

    def __init__(self, message: str, code: int, details: str = "") -> None:
        super().__init__(message)
        self.code, self.details = code, details


@dataclass(frozen=True)
class Outcome:
    """How the ranks ended: code 0, or the exit code, sentence, and traceback or last lines of the cause.

    `stopped` tells that a signal had asked for the end, `restart` that a new start may mend what the sentence
    says, and `of_another_run` that the run of the folder goes on without what has ended.
    """

    code: int = 0
    sentence: str = ""
    details: str = ""
    stopped: bool = False
    restart: bool = False
    of_another_run: bool = False

    @property
    def leaves(self) -> bool:
        """True if the ranks have saved since the job of their host ends, which no signal has told."""
        return self.stopped and JOB_ENDS in self.sentence

    @property
    def final(self) -> bool:
        """True for a success, a stop, and a failure that no new start can mend."""
        return self.code == 0 or self.stopped or (self.code in KINDS and not self.restart)

    def recordable(self, steps: int) -> bool:
        """True for a failure, after so many completed steps, that the run's record should have.

        A mistake before the first step may be about the record itself, such as that it is of another run.
        """
        return self.code != 0 and not self.stopped and (steps > 0 or not self.final)

    def raise_for_failure(self) -> None:
        """Raise what a single process would have: `UserError`, `Stopped`, or else `RanksFailed`."""
        error: Stopped | UserError
        if self.stopped:
            error = Stopped(self.sentence, self.code)
        elif self.code in KINDS and self.sentence:
            error = KINDS[self.code](self.sentence)
        elif self.code:
            raise RanksFailed(self.sentence, self.code, self.details)
        else:
            return
        error.of_another_run = self.of_another_run
        raise error


def exit_code(error: BaseException) -> int:
    """The exit code of a process that ends with `error`."""
    if isinstance(error, (UserError, RanksFailed, Stopped)):
        return error.code
    return INTERRUPTED if isinstance(error, KeyboardInterrupt) else 1


def record(error: BaseException) -> None:
    """Write `error` into the agent's error file, if the agent names one; the first of a process stays."""
    name = os.environ.get("TORCHELASTIC_ERROR_FILE")
    plain = isinstance(error, (UserError, Stopped))
    if not name or Path(name).exists():
        return
    if isinstance(error, (SystemExit, KeyboardInterrupt)) and not plain:
        return
    sentence = str(error) if plain else f"{type(error).__name__}: {error}"
    extra = {
        "timestamp": str(int(time.time())),
        "time": time.time(),
        "plain_code": exit_code(error) if plain else None,
        "restart": isinstance(error, UserError) and error.restart,
        "of_another_run": isinstance(error, UserError) and error.of_another_run,
        "py_callstack": sentence if plain else "".join(traceback.format_exception(error)),
    }
    atomic.write(Path(name), json.dumps({"message": {"message": sentence, "extraInfo": extra}}))


@contextmanager
def errors_recorded() -> Iterator[None]:
    """Block whose error is recorded before what is around it ends."""
    try:
        yield
    except BaseException as error:
        record(error)
        raise


@contextmanager
def errors_unrecorded() -> Iterator[None]:
    """Block whose errors are caught around it, and are not the end of this process."""
    name = os.environ.pop("TORCHELASTIC_ERROR_FILE", None)
    try:
        yield
    finally:
        if name is not None:
            os.environ["TORCHELASTIC_ERROR_FILE"] = name


@dataclass(frozen=True)
class RankEnd:
    """One rank's end: its exit code (minus the number of a signal), and when it was noticed (`time.time`).

    `error` is the file that `record` writes, `log` that of its stderr, if it has one. `killed` tells that the
    launcher ended it because of another rank.
    """

    code: int
    seconds: float
    error: Path
    log: Path | None = None
    killed: bool = False


@dataclass(frozen=True)
class _Failure:
    """One rank's failure, and what it recorded of it."""

    rank: int
    end: RankEnd
    seconds: float
    sentence: str = ""
    traceback: str = ""
    plain_code: int | None = None
    """The exit code where the sentence says it all: a user's mistake, or a signal."""
    restart: bool = False
    of_another_run: bool = False


def outcome(ends: Mapping[int, RankEnd], ranks: int, out_of_memory: bool | None = None) -> Outcome:
    """The cause among the ranks that failed, as one sentence.

    `out_of_memory` tells whether the system killed a process for want of memory meanwhile, if it is known.

    A user's mistake on any rank comes first; then a rank that a signal killed, the earliest recorded error,
    and an unrecorded exit. Errors of other ranks, whose collectives broke off, are its echoes.
    """
    failures = [_read(rank, end) for rank, end in ends.items() if end.code != 0]
    cause = min(failures, key=lambda failure: (_order(failure), failure.seconds, failure.rank))
    if cause.plain_code is not None:
        stopped = cause.plain_code not in KINDS
        return Outcome(
            cause.plain_code, cause.sentence,
            stopped=stopped, restart=cause.restart, of_another_run=cause.of_another_run,
        )  # fmt: skip
    who, code = f"rank {cause.rank} of {ranks}", cause.end.code
    if cause.sentence:
        sentence = cause.sentence.splitlines()[0]
        return Outcome(max(code, 1), f"{who} failed with {sentence}", cause.traceback)
    if code < 0:
        name = signal.Signals(-code).name
        hint = _MEMORY[out_of_memory] if name == "SIGKILL" else ""
        return Outcome(128 - code, f"{who} was ended by {name}{hint}", _last_lines(cause.end.log))
    return Outcome(code, f"{who} ended with exit code {code}", _last_lines(cause.end.log))


def last_words(errors: Iterable[Path]) -> tuple[int, str] | None:
    """The exit code and sentence of a stopped run, from the first of its ranks' error files with any."""
    for file in errors:
        message = _message(file)
        if message is not None and (code := message["extraInfo"]["plain_code"]) is not None:
            return int(code), str(message["message"])
    return None


def _message(file: Path) -> dict[str, Any] | None:
    """The content of an error file; None where nothing was recorded."""
    if not file.exists():
        return None
    message = json.loads(file.read_text(encoding="utf-8"))["message"]
    return message if isinstance(message, dict) else None


def _read(rank: int, end: RankEnd) -> _Failure:
    message = _message(end.error)
    if message is None:
        return _Failure(rank, end, end.seconds)
    extra = message["extraInfo"]
    words = message["message"], extra["py_callstack"], extra["plain_code"]
    return _Failure(rank, end, extra["time"], *words, extra["restart"], extra["of_another_run"])


def _order(failure: _Failure) -> int:
    """How likely a failure is an echo of another: 0 for surely none."""
    if failure.plain_code is not None:
        return 0
    if failure.sentence:
        return 4 if any(words in failure.sentence for words in ECHOES) else 2
    if failure.end.killed:
        return 5
    return 3 if failure.end.code > 0 else 1


def _last_lines(path: Path | None, lines: int = 20) -> str:
    if path is None or not path.exists():  # a rank that was killed at once has not made it
        return ""
    return "\n".join(path.read_text(encoding="utf-8", errors="replace").splitlines()[-lines:])
