"""The runtime of pipelines: it does what the lists say, when the simulator says, holding what they count."""

from __future__ import annotations

import pytest

from meshwright.schedule import NAMES, Kind, StageCost, check, make, simulate
from meshwright.spec import Layout
from ranks import Ranks
from waiting import run_waiting

COST = StageCost(forward=0.08, input=0.10, weight=0.06)
"""Seconds that each action of a stage waits: long beside what a busy machine adds to each."""


@pytest.mark.parametrize("name", NAMES)
def test_a_step_takes_as_long_as_simulated(ranks: Ranks, name: str) -> None:
    microbatches = 6
    layout = Layout.model_validate({"pp": 4, "schedule": name})
    schedule = make(name, 4, layout.chunks, microbatches)
    expected = simulate(schedule, COST).makespan
    seconds = []
    for _ in range(4):  # other programs may take the machine for a while
        found = ranks.run(layout, run_waiting, name, microbatches, COST)
        seconds.append(max(rank.seconds for rank in found))
        if abs(seconds[-1] / expected - 1) < 0.05:
            break
    assert min(seconds) == pytest.approx(expected, rel=0.05)
    assert tuple(rank.peak for rank in found) == check(schedule).peak
    for listed, rank in zip(schedule.actions, found, strict=True):
        assert rank.log == listed
        assert rank.taken == sum(action.kind is Kind.W for action in listed)
