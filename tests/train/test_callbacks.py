"""Observers only watch a run: one that fails does not end it."""

from __future__ import annotations

import warnings
from typing import Any

import pytest

from meshwright.spec import UserError
from meshwright.train.callbacks import Observers

ROW = {"step": 1}


class Watcher:
    """Notes its calls, and fails in those that are among `failing`."""

    def __init__(self, *failing: str, error: Exception | None = None) -> None:
        self.failing, self.error = failing, error or ValueError("a bug")
        self.calls: list[str] = []

    def _called(self, name: str) -> None:
        self.calls.append(name)
        if name in self.failing:
            raise self.error

    def on_start(self, info: dict[str, Any]) -> None:
        self._called("start")

    def on_step(self, row: dict[str, Any]) -> None:
        self._called("step")

    def on_eval(self, row: dict[str, Any]) -> None:
        self._called("eval")

    def on_event(self, kind: str, fields: dict[str, Any]) -> None:
        self._called("event")

    def on_end(self, result: dict[str, Any]) -> None:
        self._called("end")

    def close(self) -> None:
        pass


def test_one_that_fails_is_told_once_until_it_works_again() -> None:
    bad, good = Watcher("step"), Watcher()
    observers = Observers([bad, good])
    with pytest.warns(UserWarning, match="Watcher misses a part of the run.*: ValueError: a bug") as told:
        for _ in range(3):
            observers.on_step(ROW)
    assert len(told) == 1 and bad.calls == good.calls == ["step"] * 3
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        observers.on_eval(ROW)
    with pytest.warns(UserWarning, match="misses a part"):
        observers.on_step(ROW)


def test_events_too_but_a_start_that_fails_ends_the_run_before_it_begins() -> None:
    with pytest.warns(UserWarning, match="misses a part"):
        Observers([Watcher("event")]).on_event("checkpoint", ROW)
    with pytest.raises(ValueError, match="a bug"):
        Observers([Watcher("start")]).on_start({})


def test_a_result_that_cannot_be_written_is_an_error_after_all_were_told() -> None:
    record, tracker, last = (
        Watcher("end", error=UserError("result.json: no space")),
        Watcher("end"),
        Watcher(),
    )
    with pytest.warns(UserWarning, match="misses"), pytest.raises(UserError, match=r"result.json: no space"):
        Observers([tracker, record, last]).on_end({})
    assert last.calls == ["end"]
    with pytest.warns(UserWarning, match="misses a part"):
        Observers([tracker]).on_end({})
