"""Islands that come in the order of a script equal a sequence of runs of one device each, in float64."""

from __future__ import annotations

from typing import Any

import pytest

from covering import marked, name
from island_cases import BIASED, EXPERTS, STEPS, spec_of, verify_islands
from meshwright.spec.outer import scripted_arrivals
from ranks import Ranks

FREE = {"outer__quorum": 1, "outer__every": 2}
CASES: list[dict[str, Any]] = [
    FREE,
    FREE | {"outer__every": 1, "layout__replicate": 4, "outer__momentum": 0.0},
    FREE | {"layout__replicate": 4, "outer__staleness_lr": "inverse", "layout__dp": 2, "layout__zero": 3},
    FREE | {"layout__pp": 2, "layout__replicate": 4, "model__tied": "true", "outer__staleness_lr": "inverse"},
    FREE | {"layout__tp": 2, "layout__replicate": 4, "outer__quorum": 2, "outer__every": 1},
    FREE | {"layout__dp": 2, "layout__ep": 2, **EXPERTS, "outer__quorum": 2, "outer__every": 1},
    FREE
    | {
        "layout__cp": 2,
        "layout__zero": 2,
        "layout__replicate": 4,
        "outer__quorum": 3,
        "outer__every": 1,
        **BIASED,
    },
    FREE | {"train__optimiser": "muon", "train__batch_warmup": "128:256", "train__batch_tokens": 8 * 32},
]


@pytest.mark.parametrize("case", marked(CASES, CASES[-1:]), ids=name)
def test_islands_that_come_by_a_script_equal_one_device_each(ranks: Ranks, case: dict[str, Any]) -> None:
    spec = spec_of(case)
    exchanges = [
        each for step in range(1, STEPS + 1) for each in scripted_arrivals(step, spec.step_groups, spec.outer)
    ]
    assert len(exchanges) > 2
    found = ranks.run(spec.layout, verify_islands, spec, rules="nccl")[0]
    assert found["equal"], found["first"]["sentence"]
    kinds = {row["kind"]: row["compared"] for row in found["rows"]}
    assert f"step {STEPS} outer momentum" in kinds
