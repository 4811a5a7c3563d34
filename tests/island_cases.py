"""A small run of two islands, with experts, and its comparison with one device each."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

import small
from meshwright.comm.mesh import Mesh
from meshwright.spec import RunSpec
from meshwright.verify.verify import verify

STEPS = 6  # the last is that of the run, after which all is exchanged
BASE = {
    "model.layers": 4, "model.heads": 8, "model.head_dim": 4, "model.vocab_size": 61, "data.seq_len": 32,
    "train.steps": STEPS, "train.warmup_steps": 1, "layout.micro_batch": 1, "layout.replicate": 2,
    "outer.every": 2,
}  # fmt: skip
EXPERTS = {"model__moe__experts": 8, "model__moe__top_k": 2, "model__moe__ffn": 12}
BIASED = EXPERTS | {"model__moe__router": "sigmoid", "model__moe__bias": "true"}


def spec_of(case: Mapping[str, Any]) -> RunSpec:
    """The run of a case, whose batch has a sample for each stage of each data rank, and four at least."""
    axes = (case.get("layout__replicate", 2), case.get("layout__dp", 1), case.get("layout__pp", 1))
    return small.spec_of(BASE | {"train.batch_tokens": 32 * max(4, prod(axes))}, **case)


def verify_islands(mesh: Mesh, spec: RunSpec) -> dict[str, Any] | None:
    return verify(spec, mesh, STEPS)
