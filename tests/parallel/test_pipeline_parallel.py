"""The runtime of pipelines: it does what the lists say, when the simulator says, holding what they count."""

from __future__ import annotations

from unittest.mock import patch

import pytest

import waiting
from meshwright.comm.mesh import Mesh
from meshwright.schedule import NAMES, Kind, StageCost, StageLink, check, make, simulate
from meshwright.spec import Layout
from ranks import Ranks

COST = StageCost(forward=0.08, input=0.10, weight=0.06)
"""Seconds of the actions of a stage."""
MICROBATCHES = 6


class VirtualClock:
    """Stands for the module `time` of one rank: only its own sleeping moves it."""

    def __init__(self) -> None:
        self._now = 0.0

    def sleep(self, seconds: float) -> None:
        self._now += seconds

    def monotonic(self) -> float:
        return self._now

    perf_counter = monotonic


def link(_source: int, _target: int) -> StageLink:
    """With a latency, a stage begins no earlier than the time that a message brings along."""
    return StageLink(latency=1e-9)


def run(mesh: Mesh, name: str) -> waiting.Waited:
    with patch.object(waiting, "time", VirtualClock()):
        return waiting.run_waiting(mesh, name, MICROBATCHES, COST, link)


@pytest.mark.parametrize("name", NAMES)
def test_a_step_takes_as_long_as_simulated(ranks: Ranks, name: str) -> None:
    """In virtual time, which no other program takes."""
    layout = Layout.model_validate({"pp": 4, "schedule": name})
    schedule = make(name, 4, layout.chunks, MICROBATCHES)
    found = ranks.run(layout, run, name)
    expected = simulate(schedule, COST, link).makespan
    assert max(rank.seconds for rank in found) == pytest.approx(expected, rel=1e-9)
    assert tuple(rank.peak for rank in found) == check(schedule).peak
    for listed, rank in zip(schedule.actions, found, strict=True):
        assert rank.log == listed
        assert rank.taken == sum(action.kind is Kind.W for action in listed)


@pytest.mark.full
@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "dualpipe-v"])
def test_a_step_takes_as_long_by_the_clock(ranks: Ranks, name: str) -> None:
    layout = Layout.model_validate({"pp": 4, "schedule": name})
    expected = simulate(make(name, 4, layout.chunks, MICROBATCHES), COST).makespan
    seconds = []
    for _ in range(4):  # other programs may take the machine for a while
        found = ranks.run(layout, waiting.run_waiting, name, MICROBATCHES, COST)
        seconds.append(max(rank.seconds for rank in found))
        if abs(seconds[-1] / expected - 1) < 0.05:
            break
    assert min(seconds) == pytest.approx(expected, rel=0.05)
