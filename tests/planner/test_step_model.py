"""One formula of a step's seconds: what the search finds, what its front shows and what a plan prints."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from meshwright.hardware.cluster import Cluster
from meshwright.hardware.find import cluster
from meshwright.planner.cost.model import CostModel
from meshwright.planner.cost.step import step_time
from meshwright.planner.layout_space import LayoutSpace
from meshwright.planner.plan import plan
from meshwright.planner.search.branch_and_bound import search
from meshwright.planner.search.request import PlanRequest
from meshwright.spec import RunSpec

TREE: dict[str, Any] = {
    "model": {"preset": "tiny", "vocab_size": 512, "layers": 5, "kv_heads": 2},
    "data": {"seq_len": 64},
    "train": {"batch_tokens": 8 * 64},
}


def host_per_rank(ranks: int) -> Cluster:
    """CPU hosts with one rank each, on a network: ranks agree over it a few times in each step."""
    found = cluster("cpu", ranks)
    (host,) = found.levels
    network = replace(host, name="network", kind="ethernet")
    return replace(found, levels=(replace(host, devices=1), network), beyond=(), sharing=1)


CLUSTERS = {"gpus": cluster("h100", 4), "hosts": host_per_rank(4), "shared cores": cluster("cpu", 4)}


@pytest.mark.parametrize("name", list(CLUSTERS))
@pytest.mark.parametrize("pp", [1, 2])
def test_the_search_its_front_and_the_step_model_agree(name: str, pp: int) -> None:
    costs = CostModel(CLUSTERS[name])
    space = LayoutSpace(RunSpec.model_validate(TREE), 4, {"pp": pp, "policy": "none"})
    found = search(space, costs, 1e15, 5)
    kinds = 5 if pp == 1 else 3  # beside two stages: two data, tensor or context ranks
    assert len(found.best) == kinds and found.front
    for each in (*found.best, *found.front):
        assert each.seconds == pytest.approx(step_time(each.spec, costs).seconds, rel=1e-12), each.spec.layout


@pytest.mark.parametrize("name", ["gpus", "hosts"])
def test_the_printed_front_begins_with_the_fastest_plan(name: str) -> None:
    request = PlanRequest(
        RunSpec.model_validate(TREE), CLUSTERS[name], gpus=4, top=1, overrides=[("layout.pp", "2")]
    )
    found = plan(request)
    fastest = found.best.step_seconds if found.faster is None else found.faster.step_seconds
    assert found.pareto[0][0] == pytest.approx(fastest, rel=1e-12)
    assert found.best.step_seconds == pytest.approx(
        step_time(found.best.spec, found.best.costs).seconds, rel=1e-12
    )
