"""Plans of runs that train adapters: bytes of a dry run, seconds, and bounds that no layout is below."""

from __future__ import annotations

import random
from math import inf
from typing import Any

import pytest
import torch

from covering import some
from meshwright.dryrun.rank_step import rehearse
from meshwright.hardware.find import cluster
from meshwright.planner.activations import activations
from meshwright.planner.cost.breakdown import weighted_sum
from meshwright.planner.cost.model import CostModel
from meshwright.planner.cost.stages import model_contents, parts, stored
from meshwright.planner.layout_space import LayoutSpace
from meshwright.planner.memory.exact import memory_model
from meshwright.planner.memory.states import states
from meshwright.planner.search.results import SearchCounts, SearchResult
from meshwright.planner.search.tree import MeshBranch, SearchTree
from meshwright.planner.traffic.messages import traffic
from meshwright.spec import RunSpec
from meshwright.spec.parameter_groups import run_parameters
from meshwright.spec.parameters import Parameter
from meshwright.spec.training_flops import flops_per_token

MODELS: dict[str, dict[str, Any]] = {
    "dense": {"preset": "tiny", "layers": 4, "kv_heads": 2, "vocab_size": 512},
    "tied": {"preset": "tiny", "layers": 4, "vocab_size": 512, "tied": True},
    "experts": {"preset": "moe-tiny", "layers": 3, "moe": {"experts": 8, "ffn": 64, "shared_ffn": 64}},
}
LORA: dict[str, Any] = {"rank": 8}


def spec_of(model: dict[str, Any], /, **sections: dict[str, Any]) -> RunSpec:
    given = {"model": model, "data": {"seq_len": 256}, "precision": {"compute": "bf16"}, "lora": LORA}
    return RunSpec.model_validate(given | {"train": {"batch_tokens": 16 * 256}} | sections)


LAYOUTS: list[dict[str, Any]] = [
    {"layout": {"dp": 4, "zero": 3}},
    {"layout": {"dp": 2, "zero": 1}, "train": {"batch_tokens": 16 * 256, "optimiser": "adamw8bit"}},
    {"layout": {"tp": 2}, "lora": LORA | {"targets": ["*.attn.q.weight", "blocks.2.*"]}},
    {"layout": {"tp": 2, "pp": 2, "sequence_parallel": False}},
    {"layout": {"pp": 2, "dp": 2, "zero": 3}, "train": {"batch_tokens": 16 * 256, "ema": 0.9}},
    {"layout": {"dp": 3, "zero": 3}, "train": {"batch_tokens": 15 * 256}, "lora": LORA | {"dora": True}},
    {"layout": {"tp": 2, "dp": 2, "zero": 1}, "lora": LORA | {"dora": True}},
    {"layout": {"dp": 2, "zero": 2}, "lora": LORA | {"dora": True, "quantise": "nf4"}},
]


@pytest.mark.parametrize("sections", some(LAYOUTS, [LAYOUTS[number] for number in (1, 4, 6, 7)]), ids=str)
def test_states_are_planned_to_the_byte(sections: dict[str, Any]) -> None:
    spec = spec_of(MODELS["dense"], **sections)
    assert rehearse(spec, 0, torch.device("cpu")).states == states(spec, 0).total


OF_EXPERTS: dict[str, Any] = {"rank": 8, "targets": ["all-linear", "*.experts.*"]}
EXPERT_LAYOUTS: list[dict[str, Any]] = [
    {"layout": {"dp": 2, "ep": 2}},
    {"layout": {"dp": 2, "tp": 2, "ep": 2, "zero": 1}},
    {"layout": {"dp": 8, "ep": 4, "zero": 3}, "lora": {"rank": 3, "targets": ["*.experts.*"]}},
    {"layout": {"dp": 4, "ep": 2, "pp": 2, "zero": 3}, "model": {**MODELS["experts"], "layers": 4}},
    {"layout": {"dp": 4, "ep": 4}, "train": {"batch_tokens": 16 * 256, "optimiser": "adamw8bit"}},
    {"layout": {"dp": 4, "ep": 2, "etp": 2, "zero": 1}, "lora": OF_EXPERTS | {"dropout": 0.1}},
    {"layout": {"dp": 8, "etp": 4, "zero": 3}, "lora": {"rank": 3, "targets": ["*.experts.*"]}},
]


