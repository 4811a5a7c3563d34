"""Saves come as often as wastes least time, by what they were measured to cost, and alike on all ranks."""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from meshwright.checkpoint.interval import FIRST_STEPS, MOST_COST, MOST_LOST_S, AutoInterval
from meshwright.comm.control import Control
from meshwright.reliability.goodput import Faults, shares
from meshwright.reliability.training_time import DEVICE_MTBF_HOURS
from meshwright.spec import UserError

HOURS = 2.0


def feed(interval: AutoInterval, stall: float, beside: float, step: float = 1.0) -> None:
    """20 steps, and a save that stops training for `stall` and makes 4 steps last `beside` longer."""
    for _ in range(20):
        interval.note_step(step, writing=False)
    interval.note_save(stall)
    for _ in range(4):
        interval.note_step(step + beside, writing=True)


def best(faults: Faults, step: float) -> int:
    return max(range(1, 3000), key=lambda steps: shares(faults, steps * step).effective)


@pytest.mark.parametrize(("stall", "beside"), [(0.5, 0.25), (0.01, 0.0), (30.0, 0.1), (0.01, 2.0)])
def test_the_interval_is_the_best_one_for_the_measured_cost(stall: float, beside: float) -> None:
    interval = AutoInterval(Control(), HOURS)
    assert interval.choose() is None and interval.steps == FIRST_STEPS  # nothing is measured yet
    feed(interval, stall, beside)
    told = interval.choose()
    faults = Faults(HOURS * 3600, stall + 4 * beside, 0.0, 4 * (1 + beside))
    assert told is not None
    assert told["save_seconds"] == pytest.approx(faults.save_seconds)
    assert told["background_seconds"] == pytest.approx(faults.background_seconds)
    assert interval.steps == told["steps"] == best(faults, 1.0)


def test_a_save_that_costs_a_little_more_changes_nothing_and_a_failed_one_is_not_measured() -> None:
    interval = AutoInterval(Control(), HOURS)
    feed(interval, 1.0, 0.0)
    interval.choose()
    before = interval.steps
    feed(interval, 1.1, 0.0)
    assert interval.choose() is None and interval.steps == before
    interval.note_save(None)
    assert interval.choose() is None
    for _ in range(5):
        feed(interval, 16.0, 0.0)
        interval.choose()
    assert interval.steps == best(Faults(HOURS * 3600, 16.0, 0.0, 4.0), 1.0)


def test_all_ranks_choose_alike_by_the_slowest(monkeypatch: pytest.MonkeyPatch) -> None:
    keys, found = dist.HashStore(), list[Any]([None] * 3)

    def run(rank: int) -> None:
        interval = AutoInterval(Control("test", rank, 3, lambda: keys, timedelta(seconds=20)), HOURS)
        feed(interval, 0.1 + rank, 0.0, 1.0 + 0.1 * (rank == 1))
        found[rank] = interval.choose(), interval.steps

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found[0] == found[1] == found[2]
    assert found[0][1] == best(Faults(HOURS * 3600, 2.1, 0.0, 4.4), 1.1)


def test_the_failure_rate_is_that_of_the_devices_where_none_is_given() -> None:
    interval = AutoInterval(Control(), None)
    feed(interval, 1.0, 0.0)
    told = interval.choose()
    assert told is not None and told["mtbf_hours"] == DEVICE_MTBF_HOURS
    with pytest.raises(UserError, match="mtbf_hours"):
        AutoInterval(Control(), 1e-12)


def test_saves_are_half_an_hour_apart_at_most_where_no_failure_rate_is_given() -> None:
    usual, given, dear = (AutoInterval(Control(), hours) for hours in (None, DEVICE_MTBF_HOURS, None))
    for interval, stall in ((usual, 1.0), (given, 1.0), (dear, 60.0)):
        feed(interval, stall, 0.0)
        interval.choose()
    assert usual.steps == MOST_LOST_S
    assert given.steps > 10 * MOST_LOST_S
    assert dear.steps == 60 / MOST_COST
