"""Report of a rank's error to the user: written once to a file, and shown once by the launcher.

A rank that dies is noticed by torch's elastic agent (`launch/local.py`), one that hangs by the time limits of
process groups (`parallel/process_groups.py`) and of host messages (`parallel/control.py`).

The file is the one that torch's elastic agent names in TORCHELASTIC_ERROR_FILE, in the agent's own JSON form,
so a plain torchrun shows it as well.
"""

from __future__ import annotations

import json
import os
import signal
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshwright import atomic
from meshwright.spec import UserError
from meshwright.spec.errors import DataError, NumericalError, Stopped, StorageError

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

INTERRUPTED = 130
"""Exit code of an interruption (128 + SIGINT)."""

KINDS = {kind.code: kind for kind in (UserError, StorageError, DataError, NumericalError)}
"""Errors whose sentence says it all, by exit code."""

ECHO_SECONDS = 10
"""A rank that dies this much later than the first was ended by the agent, which gives it 30 s to go."""

ECHOES = ("onnection reset by peer", "onnection closed by peer", "roken pipe", "remote process exited")
"""Messages of gloo and NCCL on a rank whose peer is gone."""


class RanksFailed(Exception):  # noqa: N818 - it says what happened
    """A rank ended in a way that is not a user's mistake; `code` is what the process should exit with."""

    def __init__(self, message: str, code: int, details: str = "") -> None:
        super().__init__(message)
        self.code, self.details = code, details


@dataclass(frozen=True)
class Outcome:
    """How the ranks ended: code 0, or the exit code, sentence, and traceback or last lines of the cause.

    `stopped` tells that a signal had asked for the end.
    """

    code: int = 0
    sentence: str = ""
    details: str = ""
    stopped: bool = False

    def raise_for_failure(self) -> None:
        """Raise what a single process would have: `UserError`, `Stopped`, or else `RanksFailed`."""
        if self.stopped:
            raise Stopped(self.sentence, self.code)
        if self.code in KINDS and self.sentence:
            raise KINDS[self.code](self.sentence)
        if self.code:
            raise RanksFailed(self.sentence, self.code, self.details)


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
        "py_callstack": sentence if plain else "".join(traceback.format_exception(error)),
    }
    atomic.write(Path(name), json.dumps({"message": {"message": sentence, "extraInfo": extra}}))


@dataclass(frozen=True)
class _Failure:
    """One rank's end, and what it left behind."""

    rank: int
    exitcode: int
    seconds: float
    sentence: str = ""
    traceback: str = ""
    plain_code: int | None = None
    """The exit code where the sentence says it all: a user's mistake, or a signal."""


def outcome(failures: Mapping[int, ProcessFailure], ranks: int, stderrs: Mapping[int, Path]) -> Outcome:
    """The cause among the ranks that failed, as one sentence.

    A user's mistake on any rank comes first; then a rank that a signal killed, the earliest recorded error,
    and an unrecorded exit. Errors of other ranks, whose collectives broke off, are its echoes.
    `stderrs` maps a rank to the file of its stderr, where it has one.
    """
    found = [_read(rank, failure) for rank, failure in failures.items()]
    first = min(failure.seconds for failure in found)
    cause = min(found, key=lambda failure: (_order(failure, first), failure.seconds, failure.rank))
    if cause.plain_code is not None:
        return Outcome(cause.plain_code, cause.sentence, stopped=cause.plain_code not in KINDS)
    who = f"rank {cause.rank} of {ranks}"
    log = stderrs.get(cause.rank)
    if cause.sentence:
        sentence = cause.sentence.splitlines()[0]
        return Outcome(max(cause.exitcode, 1), f"{who} failed with {sentence}", cause.traceback)
    if cause.exitcode < 0:
        name = signal.Signals(-cause.exitcode).name
        hint = "; the system may have run out of memory" if name == "SIGKILL" else ""
        return Outcome(128 - cause.exitcode, f"{who} was ended by {name}{hint}", _last_lines(log))
    return Outcome(cause.exitcode, f"{who} ended with exit code {cause.exitcode}", _last_lines(log))


def last_words(log_dir: Path) -> tuple[str, int] | None:
    """The sentence and exit code that the ranks of a stopped run left: those of the lowest rank with any."""
    for file in sorted(log_dir.glob("*/attempt_0/*/error.json")):
        message = json.loads(file.read_text(encoding="utf-8"))["message"]
        if isinstance(message, dict) and (code := message["extraInfo"].get("plain_code")) is not None:
            return str(message["message"]), int(code)
    return None


def _read(rank: int, failure: ProcessFailure) -> _Failure:
    message: Any = failure.error_file_data.get("message")
    if not isinstance(message, dict):  # nothing was recorded
        return _Failure(rank, failure.exitcode, failure.timestamp)
    extra = message["extraInfo"]
    words = message["message"], extra["py_callstack"], extra["plain_code"]
    return _Failure(rank, failure.exitcode, extra["time"], *words)


def _order(failure: _Failure, first: float) -> int:
    """How likely a failure is an echo of another: 0 for surely none."""
    if failure.plain_code is not None:
        return 0
    if failure.sentence:
        return 4 if any(words in failure.sentence for words in ECHOES) else 2
    if failure.exitcode > 0:
        return 3
    ended_by_agent = failure.exitcode == -signal.SIGTERM or failure.seconds > first + ECHO_SECONDS
    return 5 if ended_by_agent else 1


def _last_lines(path: Path | None, lines: int = 20) -> str:
    if path is None:
        return ""
    return "\n".join(path.read_text(encoding="utf-8", errors="replace").splitlines()[-lines:])
