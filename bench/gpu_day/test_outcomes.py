"""A plugin of pytest: each test's outcome as a line of a file as soon as it is known.

The file is that of the variable GPU_DAY_OUTCOMES. A test that takes longer than GPU_DAY_TEST_SECONDS ends the
process with the stacks of its threads, since a device that hangs lets nothing else end it.
"""

from __future__ import annotations

import faulthandler
import json
import os
from collections.abc import Iterator
from typing import Any

import pytest

_STDERR = os.dup(2)
"""Standard error from before pytest captures it, to which stacks go."""


def _tell(test: str, outcome: str, why: str = "") -> None:
    line = json.dumps({"test": test, "outcome": outcome, "why": why[:400]})
    with open(os.environ["GPU_DAY_OUTCOMES"], "a", encoding="utf-8") as file:
        file.write(line + "\n")


def pytest_collection_finish(session: pytest.Session) -> None:
    """Tell which tests there are."""
    for item in session.items:
        _tell(item.nodeid, "collected")


def pytest_collectreport(report: pytest.CollectReport) -> None:
    """Tell of a file that cannot be imported."""
    if report.failed:
        _tell(report.nodeid, "failed", _last_line(report.longrepr))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Watch over a test."""
    seconds = float(os.environ["GPU_DAY_TEST_SECONDS"])
    faulthandler.dump_traceback_later(seconds, exit=True, file=_STDERR)
    try:
        return (yield)  # type: ignore[return-value]
    finally:
        faulthandler.cancel_dump_traceback_later()


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Tell the outcome of a test: of its call, or of what comes before and after where that went wrong."""
    if report.skipped:
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
        _tell(report.nodeid, "skipped", str(reason))
    elif report.failed or report.when == "call":
        _tell(report.nodeid, report.outcome, "" if report.passed else _last_line(report.longrepr))


def _last_line(shown: Any) -> str:
    """The first line of an error, whose lines pytest marks with E."""
    lines = str(shown).splitlines()
    marked = [line[1:].strip() for line in lines if line.startswith("E ")]
    return (marked or lines or [""])[0 if marked else -1]
