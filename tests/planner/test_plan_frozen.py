"""Plans of runs that do not train some parameters."""

from __future__ import annotations

import random
from math import inf
from typing import Any

import pytest

from meshwright.hardware.find import cluster
from meshwright.planner.cost.model import CostModel
from meshwright.planner.cost.stages import model_contents, parts, stored
from meshwright.planner.layout_space import LayoutSpace
from meshwright.planner.memory.exact import memory_model
from meshwright.planner.memory.states import checkpoint_bytes, states
from meshwright.planner.search.results import SearchCounts, SearchResult
from meshwright.planner.search.tree import MeshBranch, SearchTree
from meshwright.planner.traffic.messages import traffic
from meshwright.spec import RunSpec

HALF = ["embed.*", *(f"blocks.{layer}.*" for layer in range(4))]
MODELS: dict[str, dict[str, Any]] = {
    "dense": {"preset": "tiny", "layers": 8, "kv_heads": 2, "vocab_size": 512},
    "tied": {"preset": "tiny", "layers": 8, "vocab_size": 5120, "tied": True},
    "experts": {"preset": "moe-tiny", "layers": 6, "moe": {"experts": 8, "ffn": 64}},
}


def spec_of(model: dict[str, Any], **sections: dict[str, Any]) -> RunSpec:
    train = {"batch_tokens": 16 * 64, "frozen": HALF} | sections.pop("train", {})
    return RunSpec.model_validate(
        {"model": model, "data": {"seq_len": 64}, "precision": {"compute": "bf16"}, "train": train} | sections
    )


def all_trained(spec: RunSpec) -> RunSpec:
    return spec.model_copy(update={"train": spec.train.model_copy(update={"frozen": ()})})


@pytest.mark.parametrize("zero", [0, 1, 3])
def test_a_frozen_half_takes_what_its_numbers_in_bf16_do(zero: int) -> None:
    spec = spec_of(MODELS["dense"], layout={"dp": 4, "zero": zero, "micro_batch": 4})
    frozen, whole = states(spec), states(all_trained(spec))
    shared = 4 if zero == 3 else 1
    model, trained = spec.model, checkpoint_bytes(spec) / checkpoint_bytes(all_trained(spec))
    elements = round(model.parameters * (1 - trained))
    assert frozen.gradients == pytest.approx(whole.gradients * trained, rel=0.02)
    assert frozen.optimiser == pytest.approx(whole.optimiser * trained, rel=0.02)
    held = [each.parameters + each.masters for each in (frozen, whole)]
    of_trained = (4 / (4 if zero else 1) + (2 if zero < 3 else 0)) * model.parameters * trained
    assert held[0] == pytest.approx(of_trained + 2 * elements / shared, rel=0.02)
    sent = [traffic(each) for each in (spec, all_trained(spec))]
    operation = "reduce_scatter" if zero else "all_reduce"
    share = sent[0]["shard", operation] / sent[1]["shard", operation]
    assert share == pytest.approx(trained, rel=0.02)


def test_modules_before_the_first_trained_one_have_no_backward() -> None:
    spec = spec_of(MODELS["dense"])
    costs = CostModel(cluster("h100", 1))
    frozen, whole = ([*parts(costs.blocks(each), model_contents(each))] for each in (spec, all_trained(spec)))
    (_, blocks), (_, embed), _ = frozen
    (count, every), *_ = whole
    assert count == 8 and blocks.forward.matmul == pytest.approx(8 * every.forward.matmul)
    assert blocks.input.matmul == pytest.approx(4 * every.input.matmul)
    assert blocks.weight.matmul == pytest.approx(4 * every.weight.matmul)
    assert embed.weight.total == embed.input.total == 0.0 < embed.forward.total


def test_a_block_that_is_frozen_in_part_has_no_products_for_its_weights() -> None:
    spec = spec_of(MODELS["dense"], train={"frozen": ["blocks.*.mlp.*"]})
    costs = CostModel(cluster("h100", 1))
    blocks, contents = costs.blocks(spec), model_contents(spec)
    (_, found), *_ = parts(blocks, contents)
    (_, every), *_ = parts(blocks, contents._replace(trained=None))
    assert found.input.matmul == pytest.approx(8 * every.input.matmul)
    assert 0 < found.weight.matmul < 8 * every.weight.matmul / 2
    held = stored(blocks, contents)
    assert held.frozen == 8 * 3 * spec.model.hidden * spec.model.ffn


@pytest.mark.parametrize("name", MODELS)
def test_no_layout_needs_less_than_the_bytes_by_which_it_is_dropped(name: str) -> None:
    chosen = random.Random(name)
    for _ in range(25):
        ranks = chosen.choice([1, 2, 4, 8])
        pattern = chosen.choice([HALF, ["embed.*"], ["*.attn.*"], ["blocks.*", "embed.*"], ["*head*"]])
        if name == "tied" and pattern == ["*head*"]:
            pattern = ["embed.weight"]
        batch = ranks * chosen.choice([1, 4]) * 64
        base = spec_of(MODELS[name], train={"batch_tokens": batch, "frozen": pattern})
        on = CostModel(cluster("h100", ranks))
        space, memory = LayoutSpace(base, ranks, {"cp": 1}), memory_model(on)
        counts = SearchCounts()
        tree = SearchTree(space, on, memory, inf, SearchResult(1, None, inf, None, 1.0, False, counts))
        inner = chosen.choice(list(space.inner()))
        meshes = [mesh for pair in space.experts(ranks) for mesh in space.meshes(inner, *pair)]
        if not meshes:
            continue
        mesh = chosen.choice(meshes)
        sharding = chosen.choice(list(space.shardings(inner, mesh)))
        cut = chosen.choice(tree.bounds.cuts(mesh.pp))
        spec = space.spec(inner, mesh, sharding, cut.split)
        blocks, exact = on.blocks(spec), memory.peak(spec).device
        told = f"{pattern} {spec.layout.describe()} zero{spec.layout.zero} {spec.recompute.policy}"
        assert memory.lower_bound(space.spec(inner, mesh, sharding), blocks, tree.model).device <= exact, told
        if mesh.pp == 1:
            assert memory.resident(spec, blocks, tree.model).device <= exact * (1 + 1e-9), told
        else:
            fitting = MeshBranch(tree, inner, mesh, blocks).fitting(cut, [sharding])
            assert fitting[sharding] <= exact * (1 + 1e-9), told
