"""The page of a run while it goes on."""

from __future__ import annotations

import time
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshwright.report.run_page import REPORT, report_html
from meshwright.runs.record import write_atomically

if TYPE_CHECKING:
    from meshwright.checkpoint.lease import Lease

SHARE = 0.01
"""The most of a run's time that its page may take while it goes on."""
_MOMENTS = ("checkpoint", "stopped")
"""Kinds of events after which the page is written."""


class LiveReport:
    """An observer that writes a run's page after its first row, evaluations, checkpoints and a stop.

    A page that took t seconds is followed by no other for t / SHARE, but at a stop. `lease` is that of the
    folder `out`: once another run has it nothing is written.
    """

    def __init__(self, out: Path, lease: Lease | None = None) -> None:
        self.out, self.lease = out, lease
        self._next = 0.0
        self._begun = False

    def on_start(self, info: dict[str, Any]) -> None:
        """A start has nothing to show yet, and an old file that is damaged must not stop it."""

    def on_step(self, row: dict[str, Any]) -> None:
        if not self._begun:
            self._write()

    def on_eval(self, row: dict[str, Any]) -> None:
        self._write()

    def on_event(self, kind: str, fields: dict[str, Any]) -> None:
        if kind in _MOMENTS:
            self._write(now=kind == "stopped")

    def on_end(self, result: dict[str, Any]) -> None:
        """The run's end writes the last page itself, and fails if it cannot."""

    def close(self) -> None:
        """Nothing is open."""

    def _write(self, now: bool = False) -> None:
        self._begun = True
        begun = time.monotonic()
        if begun < self._next and not now:
            return
        html = report_html(self.out)
        with nullcontext() if self.lease is None else self.lease.fenced():
            write_atomically(self.out / REPORT, html)
        ended = time.monotonic()
        self._next = ended + (ended - begun) / SHARE
