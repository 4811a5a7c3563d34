"""A base in 8 and 4 bits under layouts: equal to one device, in numbers and in bytes sent."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from adapter_cases import QUANTISED, in_own_precision
from covering import marked, name
from equality import equal_to_one_device
from meshwright.comm.mesh import Mesh
from meshwright.parallel.quantised_weights import QuantisedWeights
from meshwright.spec import RunSpec, load
from meshwright.verify import verify as subject
from meshwright.verify.narrow import narrow
from ranks import Ranks
from small import spec_of

MLA = {
    "model__mla__kv_rank": 64,
    "model__mla__rope_dim": 2,
    "model__mla__v_dim": 16,
    "model__mla__q_rank": 64,
    "model__kv_heads": 8,
}
EXPERTS = {"model__moe__experts": 8, "model__moe__top_k": 2, "model__moe__ffn": 12, "layout__ep": 2}
CASES: list[dict[str, object]] = [
    {},
    {"lora__quantise": "int8"},
    {"lora__quantise": "int4"},
    *({"layout__dp": 4, "layout__zero": zero} for zero in (0, 1, 2)),
    {"layout__dp": 2, "layout__zero": 3},
    {"layout__dp": 4, "layout__zero": 3, "lora__quantise": "int8", "recompute__policy": "full"},
    {"layout__dp": 2, "layout__replicate": 2, "layout__zero": 3, "lora__targets": "*.attn.q.weight"},
    {"layout__tp": 2},
    {"layout__tp": 2, "layout__sequence_parallel": "false", "lora__quantise": "int8"},
    {"layout__tp": 2, "recompute__policy": "selective", "layout__dp": 2, "layout__zero": 3},
    {"layout__cp": 2},
    {"layout__cp": 2, "layout__tp": 2, "recompute__policy": "full", "lora__dropout": 0.3},
    {"layout__pp": 2, "layout__schedule": "1f1b"},
    {"layout__pp": 2, "layout__schedule": "zb-h1", "lora__targets": "blocks.3.*"},
    {"layout__pp": 2, "layout__schedule": "zb-v", "model__tied": "true"},
    {"layout__pp": 2, "layout__dp": 2, "layout__zero": 2, "recompute__policy": "full"},
    {"layout__dp": 2, "layout__zero": 3, **EXPERTS, "model__moe__shared_ffn": 64},
    {"layout__tp": 2, "layout__dp": 2, "layout__zero": 2, **MLA},
    {"precision__compute": "bf16", "precision__master": "bf16", "layout__dp": 2, "layout__zero": 1},
]  # fmt: skip
QUICK = [CASES[index] for index in (9, 14, 18)]


@pytest.mark.parametrize("case", marked(CASES, QUICK), ids=name)
def test_a_quantised_base_equals_one_device(ranks: Ranks, case: dict[str, object]) -> None:
    equal_to_one_device(ranks, spec_of(QUANTISED, **case), 1e-9)


@pytest.mark.parametrize(
    "layout",
    [{"layout__dp": 2, "layout__zero": 3}, pytest.param({"layout__tp": 2}, marks=pytest.mark.full)],
    ids=name,
)
def test_a_quantised_base_is_equal_in_its_own_precision(ranks: Ranks, layout: dict[str, object]) -> None:
    spec = spec_of(QUANTISED, precision__compute="bf16", **layout)
    found, _ = ranks.run(spec.layout, in_own_precision, spec)
    assert found is not None and found["equal"], found["first"]


def with_late_codes(mesh: Mesh, spec: RunSpec) -> dict[str, Any] | None:
    """`verify` where the last rank reads the first block's scale for the second one of each weight."""
    honest = QuantisedWeights._places

    def harmed(self: QuantisedWeights, *of: Any) -> tuple[Tensor, Tensor]:
        codes, largest = honest(self, *of)
        if mesh.rank == mesh.world.size - 1 and torch.is_grad_enabled():
            largest = largest.clone()
            largest[1] = largest[0]
        return codes, largest

    with patch.object(QuantisedWeights, "_places", harmed):
        return subject.verify(spec, mesh, 2)


@pytest.mark.parametrize("layout", [{"layout__dp": 2}, {"layout__tp": 2}], ids=name)
def test_a_scale_of_another_block_is_noticed(ranks: Ranks, layout: dict[str, object]) -> None:
    spec = spec_of(QUANTISED, **layout)
    found, _ = ranks.run(spec.layout, with_late_codes, spec)
    assert found is not None and not found["equal"]


def test_a_narrowed_copy_has_whole_blocks_on_each_rank() -> None:
    large = {"model.preset": "small", "lora.rank": 8, "lora.quantise": "nf4"}
    spec = load(None, [(key, str(value)) for key, value in large.items()] + [("layout.tp", "2")])
    small, note = narrow(spec)
    assert note is not None and small.lora is not None and small.lora.quantise == "nf4"
    assert small.model.parameters < spec.model.parameters / 10
