"""Learning rates: warm-up, the three shapes, and the scaling rules."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest

from meshwright.optim.lr_schedule import learning_rate, peak_rate
from meshwright.spec.train import TrainSpec
from meshwright.verify.reference.schedule import rate_of_step


def rates(**fields: object) -> list[float]:
    train = TrainSpec.model_validate({"steps": 100, "lr": 1.0, "warmup_steps": 10} | fields)
    return [learning_rate(train, step) for step in range(1, 101)]


@pytest.mark.parametrize("schedule", ["cosine", "linear", "wsd", "constant"])
def test_warm_up_is_linear_to_the_peak(schedule: str) -> None:
    assert rates(schedule=schedule)[:10] == pytest.approx([step / 10 for step in range(1, 11)])


def test_cosine_falls_to_its_floor_and_is_halfway_in_the_middle() -> None:
    found = rates(schedule="cosine", min_lr_ratio=0.1)
    assert found[-1] == pytest.approx(0.1)
    assert found[54] == pytest.approx(0.55)
    assert all(a > b for a, b in pairwise(found[9:]))


def test_wsd_is_stable_and_then_falls_linearly() -> None:
    found = rates(schedule="wsd", min_lr_ratio=0.0, decay_fraction=0.2)
    assert found[9:80] == pytest.approx([1.0] * 71)
    assert found[80:] == pytest.approx([1 - i / 20 for i in range(1, 21)])


def test_a_line_falls_from_the_peak_to_its_floor() -> None:
    found = rates(schedule="linear", min_lr_ratio=0.1)
    assert found[9:] == pytest.approx([1 - 0.9 * i / 90 for i in range(91)])


@pytest.mark.parametrize(("shape", "halfway"), [("1-sqrt", 1 - 0.5**0.5), ("cosine", 0.5)])
def test_shapes_of_the_decay_of_wsd(shape: str, halfway: float) -> None:
    found = rates(schedule="wsd", decay=shape, min_lr_ratio=0.0, decay_fraction=0.2)
    assert found[9:80] == pytest.approx([1.0] * 71)
    assert found[89] == pytest.approx(halfway) and found[99] == pytest.approx(0.0)
    assert all(a > b for a, b in pairwise(found[79:]))


def test_constant_stays() -> None:
    assert rates(schedule="constant")[9:] == [1.0] * 91


def test_a_run_without_warm_up_starts_at_the_peak() -> None:
    assert rates(schedule="constant", warmup_steps=0)[0] == 1.0


@pytest.mark.parametrize("schedule", ["cosine", "linear", "wsd"])
@pytest.mark.parametrize("share", [0.0, 0.001, 0.1, 0.25])
def test_a_share_of_the_steps_warms_up(schedule: str, share: float) -> None:
    given = {"warmup_steps": None, "warmup_fraction": share, "schedule": schedule, "decay_fraction": 0.5}
    steps = {0.0: 0, 0.001: 1}.get(share, round(100 * share))
    assert rates(**given) == rates(schedule=schedule, decay_fraction=0.5, warmup_steps=steps)
    train = TrainSpec.model_validate({"steps": 100, "lr": 1.0, **given})
    assert rates(**given) == pytest.approx([rate_of_step(train, step) for step in range(1, 101)], abs=1e-12)


@pytest.mark.parametrize(("rule", "factor"), [("none", 1.0), ("linear", 4.0), ("sqrt", 2.0)])
def test_scaling_rules(rule: str, factor: float) -> None:
    train = TrainSpec.model_validate(
        {"lr": 0.5, "lr_scaling": rule, "batch_tokens": 4096, "lr_base_batch_tokens": 1024}
    )
    assert peak_rate(train, 1) == pytest.approx(0.5 * factor)


def test_tokens_give_whole_steps_and_stopping_does_not_change_the_schedule() -> None:
    train = TrainSpec.model_validate({"tokens": 10_001, "batch_tokens": 1000})
    assert train.total_steps == 11
    stopped = train.model_copy(update={"stop_at": 5})
    assert stopped.last_step == 5
    assert [learning_rate(train, s) for s in range(1, 6)] == [learning_rate(stopped, s) for s in range(1, 6)]
    assert all(math.isfinite(learning_rate(train, s)) for s in range(1, 12))
