"""Adapters of low rank under layouts: equal to one device, in numbers and in bytes sent."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
from torch import Tensor

from adapter_cases import EXPERTS, LORA_CASES, MODEL, in_own_precision
from covering import marked, name
from equality import equal_to_one_device
from expert_cases import BASE, ROUTERS
from meshwright.comm.mesh import Mesh
from meshwright.parallel import adapter_dropout
from meshwright.spec import RunSpec
from meshwright.train.step import Trainer
from meshwright.verify import verify as subject
from ranks import Ranks
from small import spec_of

QUICK = [LORA_CASES[index] for index in (4, 6, 19)]


@pytest.mark.parametrize("case", marked(LORA_CASES, QUICK), ids=name)
def test_adapters_equal_one_device(ranks: Ranks, case: dict[str, object]) -> None:
    equal_to_one_device(ranks, spec_of(MODEL, **case), 1e-9)


OF_EXPERTS = {"lora.rank": 3, "lora.alpha": 40.0, "lora.targets": "*.mlp.experts.*"}
BOTH = {"lora__targets": "all-linear,*.experts.*"}
DROPPING_EXPERTS: list[dict[str, object]] = [
    {"router": "mixtral", "dp": 2},
    {"router": "mixtral", "dp": 2, "ep": 2, "zero": 3, "recompute__policy": "full", **BOTH},
    {"router": "gpt-oss", "tp": 2, "ep": 2, **BOTH},
    {"router": "deepseek", "tp": 2, "dp": 2, "ep": 4, "sequence_parallel": "false", "expert_parts": 2},
    {"router": "qwen3", "cp": 2, "ep": 2, "recompute__policy": "selective"},
    {"router": "capacity", "pp": 2, "dp": 2, "ep": 2, "schedule": "zb-h1", "model__layers": 4},
]
EXPERT_LAYOUTS: list[dict[str, object]] = [
    {"router": "mixtral", "dp": 2, "ep": 2},
    {"router": "qwen3", "dp": 2, "tp": 2, "ep": 2, **BOTH},
    {"router": "deepseek", "dp": 4, "ep": 4, "zero": 3, "recompute__policy": "selective"},
    {"router": "qwen2, deepseek-v2", "pp": 2, "dp": 2, "ep": 2, "schedule": "zb-h1", "model__layers": 4},
    {"router": "gpt-oss", "tp": 2, "ep": 2, "sequence_parallel": "false", **BOTH},
    {"router": "capacity", "dp": 4, "ep": 2, "zero": 3, "recompute__policy": "full", "expert_parts": 2},
    {"router": "switch", "dp": 2, "replicate": 2, "ep": 2, "zero": 1, "lora__rslora": "true", **BOTH},
    {"router": "mixtral", "cp": 2, "ep": 2, "lora__targets": "*.experts.gate"},
    {"router": "mixtral", "tp": 4, "ep": 4, "lora__targets": "blocks.1.mlp.experts.down"},
    {"router": "qwen3", "dp": 2, "ep": 2, "zero": 2, "lora__targets": "*.experts.up", "lora__rank": 8},
    {"router": "mixtral", "dp": 8, "ep": 2, "zero": 3, "train__optimiser": "muon"},
    {"router": "gpt-oss", "dp": 2, "ep": 2, "zero": 1, "train__optimiser": "adamw8bit", "lora__rank": 4},
    {"router": "deepseek", "pp": 2, "ep": 2, "dp": 2, "schedule": "zb-v", "model__layers": 4, "zero": 2},
    {"router": "mixtral", "dp": 2, "cp": 2, "pp": 2, "ep": 4, "schedule": "1f1b", "model__layers": 4, **BOTH},
    *({"lora__dropout": 0.3} | layout for layout in DROPPING_EXPERTS),
    {"router": "mixtral", "dp": 2, "etp": 2, "lora__dropout": 0.3},
    {"router": "gpt-oss", "dp": 4, "ep": 2, "etp": 2, "zero": 3, "lora__dropout": 0.3, **BOTH},
    {"router": "qwen3", "tp": 2, "etp": 2, "sequence_parallel": "false", "recompute__policy": "full", **BOTH},
    {"router": "deepseek", "dp": 2, "tp": 2, "etp": 4, "zero": 1, "lora__targets": "*.experts.down"},
    {"router": "mixtral", "dp": 8, "ep": 2, "etp": 2, "zero": 2, "train__optimiser": "muon"},
    {"router": "capacity", "pp": 2, "dp": 2, "etp": 2, "schedule": "zb-h1", "model__layers": 4},
    {"router": "qwen3", "dp": 4, "etp": 2, "zero": 1, "train__optimiser": "adamw8bit", "lora__rank": 4},
]  # fmt: skip
QUICK_EXPERTS = [EXPERT_LAYOUTS[number] for number in (3, 4, 20)]


@pytest.mark.parametrize("case", marked(EXPERT_LAYOUTS, QUICK_EXPERTS), ids=name)
def test_adapters_of_experts_equal_one_device(ranks: Ranks, case: dict[str, object]) -> None:
    flags = {key if "__" in key else f"layout__{key}": value for key, value in case.items()}
    router = ROUTERS[str(flags.pop("layout__router"))]
    microbatches = 4 if "pp" in case else 2
    samples = microbatches * int(str(case.get("dp", 1))) * int(str(case.get("replicate", 1)))
    flags = {"train__batch_tokens": 16 * samples} | router | flags
    equal_to_one_device(ranks, spec_of(BASE | OF_EXPERTS, **flags), 1e-9)


@pytest.mark.parametrize(
    "experts", [pytest.param(False, id="dense", marks=pytest.mark.full), pytest.param(True, id="experts")]
)
def test_adapters_are_equal_in_their_own_precision(ranks: Ranks, experts: bool) -> None:
    routed = EXPERTS | {"lora__targets": "all-linear,*.experts.*"} if experts else {}
    spec = spec_of(MODEL, precision__compute="bf16", layout__tp=2, **routed)
    found, _ = ranks.run(spec.layout, in_own_precision, spec)
    assert found is not None and found["equal"], found["first"]


def not_summed(mesh: Mesh, spec: RunSpec, rank: int, parameter: str) -> dict[str, Any] | None:
    """`verify` where one tensor rank leaves out the sum of a parameter's partial gradients."""

    class Broken(Trainer):
        def __init__(self, *args: Any, **how: Any) -> None:
            super().__init__(*args, **how)
            reduction = self.states._reduction
            honest = reduction._sum_over_tensor

            def harmed() -> None:
                unit, slot = next(
                    (unit, slot)
                    for unit in self.states.trained
                    for slot in unit.slots
                    if slot.key == parameter
                )
                partial = unit.gradient_of(slot).clone()
                honest()
                if self.mesh.tensor.rank == rank:
                    unit.gradient_of(slot).copy_(partial)

            reduction._sum_over_tensor = harmed  # type: ignore[method-assign]

    with patch.object(subject, "Trainer", Broken):
        return subject.verify(spec, mesh, 2)


