"""Attention over latents on every axis equals one device, with a latent of the queries and without."""

from __future__ import annotations

import pytest

from covering import marked
from equality import equal_to_one_device
from meshwright.verify.narrow import narrow
from ranks import Ranks
from small import spec_of

BASE = {
    "model.hidden": 64, "model.kv_heads": 4, "model.head_dim": 24, "model.layers": 3, "model.vocab_size": 61,
    "model.mla.q_rank": 32, "model.mla.kv_rank": 16, "model.mla.rope_dim": 8, "model.mla.v_dim": 16,
    "data.seq_len": 32, "train.batch_tokens": 8 * 32, "train.steps": 3, "train.warmup_steps": 1,
    "layout.micro_batch": 1,
}  # fmt: skip


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


CASES: list[dict[str, object]] = [
    {"layout": layout, "q_rank": q_rank} for layout in LAYOUTS for q_rank in (32, "none")
]
QUICK = [CASES[number] for number in (9, 12, 21)]
"""Each axis but data, some with and some without latents of queries."""


@pytest.mark.parametrize("case", marked(CASES, QUICK))
def test_every_layout_equals_one_device(ranks: Ranks, case: dict[str, str]) -> None:
    flags = {
        key if "__" in key else f"layout__{key}": value for key, value in LAYOUTS[case["layout"]].items()
    }
    layers = 4 if flags.get("layout__schedule") == "zb-v" else 3 if "layout__pp" in flags else 2
    microbatches = 4 if "layout__pp" in flags else 2
    sequences = microbatches * int(str(flags.get("layout__dp", 1)))
    spec = spec_of(
        BASE, **flags, model__layers=layers, model__mla__q_rank=case["q_rank"],
        train__batch_tokens=32 * sequences,
    )  # fmt: skip
    equal_to_one_device(ranks, spec, 1e-10)


def test_a_narrowed_copy_keeps_the_latents() -> None:
    spec = spec_of(
        BASE, model__hidden=4096, model__ffn=8192, model__heads=32, model__kv_heads=32, model__head_dim=192,
        model__mla__v_dim=128, model__mla__rope_dim=64, model__mla__kv_rank=512, data__seq_len=4096,
        train__batch_tokens=4096 * 8, layout__tp=4,
    )  # fmt: skip
    small, note = narrow(spec)
    assert note is not None and small.model.parameters < spec.model.parameters / 100
    found = small.model.mla
    assert found is not None and found.q_rank is not None and found.v_dim < small.model.head_dim
