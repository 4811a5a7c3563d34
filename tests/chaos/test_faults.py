"""Schedules of faults follow from a seed, and a log of faults hits the same places again."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from injected import STEP, ActedError, Rank, arm, raising
from meshwright.chaos import inject
from meshwright.chaos.chaos import Course
from meshwright.chaos.faults import DEFAULT_KINDS, KINDS, Fault, FaultPlan, read_log, schedule
from meshwright.spec import UserError


@given(st.integers(0, 10**6), st.integers(1, 30), st.floats(0.1, 1e4), st.integers(1, 64))
@settings(max_examples=30)
def test_a_schedule_is_a_function_of_its_seed(seed: int, count: int, mtbf: float, ranks: int) -> None:
    found = schedule(seed, count, mtbf, DEFAULT_KINDS, ranks, 10)
    assert found == schedule(seed, count, mtbf, DEFAULT_KINDS, ranks, 10)
    assert found[: count // 2] == schedule(seed, count // 2, mtbf, DEFAULT_KINDS, ranks, 10)
    assert all(left < right for (left, _), (right, _) in pairwise(found))
    assert all(fault.rank < ranks and fault.step >= 1 for _, fault in found)
    assert found == [(due, Fault.from_json(json.loads(json.dumps(fault.to_json())))) for due, fault in found]


def test_a_schedule_has_the_mean_and_all_kinds_ranks_and_phases() -> None:
    found = schedule(1, 4000, 30.0, DEFAULT_KINDS, 4)
    assert abs(found[-1][0] / 4000 - 30.0) < 4 * 30.0 / 4000**0.5
    assert {fault.kind for _, fault in found} == set(DEFAULT_KINDS)
    assert {fault.rank for _, fault in found} == set(range(4))
    assert {fault.phase for _, fault in found} == set(STEP)
    assert found != schedule(2, 4000, 30.0, DEFAULT_KINDS, 4)


def run_of_two(plan: FaultPlan, steps: int, every: int, arm_next: Callable[[int], None]) -> list[Course]:
    """Play a run of two ranks in turns, which start again from the last checkpoint after each kill."""
    generation = saved = 0
    while True:
        ranks = [Rank(plan, number, generation, saved) for number in (0, 1)]
        try:
            while ranks[0].done < steps:
                arm_next(ranks[0].done)
                for phase in STEP:
                    for rank in ranks:
                        rank.heartbeat.phase(phase, rank.done)
                for rank in ranks:
                    rank.done += 1
                saved = ranks[0].done // every * every
        except ActedError:
            generation += 1
            continue
        return [Course(fault, plan.hits[number]) for number, fault in enumerate(plan.hits.faults)]


@given(st.integers(0, 10**6), st.integers(1, 12))
@settings(max_examples=25, deadline=None)
def test_a_replay_hits_the_same_generations_steps_and_phases(seed: int, every: int) -> None:
    drawn = [fault for _, fault in schedule(seed, 12, 1.0, ("kill", "slow"), 2)]
    drawn = [replace(fault, seconds=0.0) for fault in drawn]

    def arm_next(done: int) -> None:
        number = sum(plan.hits[n].starts > 0 for n in range(12))
        over = number == 0 or plan.hits[number - 1].back
        if number < 12 and over and (seed + done) % 3 == 0:
            plan.hits.write(number, armed=1)

    with patch.dict(inject._ACTS, kill=raising):
        with FaultPlan(drawn) as plan:
            first = [course.placed for course in run_of_two(plan, 120, every, arm_next)]
        hit = [fault for fault in first if fault.step]
        assert len(hit) > 6
        with FaultPlan(hit) as plan:
            arm(plan)
            again = run_of_two(plan, 120, every, lambda _: None)
    assert [course.placed for course in again] == hit
    assert [(c.hit.step, c.hit.starts - 1) for c in again] == [(f.step, f.generation) for f in hit]


def test_a_log_is_read_as_faults(tmp_path: Path) -> None:
    fault = Fault("kill", 1, "reduce", 7, 3)
    rows = [{"event": "fault", "at": 1.5, **fault.to_json()}, {"event": "back", "fault": 0}]
    log = tmp_path / "chaos.jsonl"
    log.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert read_log(log, 2) == [fault]
    with pytest.raises(UserError, match="rank 1, and the run has 1 rank"):
        read_log(log, 1)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "cannot be read"),
        ("no JSON\n", "line 1 is not a JSON object"),
        ('{"event": "back"}\n[1]\n', "line 2 is not a JSON object"),
        ('{"event": "back"}\n', "holds no faults"),
        ('{"event": "fault", "kind": "kil", "rank": 0}\n', "'kil' is not a kind"),
        ('{"event": "fault", "kind": "kill", "rank": -1}\n', "rank"),
        ('{"event": "fault", "kind": "kill", "rank": 0, "phase": "lunch"}\n', "'lunch' is not a phase"),
        ('{"event": "fault", "kind": "kill", "rank": "0"}\n', "rank"),
        ('{"event": "back"}\n{"event": "fault", "rank": 0}\n', "line 2 is not a fault: kind: is missing"),
        ('{"event": "fault", "kind": ["kill"], "rank": 0}\n', "not a kind of fault"),
        ('{"event": "fault", "kind": "kill", "rank": 0, "seconds": "x"}\n', "seconds: 'x' is not"),
        ('{"event": "fault", "kind": "kill", "rank": 0, "seconds": 1' + 400 * "0" + "}\n", "seconds: 10"),
    ],
)
def test_a_wrong_log_gets_a_sentence(tmp_path: Path, text: str | None, words: str) -> None:
    log = tmp_path / "chaos.jsonl"
    if text is not None:
        log.write_text(text)
    with pytest.raises(UserError, match=words) as caught:
        read_log(log, 2)
    sentence = str(caught.value)
    assert "\n" not in sentence and sentence.startswith(f"--replay: {log}")
    assert "; give " in sentence and not any(word in sentence for word in ("__init__", "char 0", "Errno"))


def test_kinds_that_change_numbers_are_not_drawn_by_default() -> None:
    assert not any(KINDS[name].alters or KINDS[name].skips for name in DEFAULT_KINDS)
    assert set(inject._ACTS) == set(KINDS)


def test_a_batch_is_made_bad_before_it_is_computed() -> None:
    kinds = [name for name, kind in KINDS.items() if kind.skips]
    assert kinds == ["nan-batch", "inf-batch", "nan-loss"]
    found = schedule(3, 60, 1.0, kinds, 2)
    assert {fault.phase for _, fault in found} == {"data"}
    assert {fault.kind for _, fault in found} == set(kinds)
    with pytest.raises(UserError, match=r"phase: nan-batch hits in 'data', .* not 'reduce'"):
        Fault("nan-batch", 0, "reduce")
