"""A small run of two islands, with experts, and its comparison with one device each."""

from __future__ import annotations

from typing import Any

from meshwright.comm.mesh import Mesh
from meshwright.spec import RunSpec
from meshwright.verify.verify import verify

STEPS = 6  # the last is that of the run, after which all is exchanged
BASE = {
    "model.layers": 4, "model.heads": 8, "model.head_dim": 4, "model.vocab_size": 61, "data.seq_len": 32,
    "train.steps": STEPS, "train.warmup_steps": 1, "train.batch_tokens": 8 * 32, "layout.micro_batch": 1,
    "layout.replicate": 2, "outer.every": 2,
}  # fmt: skip
EXPERTS = {"model__moe__experts": 8, "model__moe__top_k": 2, "model__moe__ffn": 12}
BIASED = EXPERTS | {"model__moe__router": "sigmoid", "model__moe__bias": "true"}


def verify_islands(mesh: Mesh, spec: RunSpec) -> dict[str, Any] | None:
    return verify(spec, mesh, STEPS)
