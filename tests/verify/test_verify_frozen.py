"""A frozen half of the model under layouts: equal to one device, and nothing is held or sent for it."""

from __future__ import annotations

from typing import Any

import pytest

from covering import marked, name
from equality import equal_to_one_device
from meshwright.comm.mesh import Mesh
from meshwright.spec import RunSpec
from meshwright.verify.precision import verify_in_own_precision
from ranks import Ranks
from small import spec_of

MODEL = {
    "model.heads": 8, "model.head_dim": 4, "model.vocab_size": 61, "model.layers": 4, "data.seq_len": 32,
    "train.steps": 3, "train.warmup_steps": 1, "train.batch_tokens": 4 * 32, "layout.micro_batch": 1,
}  # fmt: skip
HALF = "embed.*,blocks.0.*,blocks.1.*"
EXPERTS = {"model__moe__experts": 8, "model__moe__top_k": 2, "model__moe__ffn": 12, "layout__ep": 2}
FP8 = {"precision__compute": "fp8", "model__ffn": 48, "model__head_dim": 16}
CASES: list[dict[str, object]] = [
    *({"layout__dp": 4, "layout__zero": zero} for zero in (0, 1, 2, 3)),
    {"layout__dp": 2, "layout__replicate": 2, "layout__zero": 3, "recompute__policy": "full"},
    {"layout__tp": 4, "layout__cp": 2, "model__kv_heads": 4},
    {"layout__tp": 4, "layout__dp": 2, "layout__zero": 2, "model__qk_norm": "true"},
    {"layout__pp": 2, "layout__dp": 2, "layout__tp": 2, "layout__zero": 3, "layout__schedule": "zb-h1"},
    {"layout__pp": 4, "layout__schedule": "1f1b", "model__tied": "true"},
    {"layout__pp": 2, "layout__schedule": "zb-v"},
    {"layout__dp": 4, "layout__zero": 3, **EXPERTS},
    {"layout__dp": 2, "layout__tp": 2, "layout__zero": 1, "layout__etp": 2, **EXPERTS, "layout__pp": 2},
    {"layout__cp": 2, "layout__dp": 2, "layout__zero": 3, "train__frozen": "*.attn.*,head.weight"},
    {"layout__tp": 2, "layout__dp": 2, "layout__zero": 3, "train__frozen": "*.mlp.*,embed.*", **EXPERTS},
    {"layout__pp": 2, "layout__dp": 2, "train__frozen": "*.q.*,*norm*", "layout__schedule": "zb-h1"},
    {
        "layout__pp": 2,
        "layout__dp": 2,
        "layout__zero": 3,
        "train__frozen": "embed.weight",
        "model__tied": "true",
    },
    {"layout__dp": 2, "train__frozen": "embed.*,blocks.*"},
    {"layout__dp": 2, "layout__zero": 1, "train__ema": 0.9, "train__clip_parameter": 0.01},
    {"layout__dp": 2, "layout__replicate": 2, "outer__every": 1, "train__optimiser": "muon"},
    {"layout__dp": 2, "layout__replicate": 2, "layout__zero": 1, "outer__staleness": 1},
    {
        "layout__dp": 2,
        "layout__zero": 3,
        "precision__compute": "fp8",
        "model__ffn": 48,
        "model__head_dim": 16,
    },
]
QUICK = [CASES[index] for index in (8, 13)]


@pytest.mark.parametrize("case", marked(CASES, QUICK), ids=name)
def test_a_frozen_half_equals_one_device(ranks: Ranks, case: dict[str, object]) -> None:
    equal_to_one_device(ranks, spec_of(MODEL, **{"train__frozen": HALF} | case), 1e-9)


def in_own_precision(mesh: Mesh, spec: RunSpec) -> dict[str, Any] | None:
    return verify_in_own_precision(spec, mesh, 1)


def test_a_frozen_half_is_equal_in_its_own_precision(ranks: Ranks) -> None:
    more = {"precision__compute": "bf16", "layout__dp": 2, "layout__zero": 3, "train__frozen": HALF}
    spec = spec_of(MODEL, **more, train__ema=0.9)
    found, _ = ranks.run(spec.layout, in_own_precision, spec)
    assert found is not None and found["equal"], found["first"]
    assert any(row["kind"] == "step 1 frozen" for row in found["rows"])
