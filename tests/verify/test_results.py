"""Results of `verify` are strict JSON, whatever was found."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from meshwright.api.verify_runs import _joined
from meshwright.verify.compare import Comparison
from meshwright.verify.measured import Measurements
from meshwright.verify.sweep import row_of
from small import spec_of

ONE = torch.ones(2, dtype=torch.float64)


def in_float64(ours: dict[str, torch.Tensor]) -> dict[str, Any]:
    comparison = Comparison()
    comparison.add(1, "gradient", ours, {"norm.weight": ONE, "head.weight": ONE})
    return comparison.result({"dp": 2})


def in_own_precision(ours: dict[str, torch.Tensor]) -> dict[str, Any]:
    measured = Measurements()
    measured.close(1, "exp_avg", ours, {"norm.weight": ONE, "head.weight": ONE}, 1e-5, "{} differs")
    measured.add(1, "gradient slope", "head.weight", 0.0, math.inf, "not compared")
    return measured.result()


@pytest.mark.parametrize("result", [in_float64, in_own_precision])
@pytest.mark.parametrize("wrong", [None, ONE * math.nan, torch.ones(3, dtype=torch.float64)], ids=str)
def test_a_missing_tensor_or_value_is_null_in_json(
    result: Callable[[dict[str, torch.Tensor]], dict[str, Any]], wrong: torch.Tensor | None
) -> None:
    ours = {"norm.weight": ONE} | ({} if wrong is None else {"head.weight": wrong})
    found = result(ours)
    json.dumps(found, allow_nan=False)
    assert (found["equal"], found["worst_relative"], found["first"]["relative"]) == (False, None, None)
    assert found["first"]["name"] == "head.weight"
    assert row_of(spec_of({}), found, 1.0)["worst"] is None
    right = {**result({"norm.weight": ONE, "head.weight": ONE}), "layout": "dp=2", "steps": 1}
    joined = _joined(right, {**found, "layout": "tp=2", "steps": 1})
    assert (joined["worst_relative"], joined["worst_name"]) == (None, found["worst_name"])
