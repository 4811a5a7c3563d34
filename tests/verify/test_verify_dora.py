"""Adapters with magnitudes (DoRA) under layouts: equal to one device, in numbers and in bytes sent."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from adapter_cases import DENSE, LORA_CASES, MODEL, PAIRS, QUANTISED, assert_equal, in_own_precision
from covering import marked, name
from equality import equal_to_one_device
from meshwright.comm.mesh import Mesh
from meshwright.parallel.tensor_lora import SumOfSquares
from meshwright.spec import RunSpec
from meshwright.verify import verify as subject
from ranks import Ranks
from small import spec_of

DORA = {"lora__dora": "true"}
CASES: list[dict[str, object]] = [
    {
        "layout__tp": 2, "layout__sequence_parallel": "false", "model__mlp_bias": "true",
        "model__out_bias": "true",
    },
    {"layout__tp": 2, "recompute__policy": "full", "lora__dropout": 0.3, "model__out_bias": "true"},
    {"layout__tp": 2, "layout__pp": 2, "layout__schedule": "zb-h1", "recompute__policy": "full"},
    {"layout__tp": 2, "precision__compute": "bf16", "precision__master": "bf16"},
    *LORA_CASES,
]  # fmt: skip
OWN = len(CASES) - len(LORA_CASES)
DROPPED = 4 + next(index for index, case in enumerate(LORA_CASES) if "lora__dropout" in case)
QUICK = [CASES[2], CASES[OWN + 4], CASES[DROPPED]]


@pytest.mark.parametrize("case", marked(CASES, QUICK), ids=name)
def test_magnitudes_equal_one_device(ranks: Ranks, case: dict[str, object]) -> None:
    equal_to_one_device(ranks, spec_of(MODEL, **DORA | case), 1e-9)


@pytest.mark.parametrize(
    "layout",
    [{"layout__tp": 2, "lora__dropout": 0.3}, pytest.param({"layout__pp": 2}, marks=pytest.mark.full)],
    ids=name,
)
def test_the_reference_of_dpo_is_the_base_without_magnitudes(ranks: Ranks, layout: dict[str, object]) -> None:
    assert_equal(ranks, spec_of(DENSE | PAIRS, **DORA, lora__rank=3, lora__alpha=40.0, **layout))


BASES: list[dict[str, object]] = [
    {"layout__tp": 2},
    {"layout__dp": 2, "layout__zero": 3, "lora__quantise": "int8"},
    {"layout__tp": 2, "precision__compute": "bf16", "precision__master": "bf16"},
    {"layout__pp": 2, "layout__schedule": "zb-h1", "lora__quantise": "int4"},
    {"layout__cp": 2, "layout__tp": 2, "recompute__policy": "full", "lora__dropout": 0.3},
]


@pytest.mark.parametrize("case", marked(BASES, BASES[1:2]), ids=name)
def test_magnitudes_are_those_of_the_dequantised_base(ranks: Ranks, case: dict[str, object]) -> None:
    equal_to_one_device(ranks, spec_of(QUANTISED, **DORA | case), 1e-9)


@pytest.mark.parametrize(
    "base", [pytest.param(MODEL, id="plain", marks=pytest.mark.full), pytest.param(QUANTISED, id="quantised")]
)
def test_magnitudes_are_equal_in_their_own_precision(ranks: Ranks, base: dict[str, Any]) -> None:
    spec = spec_of(base, precision__compute="bf16", layout__tp=2, **DORA)
    found, _ = ranks.run(spec.layout, in_own_precision, spec)
    assert found is not None and found["equal"], found["first"]


def with_own_lengths(mesh: Mesh, spec: RunSpec) -> dict[str, Any] | None:
    """`verify` where a tensor rank takes the lengths of its own part of rows, times the ranks' number."""

    def harmed(self: SumOfSquares, inputs: Any) -> list[Tensor]:
        return [inputs[0] * mesh.tensor.size]

    with patch.object(SumOfSquares, "forward", harmed):
        return subject.verify(spec, mesh, 2)


def test_lengths_that_tensor_ranks_do_not_sum_are_named(ranks: Ranks) -> None:
    spec = spec_of(MODEL, layout__tp=2, **DORA)
    found, _ = ranks.run(spec.layout, with_own_lengths, spec)
    assert found is not None and not found["equal"]
    assert any(each in found["first"]["sentence"] for each in ("attn.o", "mlp.down", "blocks.0.attn"))


def test_a_row_of_zeros_stays_finite() -> None:
    from meshwright.model.lora import merged

    found = merged(torch.zeros(2, 3), torch.ones(1, 3), torch.zeros(2, 1), 1.0, torch.zeros(2))
    assert torch.equal(found, torch.zeros(2, 3))
