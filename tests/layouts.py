"""Small runs of every kind on layouts of every kind, drawn from a seed."""

from __future__ import annotations

import random

from meshwright.schedule import NAMES
from meshwright.spec import RunSpec, UserError
from small import spec_of

GPT = {
    "model.family": "gpt2", "model.norm": "layernorm", "model.activation": "gelu_tanh",
    "model.position": "learned", "model.kv_heads": 8, "model.ffn": 256,
}  # fmt: skip
LATENTS = {
    "model.head_dim": 12, "model.kv_heads": 8, "model.mla.q_rank": 32, "model.mla.kv_rank": 16,
    "model.mla.rope_dim": 4, "model.mla.v_dim": 8,
}  # fmt: skip
EXPERTS = {"model.moe.experts": 8, "model.moe.top_k": 2, "model.moe.ffn": 32}
KINDS: dict[str, dict[str, object]] = {"dense": {}, "gpt": GPT, "latents": LATENTS, "experts": EXPERTS}


def draw(seed: int, length: int = 128, **given: object) -> tuple[RunSpec, int]:
    """A run of samples of `length` tokens, but for `given`, that the rules accept, and one of its ranks."""
    chance = random.Random(seed)
    while True:
        try:
            spec = spec_of(_flags(chance, list(KINDS)[seed % len(KINDS)], length), **given)
        except UserError:  # most draws are no layout: they are drawn again
            continue
        return spec, chance.randrange(spec.layout.world_size)


def _flags(chance: random.Random, kind: str, length: int) -> dict[str, object]:
    one = chance.choice
    layout = {
        "dp": one([1, 2, 3, 4, 8]), "replicate": one([1, 1, 2]), "zero": one([0, 1, 2, 3]),
        "tp": one([1, 1, 2, 4]), "cp": one([1, 1, 1, 2, 4]), "pp": one([1, 2, 3, 4]),
        "sequence_parallel": one(["true", "false"]), "micro_batch": one([1, 2]),
        "context_mode": one(["ring", "ulysses", "gather", "ring+ulysses"]), "schedule": one(NAMES),
    }  # fmt: skip
    flags: dict[str, object] = {
        "model.layers": one([2, 3]), "model.hidden": 64, "model.ffn": 192, "model.heads": 8,
        "model.kv_heads": one([2, 4, 8]), "model.vocab_size": one([509, 512]),
        "model.tied": one(["true", "false"]),
        "model.qk_norm": one(["true", "false"]) if kind in ("dense", "experts") else "false",
        "data.corpus": "synthetic", "data.seq_len": length, "data.document_mask": one(["true", "false"]),
        "precision.compute": one(["fp64", "fp32", "bf16", "fp16"]), "precision.reduce": one(["fp32", "bf16"]),
        "recompute.policy": one(["none", "full", "selective"]),
    } | KINDS[kind]  # fmt: skip
    if kind == "gpt":
        flags["model.max_seq_len"] = length
    if kind == "latents":
        flags["model.mla.q_rank"] = one([32, "none"])
    if kind == "experts":
        layout |= {"ep": one([1, 2, 4]), "etp": one([1, 1, 2]), "expert_parts": one([1, 2])}
        flags |= {
            "model.moe.shared_ffn": one([0, 32]), "model.moe.dense_first": one([0, 1]),
            "model.moe.bias": one(["true", "false"]), "model.moe.aux_loss": one([0.0, 0.01]),
            "model.moe.z_loss": one([0.0, 0.1]), "model.moe.capacity_factor": one(["none", 1.0]),
        }  # fmt: skip
    ranks = layout["dp"] * layout["replicate"] * layout["micro_batch"]
    flags["train.batch_tokens"] = length * ranks * one([1, 2, 3])
    return flags | {f"layout.{key}": value for key, value in layout.items()}
