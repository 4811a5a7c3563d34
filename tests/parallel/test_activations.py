"""Activations that a rank really holds, against the planner's formulas."""

from __future__ import annotations

import pytest

from allocations import measure
from meshwright.planner.activations import activations
from ranks import Ranks
from small import spec_of

BASE = {
    "model.layers": 6, "model.hidden": 128, "model.ffn": 384, "model.heads": 8, "model.kv_heads": 4,
    "data.corpus": "synthetic", "data.seq_len": 256, "train.batch_tokens": 256 * 16,
    "layout.micro_batch": 8, "precision.compute": "bf16",
}  # fmt: skip
GPT = {
    "model__family": "gpt2", "model__norm": "layernorm", "model__activation": "gelu_tanh",
    "model__position": "learned", "model__kv_heads": 8, "model__ffn": 512,
}  # fmt: skip
LATENTS = {
    "model__head_dim": 24, "model__kv_heads": 8, "model__mla__q_rank": 64, "model__mla__kv_rank": 32,
    "model__mla__rope_dim": 8, "model__mla__v_dim": 16,
}  # fmt: skip
LAYOUTS: list[dict[str, object]] = [
    {},
    {"precision__compute": "fp32"},
    {"layout__tp": 2, "layout__sequence_parallel": "false"},
    {"layout__tp": 2, "precision__compute": "fp64", "model__qk_norm": "true"},
    GPT | {"layout__tp": 4},
    {"layout__cp": 2},
    {"layout__cp": 4, "layout__context_mode": "gather"},
    {"layout__cp": 2, "layout__context_mode": "ulysses"},
    {"layout__tp": 2, "layout__cp": 2},
    LATENTS,
    LATENTS | {"model__mla__q_rank": "none", "precision__compute": "fp32"},
    LATENTS | {"layout__tp": 2},
    LATENTS | {"layout__tp": 2, "layout__sequence_parallel": "false", "model__mla__q_rank": "none"},
    LATENTS | {"layout__cp": 2},
    LATENTS | {"layout__cp": 2, "layout__context_mode": "gather"},
    LATENTS | {"layout__cp": 2, "layout__context_mode": "ulysses"},
]


@pytest.mark.parametrize("policy", ["none", "selective", "full"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_formulas_hold(ranks: Ranks, layout: dict[str, object], policy: str) -> None:
    spec = spec_of(BASE, **layout, recompute__policy=policy)
    expected = activations(spec)
    for kept, peak in ranks.run(spec.layout, measure, spec):
        assert kept == pytest.approx(expected.kept, rel=0.01)
        assert peak == pytest.approx(expected.peak, rel=0.05)


@pytest.mark.parametrize("save", ["attention", "matmul"])
@pytest.mark.parametrize("axis", [{}, {"layout__tp": 2}, {"layout__cp": 2}], ids=str)
def test_formulas_hold_for_each_saved_operator(ranks: Ranks, axis: dict[str, object], save: str) -> None:
    spec = spec_of(BASE, **axis, recompute__save=save)
    for kept, _ in ranks.run(spec.layout, measure, spec):
        assert kept == pytest.approx(activations(spec).kept, rel=0.01)
