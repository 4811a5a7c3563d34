"""Experts that are uneven, full or padded: rows of the busiest rank, held to drawn ones, and their costs."""

from __future__ import annotations

from dataclasses import replace
from statistics import NormalDist

import numpy as np
import pytest

from meshwright.hardware.find import cluster
from meshwright.planner.cost.breakdown import PassSeconds
from meshwright.planner.cost.expert_balance import busiest
from meshwright.planner.cost.layer import LayerCost
from meshwright.planner.cost.model import CostModel
from meshwright.planner.cost.software import STACKS
from meshwright.planner.memory.generic import Generic
from meshwright.planner.traffic.layer_shape import layer_shape
from meshwright.spec import MoeSpec, RunSpec, load

NEMO = STACKS["nemo"]


def mixtral(ep: int, capacity: float | None = None, data: int = 8) -> RunSpec:
    """Mixtral with its experts on `ep` of the data ranks."""
    keys = {
        "model.preset": "mixtral-8x7b", "model.moe.capacity_factor": capacity or "none", "data.seq_len": 4096,
        "layout.dp": data, "layout.ep": ep, "layout.zero": 1, "layout.micro_batch": 1,
        "train.batch_tokens": 8 * data * 4096, "precision.compute": "bf16",
    }  # fmt: skip
    return load(None, [(key, str(value)) for key, value in keys.items()])


def with_experts(blocks: LayerCost) -> PassSeconds:
    """Seconds of a block with experts."""
    return blocks.seconds(blocks.kinds[-1])


def loads(moe: MoeSpec, ranks: int, tokens: int, spread: float) -> float:
    """The mean over layers of the busiest rank's rows over the mean, as drawn: experts of normal popularity,
    and tokens that choose `top_k` of them each (by Gumbel noise, without replacement)."""
    random, found = np.random.default_rng(3), []
    for _ in range(100):
        popular = np.maximum(1 + spread * random.standard_normal(moe.experts), 1e-3)
        scores = np.log(popular) + random.gumbel(size=(tokens, moe.experts))
        chosen = np.argpartition(-scores, moe.top_k, axis=1)[:, : moe.top_k]
        rows = np.bincount(chosen.ravel(), minlength=moe.experts).reshape(ranks, -1).sum(1)
        found.append(rows.max() / rows.mean())
    return float(np.mean(found))


@pytest.mark.parametrize("spread", [0.0, 0.1])
@pytest.mark.parametrize(("ranks", "tokens"), [(2, 64), (8, 64), (8, 256), (32, 16), (64, 32)])
def test_the_busiest_expert_rank_is_as_far_above_the_mean_as_drawn_ones(
    ranks: int, tokens: int, spread: float
) -> None:
    """With fewer tokens, fewer experts a rank, more ranks, and more popular experts."""
    moe = {"experts": 64, "top_k": 4, "ffn": 64}
    keys: dict[str, object] = {"model.preset": "mixtral-8x7b", "data.seq_len": tokens}
    keys |= {f"model.moe.{key}": value for key, value in moe.items()}
    keys |= {"layout.dp": ranks, "layout.ep": ranks, "train.batch_tokens": ranks * tokens}
    spec = load(None, [(key, str(value)) for key, value in keys.items()])
    assert spec.model.moe is not None
    # a published model of 64 experts whose popularity spreads so has its busiest so far above the mean
    violation = spread * NormalDist().inv_cdf((64 - 0.375) / (64 + 0.25))
    drawn = loads(spec.model.moe, ranks, ranks * tokens, spread) - 1
    assert busiest(spec, violation) - 1 == pytest.approx(drawn, rel=0.12)


def test_capacity_and_the_number_of_tokens_bound_the_busiest_expert_rank() -> None:
    assert busiest(mixtral(1), 0.72) == 1.0 and busiest(mixtral(8), 0.72) > 1.4
    for capacity, most in ((1.25, 1.25), (1.0, 1.0), (0.5, 1.0)):
        assert busiest(mixtral(8, capacity), 0.72) == pytest.approx(most, rel=1e-3)
    assert busiest(mixtral(2, data=2), 1e9) == 2.0  # all copies on one rank


def test_tokens_that_are_dropped_cost_nothing_and_padded_ones_do() -> None:
    on, padding = cluster("h100", 8), replace(NEMO, pads_experts=True)
    every, chance = layer_shape(mixtral(8)).copies, busiest(mixtral(8), 0.0)
    assert every == 2 * 4096 and CostModel(on, NEMO).blocks(mixtral(8)).shape.copies == every * chance
    for stack in (NEMO, padding):
        half, even, double = (CostModel(on, stack).blocks(mixtral(8, each)) for each in (0.5, 1.0, 2.0))
        assert half.shape.copies == every / 2 and even.shape.copies == every
        assert double.shape.copies == every * (2 if stack.pads_experts else chance)
        uneven = CostModel(on, stack, violation=0.72).blocks(mixtral(8, 2.0))
        assert (uneven.shape.copies > double.shape.copies) == (not stack.pads_experts)
        dear, fair, cheap = (with_experts(each).forward for each in (double, even, half))
        assert cheap.expert == pytest.approx(fair.expert / 2, rel=0.1) and cheap.matmul < 0.8 * fair.matmul
        assert (dear.matmul > 1.4 * fair.matmul) == stack.pads_experts
        peaks = [Generic(CostModel(on, stack)).peak(mixtral(8, each)).activations for each in (0.5, 1.0, 2.0)]
        assert peaks[0] < 0.8 * peaks[1] and (peaks[2] > 1.3 * peaks[1]) == stack.pads_experts


def test_a_program_that_drops_tokens_sends_each_copy_and_waits_for_it() -> None:
    on = cluster("h100", 8)
    plain = replace(NEMO, merged_copies=False, overlaps=("data", "parameters", "tensor", "pipeline"))
    merged, dropping, alone = (
        with_experts(CostModel(on, stack).blocks(mixtral(8, capacity))).forward.expert
        for stack, capacity in ((NEMO, None), (NEMO, 4.0), (plain, None))
    )
    assert merged < 0.5 * dropping == pytest.approx(0.5 * alone)
