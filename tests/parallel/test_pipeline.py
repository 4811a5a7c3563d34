"""The runtime of pipelines: it does what the lists say, when the simulator says, holding what they count."""

from __future__ import annotations

import pytest

from meshwright.parallel.pipeline import proofs
from meshwright.schedule import NAMES, Action, Kind, StageCost, check, make, simulate, steps
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


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("pp", "microbatches"), [(2, 5), (4, 8), (5, 3)])
def test_a_send_has_arrived_where_a_receive_proves_it(name: str, pp: int, microbatches: int) -> None:
    schedule = make(name, pp, Layout.model_validate({"pp": pp, "schedule": name}).chunks, microbatches)
    listed = steps(schedule)
    place = {step.action: (rank, at) for rank, row in enumerate(listed) for at, step in enumerate(row)}
    for rank, row in enumerate(listed):
        proven = proofs(schedule, rank)
        for at, sends in proven.items():
            for sent in sends:
                taker = row[sent].target
                assert taker is not None and row[at].source == taker and sent < at
                assert taken_at(row[sent].action, place) < sent_at(row[at].action, place)
        sends = [sent for found in proven.values() for sent in found]
        assert len(set(sends)) == len(sends)


def taken_at(action: Action, place: dict[Action, tuple[int, int]]) -> int:
    """Where the rank beside takes what an action sends."""
    step = 1 if action.kind is Kind.F else -1
    return _position(action._replace(stage=action.stage + step), place)


def sent_at(action: Action, place: dict[Action, tuple[int, int]]) -> int:
    """Where the rank beside sends what an action takes."""
    step = -1 if action.kind is Kind.F else 1
    return _position(action._replace(stage=action.stage + step), place)


def _position(action: Action, place: dict[Action, tuple[int, int]]) -> int:
    kinds = (Kind.F,) if action.kind is Kind.F else (Kind.I, Kind.B)
    return next(place[action._replace(kind=kind)][1] for kind in kinds if action._replace(kind=kind) in place)
