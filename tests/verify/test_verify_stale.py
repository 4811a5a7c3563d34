"""Late gradients equal a loop of one device with a queue of gradients, in float64, in every layout."""

from __future__ import annotations

from typing import Any

import pytest

from covering import marked, name
from meshwright.comm.mesh import Mesh
from meshwright.spec import RunSpec
from meshwright.verify.verify import verify
from ranks import Ranks
from small import spec_of

STEPS = 5
BASE = {
    "model.layers": 4, "model.heads": 8, "model.head_dim": 4, "model.vocab_size": 61, "data.seq_len": 32,
    "train.steps": STEPS, "train.warmup_steps": 1, "train.batch_tokens": 4 * 32, "layout.micro_batch": 1,
    "layout.replicate": 2, "outer.staleness": 1,
}  # fmt: skip
EXPERTS = {"model__moe__experts": 8, "model__moe__top_k": 2, "model__moe__ffn": 12}
BIASED = EXPERTS | {"model__moe__router": "sigmoid", "model__moe__bias": "true"}
CLIPPED = {"train__clip": 0.5, "train__clip_parameter": 0.2}
CASES: list[dict[str, Any]] = [
    {},
    {"layout__replicate": 1, "outer__staleness": 2},
    {"layout__replicate": 1, "layout__dp": 2, "layout__zero": 2},
    {"layout__replicate": 4, "outer__staleness": 3, "outer__staleness_lr": "inverse"},
    {"layout__dp": 2, "layout__zero": 1, **CLIPPED},
    {
        "layout__dp": 2,
        "layout__zero": 2,
        "outer__staleness": 2,
        "train__zclip": 2.5,
        "train__zclip_warmup": 2,
    },
    {"layout__dp": 2, "layout__zero": 3, "outer__staleness": 2, "train__optimiser": "muon"},
    {"layout__tp": 4, "outer__staleness": 2, "outer__staleness_lr": "inverse", **CLIPPED},
    {"layout__cp": 2, "layout__zero": 3, "train__ema": 0.9},
    {"layout__pp": 2, "layout__dp": 2, "layout__zero": 1, "model__tied": "true"},
    {"layout__pp": 2, "model__tied": "false", "layout__schedule": "zb-h1", "train__optimiser": "lion"},
    {"layout__dp": 2, "layout__ep": 2, "layout__zero": 2, "outer__staleness": 2, **EXPERTS},
    {"layout__tp": 2, "layout__ep": 1, "layout__zero": 1, **BIASED},
    {"layout__dp": 2, "layout__tp": 2, "layout__ep": 2, "layout__etp": 2, "layout__zero": 3, **BIASED},
    {
        "train__optimiser": "sgd",
        "train__batch_warmup": "128:256",
        "train__batch_tokens": 8 * 32,
        "outer__staleness": 2,
    },
    {"train__optimiser": "adamw8bit", "layout__dp": 2, "layout__zero": 1},
    {"precision__master": "bf16", "precision__compute": "bf16", "outer__staleness": 2},
]


QUICK = [CASES[number] for number in (6, 10)]
"""Data and pipeline ranks, with Muon and Lion."""


@pytest.mark.parametrize("case", marked(CASES, QUICK), ids=name)
def test_late_gradients_equal_a_queue_on_one_device(ranks: Ranks, case: dict[str, Any]) -> None:
    spec = spec_of(BASE, **case)
    found = ranks.run(spec.layout, _verify, spec, rules="nccl")[0]
    assert found["narrowed"] is None
    assert found["equal"], found["first"]["sentence"]


def _verify(mesh: Mesh, spec: RunSpec) -> dict[str, Any] | None:
    return verify(spec, mesh, STEPS)
