"""Bounds of the search: never above the seconds of a layout below them, and near enough to leave most out."""

from __future__ import annotations

import random
from typing import Any

import pytest

from meshwright.hardware.find import cluster
from meshwright.planner.cost.layer import LayerCost
from meshwright.planner.cost.lower_bounds import Floor, microbatch_seconds
from meshwright.planner.cost.model import CostModel
from meshwright.planner.cost.software import STACKS
from meshwright.planner.cost.step import step_time
from meshwright.planner.layout_space import LayoutSpace
from meshwright.planner.search.branch_and_bound import search
from meshwright.planner.search.branch_bounds import BranchBounds
from meshwright.planner.search.results import ROUNDING
from meshwright.spec import RunSpec


def run(model: dict[str, Any], seq_len: int, sequences: int) -> RunSpec:
    return RunSpec.model_validate(
        {
            "model": model,
            "data": {"seq_len": seq_len},
            "train": {"batch_tokens": sequences * seq_len},
            "precision": {"compute": "bf16"},
        }
    )


DENSE = {"preset": "llama3-8b", "layers": 10}
EXPERTS = {"preset": "mixtral-8x7b", "layers": 6}


@pytest.mark.parametrize("model", [DENSE, EXPERTS], ids=["dense", "experts"])
@pytest.mark.parametrize("stack", ["meshwright", "megatron-core"])
def test_a_floor_costs_what_it_does_alone(model: dict[str, Any], stack: str) -> None:
    """Floors share only what does not depend on how they differ."""
    space = LayoutSpace(run(model, 8192, 16), 16, {"policy": "none"})
    bounds, seen = BranchBounds(space, CostModel(cluster("h100", 16), STACKS[stack])), 0
    for number, inner in enumerate(space.inner()):
        shared = bounds.floor(Floor, inner)
        if number % 5 == 0:
            alone = BranchBounds(space, CostModel(cluster("h100", 16), STACKS[stack])).floor(Floor, inner)
            seen += 1
            assert [shared.seconds(part) for part in shared.parts] == [
                alone.seconds(part) for part in alone.parts
            ]
    assert seen > 10


def compared(space: LayoutSpace, costs: CostModel, share: float, chosen: random.Random) -> int:
    """How many layouts, of a share of the meshes of a space, were compared with the bounds above them."""
    faster = costs.shared.speed(1) if costs.shared is not None else 1.0
    bounds, seen = BranchBounds(space, costs), 0
    for inner in space.inner():
        floor = bounds.floor(Floor, inner)
        policy = inner.recompute.policy
        first = bounds.layer(floor, microbatch_seconds(floor, bounds.model, policy), policy)
        for (ep, etp), more in bounds.folded(floor).items():
            for mesh in space.meshes(inner, ep, etp):
                cuts, shardings = space.cuts(mesh.pp), list(space.shardings(inner, mesh))
                if not shardings or chosen.random() > share:
                    continue
                axes = bounds.data.of_mesh(inner, mesh)
                known = bounds.data.of_pipeline(inner, ep, etp, (mesh.pp, mesh.data))
                cut, sharding = chosen.choice(cuts), chosen.choice(shardings)
                _, second = bounds.blocks(inner, mesh, shardings[0])
                spec = space.spec(inner, mesh, sharding, cut)
                seconds = step_time(spec, costs).seconds * faster / ROUNDING
                for layer, added, listed in ((first, more, known), (second, 0.0, axes)):
                    pipeline = bounds.pipeline(inner, mesh.pp, mesh.data, layer)
                    once = bounds.beside(listed, layer, pipeline.microbatches, added)
                    assert pipeline.step(added, once) <= seconds, (
                        spec.layout,
                        spec.recompute,
                        layer is first,
                    )
                seen += 1
    return seen


@pytest.mark.parametrize(
    ("model", "stack", "ranks", "on", "share"),
    [
        (DENSE, "meshwright", 16, "h100-sxm", 0.2),
        pytest.param(EXPERTS, "meshwright", 16, "h100-sxm", 0.02, marks=pytest.mark.full),
        (EXPERTS, "megatron-core", 8, "rtx-4090", 0.05),
        pytest.param(DENSE, "meshwright-cpu", 4, "cpu", 0.25, marks=pytest.mark.full),
    ],
)
def test_bounds_are_never_above_the_seconds_of_a_layout(
    model: dict[str, Any], stack: str, ranks: int, on: str, share: float
) -> None:
    chosen, costs = random.Random(7), CostModel(cluster(on, ranks), STACKS[stack])
    space = LayoutSpace(run(model, 2048, 64), ranks)
    seen = sum(compared(part, costs, share, chosen) for part in space.by_backward())
    assert seen > 30


@pytest.mark.parametrize(("model", "branches", "costed"), [(DENSE, 800, 45), (EXPERTS, 3100, 120)])
def test_few_blocks_are_costed(
    model: dict[str, Any], branches: int, costed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before pipelines and the data axis bounded them, 4,373 blocks with experts were."""
    costs, seen, blocks = CostModel(cluster("h100-sxm", 16)), set[int](), CostModel.blocks

    def counted(self: CostModel, spec: RunSpec) -> LayerCost:
        found = blocks(self, spec)
        seen.add(id(found))  # the model keeps them all
        return found

    monkeypatch.setattr(CostModel, "blocks", counted)
    found = search(LayoutSpace(run(model, 4096, 128), 16), costs, 80e9)
    assert found.best and found.counts.branches <= branches
    assert len(seen) <= costed