@pytest.mark.parametrize("sections", some(EXPERT_LAYOUTS, EXPERT_LAYOUTS[1::2]), ids=str)
def test_states_of_experts_are_planned_to_the_byte(sections: dict[str, Any]) -> None:
    spec = spec_of(MODELS["experts"], **{"lora": OF_EXPERTS} | sections)
    found = rehearse(spec, 0, torch.device("cpu"))
    assert found.states == states(spec, 0).total
    assert found.wire == pytest.approx(traffic(spec, 0), rel=1e-14)


EXPERT_POLICIES: list[dict[str, Any]] = [
    {},
    {"layout": {"dp": 2, "ep": 2}},
    {"layout": {"tp": 2, "ep": 2}, "recompute": {"policy": "selective"}},
    {"recompute": {"policy": "full"}},
    {"layout": {"dp": 2, "etp": 2}},
]


@pytest.mark.parametrize("sections", some(EXPERT_POLICIES, EXPERT_POLICIES[2:]), ids=str)
def test_adapters_of_experts_keep_nothing(sections: dict[str, Any]) -> None:
    spec = spec_of(MODELS["experts"], **{"lora": OF_EXPERTS} | sections)
    found = rehearse(spec, 0, torch.device("cpu"))
    assert activations(spec).kept == pytest.approx(found.most["activations"], rel=0.03)


@pytest.mark.parametrize("sections", some(EXPERT_POLICIES[:3], EXPERT_POLICIES[1:2]), ids=str)
def test_their_dropout_keeps_the_keys_of_rows_alone(sections: dict[str, Any]) -> None:
    planned, measured = [], []
    for targets in (["all-linear"], OF_EXPERTS["targets"]):
        lora = {"rank": 8, "dropout": 0.1, "targets": targets}
        spec = spec_of(MODELS["experts"], **sections | {"lora": lora})
        planned.append(activations(spec).kept)
        measured.append(rehearse(spec, 0, torch.device("cpu")).most["activations"])
    assert planned[1] - planned[0] == measured[1] - measured[0]


POLICIES: list[dict[str, Any]] = [
    {},
    {"layout": {"tp": 2}},
    {"layout": {"tp": 2, "sequence_parallel": False}},
    {"recompute": {"policy": "selective"}},
    {"layout": {"tp": 2}, "recompute": {"policy": "selective"}},
    {"layout": {"tp": 2}, "recompute": {"policy": "full"}},
    {"layout": {"tp": 2}, "lora": {"rank": 128, "dropout": 0.1}},
    *({"lora": {"rank": 8, "dora": True}} | how for how in [
        {}, {"layout": {"tp": 2}}, {"layout": {"tp": 2, "sequence_parallel": False}},
        {"layout": {"tp": 2}, "recompute": {"policy": "selective"}}, {"recompute": {"policy": "full"}},
    ]),
    {"layout": {"tp": 2}, "lora": {"rank": 8, "dora": True, "dropout": 0.1}},
]  # fmt: skip


@pytest.mark.parametrize("sections", some(POLICIES, POLICIES[2::2]), ids=str)
def test_what_adapters_keep_is_planned(sections: dict[str, Any]) -> None:
    wide = {"preset": "tiny", "layers": 4, "hidden": 256, "ffn": 768, "vocab_size": 512}
    spec = spec_of(wide, **{"lora": {"rank": 128}} | sections)
    found = rehearse(spec, 0, torch.device("cpu"))
    assert activations(spec).kept == pytest.approx(found.most["activations"], rel=0.03)