@pytest.mark.parametrize(
    ("rank", "parameter", "kind", "name"),
    [
        (0, "blocks.1.attn.o.lora_b.weight", "gradient", "blocks.1.attn.o.lora_b.weight"),
        (0, "blocks.1.attn.k.lora_a.weight", "gradient", "blocks.1.attn.k.lora_a.weight"),
        (1, "blocks.1.mlp.up.lora_a.weight", "replicas", "up.lora_a.weight"),
    ],
)
def test_a_gradient_that_one_tensor_rank_does_not_sum_is_named(
    ranks: Ranks, rank: int, parameter: str, kind: str, name: str
) -> None:
    spec = spec_of(MODEL, layout__tp=2)
    found, _ = ranks.run(spec.layout, not_summed, spec, rank, parameter)
    assert found is not None and not found["equal"]
    assert kind in found["first"]["kind"] and name in found["first"]["sentence"]


def dropped_by_rank(mesh: Mesh, spec: RunSpec) -> dict[str, Any] | None:
    """`verify` where each data rank numbers its samples from 0, and so drops what the first rank does."""
    honest = adapter_dropout.token_keys

    def harmed(seed: int, update: int, slots: Tensor, places: Tensor) -> Tensor:
        return honest(seed, update, slots - slots.min(), places)

    with patch.object(adapter_dropout, "token_keys", harmed):
        return subject.verify(spec, mesh, 2)


def test_dropout_that_depends_on_the_rank_is_named(ranks: Ranks) -> None:
    spec = spec_of(MODEL, layout__dp=2, layout__micro_batch=2, lora__dropout=0.3)
    found, _ = ranks.run(spec.layout, dropped_by_rank, spec)
    assert found is not None and not found["equal"]
    assert ".lora_b.weight" in found["first"]["sentence"], found["first"]
