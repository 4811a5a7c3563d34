"""Pairs of answers: each layout's loss of them equals one device, and planted bugs are named."""

from __future__ import annotations

from typing import Any

import pytest

from covering import marked, name
from equality import STEPS
from expert_cases import BASE, ROUTERS
from meshwright.comm.mesh import Mesh
from meshwright.spec import RunSpec
from meshwright.verify.verify import verify
from ranks import Ranks
from small import spec_of

DENSE = {key: value for key, value in BASE.items() if not key.startswith("model.moe")}
PAIRS: dict[str, object] = {
    "preference.loss": "dpo", "data.seq_len": 32, "train.batch_tokens": 8 * 32, "data.val_fraction": 0.1,
}  # fmt: skip
LORA: dict[str, object] = {"lora__rank": 3, "lora__alpha": 40.0}
SIMPO: dict[str, object] = {"preference__loss": "simpo", "preference__beta": 2.0}
ORPO: dict[str, object] = {"preference__loss": "orpo", "preference__beta": 0.7}
SMOOTH: dict[str, object] = {"preference__label_smoothing": 0.2}
CASES: list[dict[str, object]] = [
    {**LORA},
    {**LORA, **SMOOTH, "lora__dropout": 0.3, "recompute__policy": "full"},
    {**LORA, "dp": 2, "zero": 3},
    {**SIMPO, "dp": 2, "zero": 2, "data__pack": "false"},
    {**ORPO, "dp": 2, "zero": 3, "train__ema": 0.9},
    {**LORA, "tp": 2},
    {**LORA, "tp": 2, "sequence_parallel": "false"},
    {**SIMPO, **SMOOTH, "tp": 2},
    {**LORA, "cp": 2},
    {**ORPO, "cp": 2, "context_mode": "ulysses"},
    {**LORA, "pp": 2, "schedule": "zb-h1"},
    {**SIMPO, "pp": 2, "schedule": "1f1b"},
    {**LORA, "dp": 2, "zero": 3, "tp": 2},
    {**LORA, "pp": 2, "schedule": "zb-h1", "cp": 2, "micro_batch": 2},
    {**LORA, "cp": 2, "tp": 2, "recompute__policy": "selective", "data__pack": "false"},
]  # fmt: skip


def flags(case: dict[str, object]) -> dict[str, object]:
    """Flags of a case, whose names without a section are of the layout."""
    return {key if "__" in key else f"layout__{key}": value for key, value in case.items()}


def compared(mesh: Mesh, spec: RunSpec) -> dict[str, Any] | None:
    return verify(spec, mesh, STEPS)


def assert_equal(ranks: Ranks, spec: RunSpec) -> None:
    found = ranks.run(spec.layout, compared, spec, rules="nccl")[0]
    assert found["equal"], found["first"]["sentence"]
    assert found["worst_relative"] <= 1e-9, found["worst_name"]
    kinds = {row["kind"] for row in found["rows"]}
    assert {"step 2 parameter", "step 2 loss", f"step {STEPS} validation loss"} <= kinds


@pytest.mark.parametrize("case", marked(CASES, [CASES[n] for n in (0, 2, 4, 5, 8, 10, 13)]), ids=name)
def test_every_axis_equals_one_device(ranks: Ranks, case: dict[str, object]) -> None:
    assert_equal(ranks, spec_of(DENSE | PAIRS, **flags(case)))


def test_experts_equal_one_device(ranks: Ranks) -> None:
    case = {"ep": 2, "dp": 2, "zero": 2, **LORA}
    assert_equal(ranks, spec_of(BASE | PAIRS, **ROUTERS["qwen3"], **flags(case)))