def test_the_work_of_a_step_lacks_the_gradients_of_frozen_matrices() -> None:
    whole, small, large = (
        spec_of(MODELS["dense"], lora=given) for given in (None, {"rank": 1}, {"rank": 64})
    )
    adapters = [sum(p.size for p in _listed(spec) if p.trainable) for spec in (small, large)]
    frozen = sum(p.size for p in _listed(whole) if p.is_matrix and p.name != "embed.weight")
    for spec, added in zip((small, large), adapters, strict=True):
        assert flops_per_token(spec) == flops_per_token(whole) - 2 * frozen + 6 * added
    on = CostModel(cluster("h100", 1))
    of_all, of_lora = (weighted_sum(parts(on.blocks(each), model_contents(each))) for each in (whole, small))
    assert of_all.forward.matmul < of_lora.forward.matmul
    assert 0 < of_lora.weight.matmul < of_all.weight.matmul / 4
    held = stored(on.blocks(large), model_contents(large))
    assert held.dense - held.frozen == adapters[1]


def test_a_token_passes_the_adapters_of_its_own_experts() -> None:
    small, large = (
        spec_of(MODELS["experts"], lora={"rank": rank, "targets": ["*.experts.*"]}) for rank in (1, 33)
    )
    assert small.model.moe is not None
    of_one = 3 * (small.model.hidden + small.model.moe.ffn) * small.model.moe.top_k
    of_one *= sum(map(small.model.has_experts, range(small.model.layers)))
    assert flops_per_token(large) - flops_per_token(small) == 6 * 32 * of_one
    on = CostModel(cluster("h100", 1))
    held = stored(on.blocks(large), model_contents(large))
    assert held.routed - held.frozen_routed == sum(p.size for p in _listed(large) if p.trainable)


def test_layouts_cut_experts_that_have_adapters() -> None:
    space = LayoutSpace(
        spec_of(MODELS["experts"], lora={"rank": 8, "targets": ["*.experts.*"]}), 2, {"cp": 1}
    )
    assert {etp for _, etp in space.experts(2)} == {1, 2}


def _listed(spec: RunSpec) -> list[Parameter]:
    return [parameter for unit in run_parameters(spec).values() for parameter in unit]


@pytest.mark.parametrize("name", MODELS)
def test_no_layout_needs_less_than_the_bytes_by_which_it_is_dropped(name: str) -> None:
    chosen = random.Random(name)
    for _ in range(15):
        ranks = chosen.choice([1, 2, 4, 8])
        lora = {"rank": chosen.choice([1, 8, 32])}
        lora |= chosen.choice(
            [{}, {"targets": ["*.attn.*"]}, {"targets": ["blocks.2.*"]}, {"targets": ["*.mlp.*"]}]
        )
        batch = ranks * chosen.choice([1, 4]) * 256
        base = spec_of(MODELS[name], train={"batch_tokens": batch}, lora=lora)
        on = CostModel(cluster("h100", ranks))
        space, memory = LayoutSpace(base, ranks, {"cp": 1}), memory_model(on)
        tree = SearchTree(
            space, on, memory, inf, SearchResult(1, None, inf, None, 1.0, False, SearchCounts())
        )
        inner = chosen.choice(list(space.inner()))
        meshes = [mesh for pair in space.experts(ranks) for mesh in space.meshes(inner, *pair)]
        if not meshes:
            continue
        mesh = chosen.choice(meshes)
        sharding = chosen.choice(list(space.shardings(inner, mesh)))
        cut = chosen.choice(tree.bounds.cuts(mesh.pp))
        spec = space.spec(inner, mesh, sharding, cut.split)
        blocks, exact = on.blocks(spec), memory.peak(spec).device
        told = f"{lora} {spec.layout.describe()} zero{spec.layout.zero} {spec.recompute.policy}"
        assert memory.lower_bound(space.spec(inner, mesh, sharding), blocks, tree.model).device <= exact, told
        if mesh.pp == 1:
            assert memory.resident(spec, blocks, tree.model).device <= exact * (1 + 1e-9), told
        else:
            fitting = MeshBranch(tree, inner, mesh, blocks).fitting(cut, [sharding])
            assert fitting[sharding] <= exact * (1 + 1e-9), told
