"""Bytes that other programs keep of blocks with experts and latents: by hand, and under split backwards."""

from __future__ import annotations

import pytest

from meshwright.hardware.find import cluster
from meshwright.planner.cost.model import CostModel
from meshwright.planner.cost.software import STACKS
from meshwright.planner.layout_levels import POLICIES
from meshwright.planner.memory.generic import Generic, block_activations, everything
from meshwright.spec import RunSpec, load

HAI = STACKS["hai-llm"]


def deepseek(policy: str, schedule: str = "1f1b") -> RunSpec:
    """DeepSeek-V3 in the layout of its report, section 3.2."""
    keys = {
        "model.preset": "deepseek-v3", "data.seq_len": 4096, "train.batch_tokens": 15360 * 4096,
        "layout.dp": 128, "layout.pp": 16, "layout.ep": 64, "layout.zero": 1, "layout.micro_batch": 1,
        "layout.schedule": schedule, "precision.compute": "bf16",
    }  # fmt: skip
    spec = load(None, [(key, str(value)) for key, value in keys.items()])
    return spec.model_copy(update={"recompute": POLICIES[policy]})


def costs() -> CostModel:
    return CostModel(cluster("h800", 2048), HAI, "fp8-blockwise")


def test_a_block_keeps_what_recomputation_of_norms_activations_and_latents_leaves() -> None:
    spec = deepseek("selective")
    blocks = costs().blocks(spec)
    kind, moe = spec.model.kinds[-1], spec.model.moe
    assert kind.has_experts and moe is not None
    tokens, copies, heads = 4096, blocks.shape.copies, 128
    assert copies == pytest.approx(8 * 4096, rel=0.02)
    stream = tokens * 2 * 7168 * 2  # inputs of both norms, in bf16
    latents = tokens * 2 * 2 * (1536 + 512 + 64)
    attention = tokens * (heads * 192 * (2 + 1) + heads * 4)  # its output, once as an input in fp8; log-sums
    routed = copies * (7168 + 2 * 2 * 2048)  # inputs in fp8, gates in bf16
    shared = tokens * 2 * 2 * 2048
    assert block_activations(blocks, kind) == pytest.approx(stream + latents + attention + routed + shared)
    light = tokens * (2 * 7168 + 3 * heads * 192 * 2 + 2048) + copies * 2048
    assert everything(blocks, kind) - block_activations(blocks, kind) == pytest.approx(light)


def test_deepseek_v3_fits_80_gb_with_the_recomputation_of_its_report() -> None:
    needs = {policy: Generic(costs()).peak(deepseek(policy)).device for policy in POLICIES}
    there = cluster("h800").device.memory
    assert needs["full"] < there / 2 < needs["selective"] < there < needs["none"]


@pytest.mark.parametrize("schedule", ["zb-h1", "dualpipe-v"])
def test_microbatches_keep_inputs_of_weight_gradients_after_their_first_half_alone(schedule: str) -> None:
    """Before it they keep what recomputation leaves; so most is needed where nothing is recomputed."""
    none, selective, full = (
        Generic(costs()).peak(deepseek(policy, schedule)).activations
        for policy in ("none", "selective", "full")
    )
    assert full < selective < none
