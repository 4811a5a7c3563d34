"""Islands equal the algorithms of their papers on one device each, in float64, and send what they should."""

from __future__ import annotations

from typing import Any

import pytest

from covering import marked, name
from island_cases import BIASED, EXPERTS, spec_of, verify_islands
from ranks import Ranks

STREAMING = {"outer__every": 4, "outer__fragments": 2, "outer__delay": 1}
CASES: list[dict[str, Any]] = [
    {},
    {"outer__lr": 1.0, "outer__momentum": 0.0},
    {"outer__every": 3, "outer__nesterov": "false", "layout__replicate": 4},
    {"outer__every": 4, "outer__fragments": 3, "layout__replicate": 4, "layout__dp": 2},
    STREAMING | {"layout__tp": 2},
    STREAMING | {"outer__delay": 2, "outer__alpha": 0.25, "layout__dp": 2, "layout__zero": 3},
    STREAMING | {"outer__delay": 3, "outer__alpha": 0.0, "layout__cp": 2, "layout__zero": 2},
    {"layout__pp": 2, "layout__replicate": 4, "model__tied": "true", "outer__fragments": 2},
    {"layout__pp": 2, "layout__dp": 2, "layout__zero": 1, "model__tied": "false", **STREAMING},
    {"layout__dp": 2, "layout__ep": 2, **EXPERTS, **STREAMING},
    {"layout__dp": 2, "layout__tp": 2, "layout__ep": 4, "layout__zero": 3, **BIASED},
    {"layout__dp": 2, "train__optimiser": "muon", "layout__zero": 3, "outer__every": 3},
    {"train__optimiser": "sgd", "train__batch_warmup": "128:256", "train__batch_tokens": 8 * 32},
    {"train__optimiser": "adamw8bit", "outer__every": 1},
]
SPARSE = {"outer__top_k": 0.25, "outer__momentum": 0.0, "outer__lr": 1.0}
COMPRESSED: list[dict[str, Any]] = [
    {"outer__format": "bf16", "layout__dp": 2, "layout__zero": 3, "outer__error_decay": 1.0},
    {"outer__format": "int8", "layout__tp": 4, **STREAMING},
    {"outer__format": "int4", "layout__replicate": 4, "layout__dp": 2, "layout__zero": 1},
    {"outer__format": "fp4", "layout__pp": 2, "model__tied": "true", "outer__error_decay": 0.5, **STREAMING},
    {"outer__format": "fp4", "layout__cp": 2, "layout__zero": 2, "train__optimiser": "adamw8bit"},
    {"outer__format": "int4", "layout__dp": 2, "layout__tp": 2, "layout__ep": 2, "layout__etp": 2, **EXPERTS},
    {**SPARSE},
    {**SPARSE, "layout__tp": 2, "layout__dp": 2, "layout__zero": 2, "outer__every": 1},
    {**SPARSE, "outer__format": "int8", "layout__replicate": 3, "train__batch_tokens": 6 * 32, **STREAMING},
    {**SPARSE, "outer__format": "bf16", "layout__pp": 2, "layout__dp": 2, "outer__error_decay": 0.0},
    {**SPARSE, "outer__format": "int4", "layout__dp": 2, "layout__ep": 2, "layout__zero": 3, **BIASED},
    {**SPARSE, "outer__format": "fp4", "train__optimiser": "muon", "layout__dp": 2, "layout__zero": 3},
    # Signs of Lion at one rate: many magnitudes tie, and many are halfway between two codes.
    {**SPARSE, "outer__every": 1, **(LION := {"train__optimiser": "lion", "train__schedule": "constant"})},
    {"outer__format": "int8", "outer__every": 4, "layout__dp": 2, "layout__tp": 2, **LION},
]


QUICK = [CASES[5], *(COMPRESSED[number] for number in (1, 3, 10))]
"""Each axis but context, and three formats; `test_outer_compression.py` has each of them."""


@pytest.mark.parametrize("case", marked(CASES + COMPRESSED, QUICK), ids=name)
def test_islands_equal_their_papers(ranks: Ranks, case: dict[str, Any]) -> None:
    spec = spec_of(case)
    found = ranks.run(spec.layout, verify_islands, spec, rules="nccl")[0]
    assert found["narrowed"] is None
    assert found["equal"], found["first"]["sentence"]
    kinds = {row["kind"]: row["compared"] for row in found["rows"]}
    own = kinds["step 6 parameter"] + kinds.get("step 6 router bias", 0)
    assert own == spec.layout.replicate * kinds["step 6 outer parameter"] > 0
    assert kinds["step 6 loss"] == spec.layout.replicate
    errors = spec.layout.replicate * kinds["step 6 outer momentum"] if spec.outer.kept_error else 0
    assert kinds.get("step 6 outer error", 0) == errors
