"""Commands with a limit in seconds, whose output goes to a file."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PATHS = [str(ROOT / part) for part in ("src", "bench", "tests", "tests/gpu")]
GRACE = 5.0
"""Seconds that a command has to end after it was asked to."""


def environment(**more: str) -> dict[str, str]:
    """The variables of a command: the source tree comes first on Python's path."""
    before = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    path = [*PATHS, *(each for each in before if each and each not in PATHS)]
    return os.environ | {"PYTHONPATH": os.pathsep.join(path)} | more


def run_limited(
    command: Sequence[str], seconds: float, log: Path, env: Mapping[str, str], own_group: bool = False
) -> int | None:
    """The exit code of a command; None for one that was stopped after so many seconds.

    With `own_group` all that it has started and left behind is ended, too.
    """
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, env=dict(env),
            cwd=ROOT, start_new_session=own_group,
        )  # fmt: skip
        try:
            return process.wait(max(0.0, seconds))
        except subprocess.TimeoutExpired:
            _signal(process, signal.SIGTERM, own_group)
            with suppress(subprocess.TimeoutExpired):
                process.wait(GRACE)
            return None
        finally:
            _signal(process, signal.SIGKILL, own_group)
            process.wait()


def _signal(process: subprocess.Popen[bytes], number: signal.Signals, group: bool) -> None:
    with suppress(ProcessLookupError, PermissionError):
        if group:
            os.killpg(process.pid, number)
        else:
            process.send_signal(number)


def last_lines(log: Path, number: int = 5) -> str:
    """The last lines of a log that say anything."""
    lines = [line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    return "\n".join(line[:300] for line in lines[-number:])


def last_object(log: Path) -> dict[str, Any] | None:
    """The last line of a log that is a JSON object; None without any."""
    for line in reversed(log.read_text(encoding="utf-8", errors="replace").splitlines()):
        if line.startswith("{"):
            with suppress(json.JSONDecodeError):
                found: dict[str, Any] = json.loads(line)
                return found
    return None


def python(*words: str) -> list[str]:
    """A command of this interpreter."""
    return [sys.executable, *words]
