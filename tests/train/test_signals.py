"""Signals that stop a run: the first is noted, its echoes are not, and a later one is obeyed."""

from __future__ import annotations

import signal
from unittest.mock import patch

import pytest

from meshwright.spec.errors import STOP_SIGNALS
from meshwright.train import signals
from meshwright.train.signals import stop_signals


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_an_echo_changes_nothing_and_a_later_signal_is_obeyed(number: signal.Signals) -> None:
    obeyed: list[int] = []
    before = signal.signal(number, lambda number, frame: obeyed.append(number))
    try:
        with patch.object(signals.time, "monotonic") as now, stop_signals() as noted:
            for seconds in (100.0, 100.05, 100.4):
                now.return_value = seconds
                signal.raise_signal(number)
                assert (noted, obeyed) == ([number], [])
            now.return_value = 103.0
            signal.raise_signal(number)
            assert (noted, obeyed) == ([number], [number])
    finally:
        signal.signal(number, before)


def test_only_ctrl_c_is_obeyed_after_less_than_three_seconds() -> None:
    obeyed: list[int] = []
    before = {each: signal.signal(each, lambda number, frame: obeyed.append(number)) for each in STOP_SIGNALS}
    try:
        with patch.object(signals.time, "monotonic", return_value=100.0) as now, stop_signals() as noted:
            signal.raise_signal(signal.SIGTERM)
            now.return_value = 102.9
            for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGINT):
                signal.raise_signal(number)
            assert (noted, obeyed) == ([signal.SIGTERM], [signal.SIGINT])
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_a_signal_that_is_ignored_stays_so() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with stop_signals() as noted:
            signal.raise_signal(signal.SIGHUP)
            assert noted == [] and signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
