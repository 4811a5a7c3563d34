"""Optimisers under every layout equal one device, in float64."""

from __future__ import annotations

import pytest
import torch

from covering import marked, name
from equality import equal_to_one_device
from meshwright.verify.reference import optimisers, schedule
from optimiser_cases import BASE, LAYOUTS
from ranks import Ranks
from small import spec_of

OPTIMISERS: list[dict[str, object]] = [
    {"train__optimiser": "lion", "train__beta2": 0.99},
    {"train__optimiser": "muon", "train__beta1": 0.95},
    {"train__optimiser": "adamw8bit"},
]
CASES = [optimiser | layout for optimiser in OPTIMISERS for layout in LAYOUTS]


@pytest.mark.parametrize("case", marked(CASES, [CASES[number] for number in (1, 21, 37)]), ids=name)
def test_every_optimiser_equals_one_device(ranks: Ranks, case: dict[str, object]) -> None:
    kinds = equal_to_one_device(ranks, spec_of(BASE, **case), 1e-9)
    assert "step 2 parameter" in kinds and "step 2 exp_avg" in kinds
    assert ("step 2 exp_avg_sq" in kinds) == (case["train__optimiser"] != "lion")


def test_lion_is_the_papers() -> None:
    """A step moves each element by the rate and its decay, whatever the gradient's size."""
    train = spec_of(BASE, train__optimiser="lion", train__lr=0.5, train__warmup_steps=0).train
    start = torch.tensor([[1.0, -2.0], [3.0, 0.0]], dtype=torch.float64)
    parameter, momentum = start.clone(), torch.zeros_like(start)
    gradient = torch.tensor([[1e-9, -5.0], [0.0, 7.0]], dtype=torch.float64)
    optimisers.update(parameter, gradient, [momentum], train, 1)
    rate = schedule.rate_of_step(train, 1)
    assert torch.equal(parameter, start - rate * (gradient.sign() + 0.1 * start))
    assert torch.allclose(momentum, 0.05 * gradient)
    before = parameter.clone()
    optimisers.update(parameter, -gradient, [momentum], train, 2)  # 0.9 x 0.05 - 0.1 of it: the new one wins
    rate = schedule.rate_of_step(train, 2)
    assert torch.allclose(parameter, before - rate * (-gradient.sign() + 0.1 * before))
