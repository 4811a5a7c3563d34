"""Optimisers under every layout equal one device, in float64."""

from __future__ import annotations

import pytest
import torch

from covering import marked, name
from equality import equal_to_one_device
from meshwright.verify.reference import optimisers, schedule
from ranks import Ranks
from small import spec_of

BASE = {
    "model.heads": 8, "model.head_dim": 4, "model.vocab_size": 61, "data.seq_len": 32, "train.steps": 3,
    "train.warmup_steps": 1, "train.batch_tokens": 8 * 32, "layout.micro_batch": 1,
}  # fmt: skip
EXPERTS = {"model__moe__experts": 8, "model__moe__top_k": 2, "model__moe__ffn": 12, "layout__ep": 2}
LAYOUTS: list[dict[str, object]] = [
    *({"layout__dp": 4, "layout__zero": zero} for zero in range(4)),
    *({"layout__dp": 2, "layout__replicate": 2, "layout__tp": 2, "layout__zero": zero} for zero in (1, 3)),
    {"layout__tp": 4, "layout__cp": 2, "model__kv_heads": 4},
    {"layout__cp": 2, "layout__dp": 2, "layout__zero": 2, "recompute__policy": "selective"},
    {"layout__pp": 2, "layout__dp": 2, "layout__tp": 2, "layout__zero": 1, "layout__schedule": "zb-h1"},
    {"layout__pp": 2, "layout__dp": 2, "layout__zero": 3, "layout__schedule": "interleaved",
     "layout__virtual": 2, "model__layers": 4},
    *({"layout__dp": 4, "layout__zero": zero, **EXPERTS} for zero in (0, 2, 3)),
    {"layout__dp": 2, "layout__tp": 2, "layout__zero": 1, "layout__etp": 2, **EXPERTS, "layout__pp": 2},
]  # fmt: skip
OPTIMISERS: list[dict[str, object]] = [
    {"train__optimiser": "lion", "train__beta2": 0.99},
    {"train__optimiser": "muon", "train__beta1": 0.95},
    {"train__optimiser": "adamw8bit"},
]
CASES = [optimiser | layout for optimiser in OPTIMISERS for layout in LAYOUTS]


@pytest.mark.parametrize("case", marked(CASES, CASES[1::2]), ids=name)
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
