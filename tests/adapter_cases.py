"""Runs of adapters and of pairs of answers that `verify` compares with one device."""

from __future__ import annotations

from typing import Any

from equality import STEPS
from expert_cases import BASE
from meshwright.comm.mesh import Mesh
from meshwright.spec import RunSpec
from meshwright.verify.precision import verify_in_own_precision
from meshwright.verify.verify import verify
from ranks import Ranks

MODEL = {
    "model.heads": 8, "model.head_dim": 4, "model.vocab_size": 61, "model.layers": 4, "data.seq_len": 32,
    "train.steps": 3, "train.warmup_steps": 1, "train.batch_tokens": 4 * 32, "layout.micro_batch": 1,
    "lora.rank": 3, "lora.alpha": 40.0,
}  # fmt: skip
EXPERTS = {"model__moe__experts": 8, "model__moe__top_k": 2, "model__moe__ffn": 12, "layout__ep": 2}
SHARED = {"model__moe__shared_ffn": 24, "model__moe__dense_first": 1}
MLA = {
    "model__mla__kv_rank": 8,
    "model__mla__rope_dim": 2,
    "model__mla__v_dim": 4,
    "model__kv_heads": 8,
    "model__head_dim": 6,
}
DROPPING: list[dict[str, object]] = [
    {"layout__dp": 2, "layout__zero": 3, "recompute__policy": "full"},
    {"layout__tp": 2, "layout__micro_batch": 4, "recompute__policy": "selective"},
    {"layout__tp": 4, "layout__sequence_parallel": "false", "model__kv_heads": 2},
    {"layout__cp": 2, "layout__tp": 2, "recompute__policy": "full"},
    {"layout__pp": 2, "layout__schedule": "zb-h1", "train__batch_tokens": 16 * 32},
    {"layout__pp": 2, "layout__schedule": "1f1b", "recompute__policy": "full", "layout__dp": 2},
    {"layout__dp": 2, "layout__tp": 2, **EXPERTS, **SHARED},
    {"layout__tp": 2, **MLA, "model__mla__q_rank": 12},
]
LORA_CASES: list[dict[str, object]] = [
    {},
    *({"layout__dp": 4, "layout__zero": zero} for zero in (0, 1, 2)),
    {"layout__dp": 2, "layout__zero": 3, "model__qkv_bias": "true", "lora__rslora": "true"},
    {"layout__dp": 2, "layout__replicate": 2, "layout__zero": 3, "recompute__policy": "full"},
    {"layout__tp": 2},
    {"layout__tp": 2, "layout__sequence_parallel": "false"},
    {"layout__tp": 4, "model__kv_heads": 2},
    {"layout__tp": 4, "model__kv_heads": 2, "layout__sequence_parallel": "false", "model__mlp_bias": "true"},
    {"layout__tp": 2, "recompute__policy": "full"},
    {"layout__tp": 2, "recompute__policy": "selective", "layout__dp": 2, "layout__zero": 3},
    {"layout__tp": 2, "recompute__policy": "selective", "recompute__save": "attention"},
    {"layout__cp": 2},
    {"layout__cp": 2, "layout__dp": 2, "layout__zero": 3, "lora__targets": "*.attn.q.weight,*.attn.v.weight"},
    {"layout__tp": 2, "layout__cp": 2, "lora__targets": "*.mlp.down.weight"},
    {"layout__tp": 2, "layout__cp": 2, "lora__targets": "*.attn.o.weight"},
    {"layout__tp": 2, "layout__dp": 2, "layout__zero": 1, "lora__targets": "blocks.1.*"},
    {"layout__tp": 2, "lora__targets": "*.mlp.gate.weight", "recompute__policy": "full"},
    {"layout__pp": 2, "layout__schedule": "zb-h1"},
    {"layout__pp": 2, "layout__schedule": "1f1b", "lora__targets": "blocks.3.*", "layout__tp": 2},
    {"layout__pp": 2, "layout__dp": 2, "layout__tp": 2, "layout__zero": 3, "layout__schedule": "zb-h1"},
    {"layout__pp": 2, "layout__schedule": "zb-v", "model__tied": "true"},
    {"layout__dp": 2, "layout__zero": 3, **EXPERTS},
    {"layout__dp": 2, "layout__tp": 2, "layout__zero": 1, **EXPERTS, **SHARED},
    {"layout__dp": 2, "layout__tp": 2, **EXPERTS, **SHARED, "layout__sequence_parallel": "false"},
    *({"lora__dropout": 0.3} | layout for layout in DROPPING),
    {"layout__tp": 2, "layout__pp": 2, **MLA, "layout__schedule": "zb-h1", "model__mla__q_rank": 12},
    {"layout__tp": 2, "layout__dp": 2, **MLA, "layout__sequence_parallel": "false", "layout__zero": 2},
    {"layout__tp": 2, "model__parallel_block": "true", "model__norm_placement": "pre"},
    {"layout__dp": 2, "layout__zero": 1, "train__ema": 0.9, "train__clip_parameter": 0.01},
    {"layout__dp": 2, "layout__tp": 2, "layout__zero": 1, "train__optimiser": "muon"},
    {"layout__dp": 2, "layout__tp": 2, "layout__zero": 1, "train__optimiser": "adamw8bit", "lora__rank": 4},
    {"layout__dp": 2, "layout__replicate": 2, "outer__every": 1},
    {"layout__dp": 2, "layout__replicate": 2, "layout__zero": 1, "outer__staleness": 1},
]  # fmt: skip
"""Layouts, models and trainings of adapters beside `MODEL`."""
QUANTISED = {
    "model.hidden": 64, "model.ffn": 128, "model.heads": 8, "model.head_dim": 16, "model.kv_heads": 2,
    "model.vocab_size": 61, "model.layers": 4, "data.seq_len": 32, "train.steps": 3, "train.warmup_steps": 1,
    "train.batch_tokens": 4 * 32, "layout.micro_batch": 1, "lora.rank": 3, "lora.alpha": 40.0,
    "lora.quantise": "nf4",
}  # fmt: skip
"""A model whose base is quantised."""
DENSE = {key: value for key, value in BASE.items() if not key.startswith("model.moe")}
PAIRS: dict[str, object] = {
    "preference.loss": "dpo", "data.seq_len": 32, "train.batch_tokens": 8 * 32, "data.val_fraction": 0.1,
}  # fmt: skip


def in_own_precision(mesh: Mesh, spec: RunSpec) -> dict[str, Any] | None:
    return verify_in_own_precision(spec, mesh, 2)


def compared(mesh: Mesh, spec: RunSpec) -> dict[str, Any] | None:
    return verify(spec, mesh, STEPS)


def assert_equal(ranks: Ranks, spec: RunSpec) -> None:
    found = ranks.run(spec.layout, compared, spec, rules="nccl")[0]
    assert found["equal"], found["first"]["sentence"]
    assert found["worst_relative"] <= 1e-9, found["worst_name"]
    kinds = {row["kind"] for row in found["rows"]}
    assert {"step 2 parameter", "step 2 loss", f"step {STEPS} validation loss"} <= kinds
