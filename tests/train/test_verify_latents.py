"""Attention over latents on every axis equals one device, with a latent of the queries and without."""

from __future__ import annotations

from typing import Any

import pytest

from meshwright.parallel.mesh import Mesh
from meshwright.spec import RunSpec
from meshwright.spec.parameters import parameters
from meshwright.train.shrink import shrink
from meshwright.train.verify import verify
from ranks import Ranks
from small import spec_of

BASE = {
    "model.hidden": 64, "model.kv_heads": 4, "model.head_dim": 24, "model.layers": 3, "model.vocab_size": 61,
    "model.mla.q_rank": 32, "model.mla.kv_rank": 16, "model.mla.rope_dim": 8, "model.mla.v_dim": 16,
    "data.seq_len": 32, "train.batch_tokens": 8 * 32, "train.steps": 3, "train.warmup_steps": 1,
    "layout.micro_batch": 1,
}  # fmt: skip


def body(mesh: Mesh, spec: RunSpec) -> dict[str, Any] | None:
    return verify(spec, mesh, 2)


def worst(ranks: Ranks, **flags: object) -> float:
    spec = spec_of(BASE, **flags)
    found = ranks.run(spec.layout, body, spec, rules="nccl")[0]
    tensors = sum(len(unit) for unit in parameters(spec.model).values())
    assert found is not None and found["compared"] == 2 * (2 + 2 * tensors)
    return float(found["worst_relative"])


LAYOUTS: dict[str, dict[str, object]] = {
    "tp2": {"tp": 2},
    "tp4-no-sequence": {"tp": 4, "sequence_parallel": "false"},
    "tp2-full": {"tp": 2, "recompute__policy": "full"},
    "tp2-selective": {"tp": 2, "recompute__policy": "selective"},
    "tp2-no-sequence-matmul": {"tp": 2, "sequence_parallel": "false", "recompute__save": "matmul"},
    "cp2-ring": {"cp": 2},
    "cp2-gather-full": {"cp": 2, "context_mode": "gather", "recompute__policy": "full"},
    "cp2-ulysses-selective": {"cp": 2, "context_mode": "ulysses", "recompute__policy": "selective"},
    "pp2-1f1b": {"pp": 2, "schedule": "1f1b"},
    "pp2-zb-h1": {"pp": 2, "schedule": "zb-h1"},
    "pp2-zb-h1-selective": {"pp": 2, "schedule": "zb-h1", "recompute__policy": "selective"},
    "zero3-full": {"dp": 4, "zero": 3, "recompute__policy": "full"},
    "zero3-selective": {"dp": 2, "zero": 3, "recompute__policy": "selective"},
    "tp2-cp2-dp2": {"tp": 2, "cp": 2, "dp": 2, "zero": 2, "context_mode": "ulysses"},
    "dp2-tp2-pp2": {"dp": 2, "tp": 2, "pp": 2, "zero": 1, "recompute__policy": "selective"},
    "tp2-pp2-zb-h1": {"tp": 2, "pp": 2, "schedule": "zb-h1"},
    "dp2-tp2-pp2-zb-v": {"dp": 2, "tp": 2, "pp": 2, "schedule": "zb-v", "sequence_parallel": "false"},
}


@pytest.mark.parametrize("q_rank", [32, "none"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_equals_one_device(ranks: Ranks, layout: str, q_rank: object) -> None:
    flags = {key if "__" in key else f"layout__{key}": value for key, value in LAYOUTS[layout].items()}
    layers = 4 if flags.get("layout__schedule") == "zb-v" else 3
    assert worst(ranks, **flags, model__layers=layers, model__mla__q_rank=q_rank) <= 1e-10


def test_a_narrowed_copy_keeps_the_latents() -> None:
    spec = spec_of(
        BASE, model__hidden=4096, model__ffn=8192, model__heads=32, model__kv_heads=32, model__head_dim=192,
        model__mla__v_dim=128, model__mla__rope_dim=64, model__mla__kv_rank=512, data__seq_len=4096,
        train__batch_tokens=4096 * 8, layout__tp=4,
    )  # fmt: skip
    small, note = shrink(spec)
    assert note is not None and small.model.parameters < spec.model.parameters / 100
    found = small.model.mla
    assert found is not None and found.q_rank is not None and found.v_dim < small.model.head_dim
