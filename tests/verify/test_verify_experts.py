"""Experts over any axes equal one device: every router, uneven, empty and dropped, with all other axes."""

from __future__ import annotations

import random
from contextlib import closing
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from covering import marked, name
from equality import Counted, Run, equal_to_one_device, verify_and_count
from expert_cases import BASE, ROUTED, ROUTERS
from meshwright.comm.mesh import Mesh
from meshwright.model.router import Router
from meshwright.spec import MoeSpec, RunSpec
from meshwright.verify.narrow import narrow
from meshwright.verify.reference import decoder as reference_decoder
from ranks import Ranks
from small import spec_of


def check(ranks: Ranks, run: Run = verify_and_count, **flags: object) -> None:
    spec = spec_of(BASE, **flags)
    assert spec.model.moe is not None
    kinds = equal_to_one_device(ranks, spec, 1e-9, run=run)
    assert "step 2 balance" in kinds
    assert ("step 2 router bias" in kinds) == spec.model.moe.bias


QUICK = [case for number, case in enumerate(ROUTED) if number % 4 == number // 4 % 4]
"""A number of expert ranks for each router, and each number for some."""


@pytest.mark.parametrize("case", marked(ROUTED, QUICK))
def test_every_router_equals_one_device(ranks: Ranks, case: dict[str, object]) -> None:
    flags = dict(case)
    router = ROUTERS[str(flags.pop("router"))]
    check(ranks, **flags, **router, train__batch_tokens=16 * max(4, int(str(flags["layout__dp"]))))


RECOMPUTED: list[dict[str, object]] = [
    {**recompute, "train__batch_tokens": 16 * 2 * int(axes.get("layout__dp", 1)), **axes}
    for recompute in ({"policy": "full"}, {"policy": "selective"}, {"save": "attention"})
    for axes in ({"layout__dp": 1}, {"layout__dp": 2, "layout__ep": 2}, {"layout__tp": 2, "layout__ep": 2})
]


@pytest.mark.parametrize("case", marked(RECOMPUTED, RECOMPUTED[4:5]), ids=name)
def test_recomputed_experts_equal_one_device(ranks: Ranks, case: dict[str, object]) -> None:
    flags = {f"recompute__{key}" if key in ("policy", "save") else key: case[key] for key in case}
    check(ranks, **flags, **ROUTERS["capacity"], layout__expert_parts=2)


def to_one(_router: Router, scores: Tensor) -> Tensor:
    return torch.full((len(scores), 1), 5)


def all_to_one(_moe: MoeSpec, scores: Tensor, _bias: Tensor | None) -> Tensor:
    return torch.full((*scores.shape[:2], 1), 5)


def with_one_expert(mesh: Mesh, spec: RunSpec) -> Counted:
    with (
        patch.object(Router, "_choose", to_one),
        patch.object(reference_decoder, "choose_experts", all_to_one),
    ):
        return verify_and_count(mesh, spec, known=False)


ONE_EXPERT: list[dict[str, object]] = [
    {"model__moe__capacity_factor": capacity} | {f"layout__{key}": size for key, size in axes.items()}
    for axes in ({"dp": 4, "ep": 4}, {"dp": 2, "cp": 2, "ep": 2}, {"tp": 2, "dp": 2, "ep": 4})
    for capacity in ("none", 1.25)
]


@pytest.mark.parametrize("case", marked(ONE_EXPERT, [ONE_EXPERT[3]]), ids=name)
def test_all_tokens_may_go_to_one_expert(ranks: Ranks, case: dict[str, object]) -> None:
    check(ranks, with_one_expert, **case, model__moe__top_k=1)


SWITCHED: list[dict[str, object]] = [
    {"router": router, **axes}
    for axes in (
        {
            "layout__dp": 2, "layout__tp": 2, "layout__ep": 2, "layout__etp": 2, "layout__zero": 3,
            "recompute__policy": "selective", "train__optimiser": "muon",
        },
        {
            "layout__tp": 2, "layout__ep": 2, "layout__sequence_parallel": "false",
            "recompute__policy": "full", "train__optimiser": "adamw8bit",
        },
        {
            "layout__pp": 2, "layout__dp": 2, "layout__ep": 2, "layout__schedule": "zb-v", "model__layers": 4,
            "layout__zero": 2,
        },
        {"layout__tp": 4, "layout__ep": 2, "train__compile": "true", "recompute__policy": "selective"},
    )
    for router in ("gpt-oss", "qwen2, deepseek-v2")
]  # fmt: skip


@pytest.mark.parametrize("case", marked(SWITCHED, SWITCHED[4:5]), ids=name)
def test_biases_and_gates_go_with_slices_and_stages(ranks: Ranks, case: dict[str, object]) -> None:
    flags = dict(case)
    check(ranks, **(ROUTERS[str(flags.pop("router"))] | flags))


AXES: list[dict[str, object]] = [
    *({"dp": 8, "ep": 4, "zero": zero} for zero in range(4)),
    *({"dp": 4, "tp": 2, "ep": 2, "zero": zero} for zero in range(4)),
    {"dp": 2, "replicate": 2, "tp": 2, "ep": 2, "zero": 1},
    {"dp": 4, "replicate": 2, "ep": 2, "zero": 3},
    {"dp": 2, "tp": 2, "cp": 2, "ep": 8},
    {"dp": 2, "tp": 2, "cp": 2, "ep": 4, "etp": 2, "zero": 2},
    {"dp": 2, "tp": 4, "ep": 2, "etp": 2, "zero": 3},
    {"dp": 2, "tp": 4, "ep": 2, "etp": 4, "zero": 1},
    {"tp": 4, "cp": 2, "ep": 4, "zero": 2},
    {"cp": 4, "dp": 2, "ep": 4, "zero": 3},
    {"cp": 8, "ep": 8},
    {"dp": 2, "cp": 2, "pp": 2, "ep": 4, "zero": 1, "schedule": "1f1b"},
    {"cp": 2, "pp": 4, "ep": 2, "schedule": "zb-h1"},
    {"dp": 2, "tp": 2, "pp": 2, "ep": 2, "schedule": "zb-v", "zero": 1},
    {"dp": 2, "tp": 2, "pp": 2, "ep": 4, "schedule": "interleaved", "zero": 2},
    {"dp": 2, "tp": 2, "pp": 2, "ep": 2, "etp": 2, "schedule": "dualpipe-v", "zero": 3},
    {"tp": 2, "cp": 2, "pp": 2, "ep": 4, "schedule": "zb-h2"},
    {"tp": 2, "cp": 2, "pp": 2, "ep": 2, "etp": 2, "schedule": "gpipe"},
    {"dp": 4, "pp": 2, "ep": 4, "zero": 3, "schedule": "v-half"},
    {"dp": 2, "pp": 4, "ep": 2, "zero": 2, "schedule": "zb-h1"},
    {"replicate": 2, "dp": 2, "pp": 2, "ep": 2, "zero": 1, "schedule": "bfs"},
]  # fmt: skip


def check_axes(ranks: Ranks, axes: dict[str, object], layers: int, microbatches: int) -> None:
    """Check a layout with everything else drawn by the layout."""
    choose = random.Random(str(axes)).choice
    micro, data_ranks = choose([1, 2]), int(str(axes.get("dp", 1))) * int(str(axes.get("replicate", 1)))
    flags = {
        "layout__sequence_parallel": choose(["true", "false"]),
        "layout__expert_parts": choose([1, 2]),
        "layout__context_mode": choose(["ring", "gather", "ring+ulysses"]),
        "recompute__policy": choose(["none", "full", "selective"]),
        "data__pack": choose(["true", "false"]),
        "model__layers": layers,
        "model__kv_heads": 4,
        "layout__micro_batch": micro,
        "train__batch_tokens": 16 * micro * data_ranks * microbatches,
        **ROUTERS[choose(list(ROUTERS))],
        "model__moe__shared_ffn": choose([0, 8]),
    }
    if "model__moe__shared_gate" in flags:
        flags["model__moe__shared_ffn"] = 8
    axes_given = {f"layout__{key}": size for key, size in axes.items()}
    check(ranks, **(flags | axes_given))


QUICK_AXES = [AXES[number] for number in (11, 21)]
"""Each axis but replicas."""


@pytest.mark.parametrize("axes", marked(AXES, QUICK_AXES))
def test_experts_go_with_every_other_axis(ranks: Ranks, axes: dict[str, object]) -> None:
    pp = int(str(axes.get("pp", 1)))
    check_axes(ranks, axes, layers=4 if pp > 1 else 2, microbatches={1: 2, 2: 3, 4: 4}[pp])


@pytest.mark.full
@pytest.mark.parametrize("axes", [axes for axes in AXES if axes.get("pp") != 4], ids=name)
def test_experts_of_more_layers_or_microbatches(ranks: Ranks, axes: dict[str, object]) -> None:
    check_axes(ranks, axes, layers=4, microbatches=5 if "pp" in axes else 2)


@pytest.mark.full
def test_all_five_axes_on_sixteen_ranks() -> None:
    """The smallest world in which experts meet each axis at two ranks or more; the pool has eight."""
    flags: dict[str, object] = {
        "model__kv_heads": 2, "model__moe__capacity_factor": 1.25, "layout__dp": 2, "layout__cp": 2,
        "layout__tp": 2, "layout__pp": 2, "layout__ep": 4, "layout__etp": 2, "layout__zero": 2,
        "layout__schedule": "zb-h1",
    }  # fmt: skip
    with closing(Ranks(16)) as sixteen:
        check(sixteen, **(ROUTERS["deepseek"] | flags))


def test_a_narrowed_copy_chooses_experts_the_same_way() -> None:
    spec = spec_of(
        {"model.preset": "deepseek-v3", "layout.dp": 8, "layout.ep": 8, "layout.tp": 2, "layout.etp": 2},
        model__layers=61, model__hidden=7168, model__ffn=18432, model__heads=128, model__kv_heads=128,
        model__head_dim=192,
        data__seq_len=512, train__batch_tokens=512 * 64,
    )  # fmt: skip
    small, note = narrow(spec)
    assert note is not None and small.model.moe is not None and spec.model.moe is not None
    kept = {"top_k", "groups", "top_groups", "router", "bias", "scale", "renormalise", "aux_loss"}
    assert small.model.moe.model_dump(include=kept) == spec.model.moe.model_dump(include=kept)
    assert small.model.moe.experts < 64 and any(map(small.model.has_experts, range(small.model.layers)))
