"""Plans on several clusters: the same as on each alone, in the objective's order."""

from __future__ import annotations

from typing import Any

import pytest

from meshwright import api
from meshwright.hardware.find import cluster
from meshwright.planner.cluster_plans import asked_clusters, figure, figure_interval, priced
from meshwright.spec import UserError

WISH: dict[str, Any] = {"seq_len": 4096, "batch_tokens": "256k", "top": 1}


def test_each_cluster_is_planned_as_alone_and_the_cheapest_is_first() -> None:
    told: list[str] = []
    found = api.plan_clusters(
        "llama3.2-1b",
        "h100:4,a100:8,rtx-4090",
        gpus=2,
        objective="cost",
        done=lambda name, _: told.append(name),
        **WISH,
    )
    alone = {
        name: api.plan("llama3.2-1b", name, gpus=gpus, objective="cost", **WISH)
        for name, gpus in (("h100", 4), ("a100", 8), ("rtx-4090", 2))
    }
    assert told == list(alone) and not found.refused
    for name, plans in found.found.items():
        assert plans.best.spec == alone[name].best.spec and plans.best.cluster == alone[name].best.cluster
    costs = [plans.best.cost_per_token or 0.0 for plans in found.found.values()]
    assert costs == sorted(costs) and costs[0] == min(
        plans.best.cost_per_token or 0.0 for plans in alone.values()
    )
    assert figure(found.best) == pytest.approx(1e9 * costs[0])


def test_the_objective_decides_the_order() -> None:
    def first(objective: str, prices: dict[str, float] | None = None, **wish: Any) -> str:
        wish = {**WISH, "objective": objective, **wish}
        return next(iter(api.plan_clusters("llama3.2-1b", "a100,h100", prices=prices, **wish).found))

    assert first("time") == "h100"
    assert first("cost", {"h100": 1.0, "a100": 1.0}) == "h100"
    assert first("cost", {"h100-sxm": 100.0}) == "a100"  # by the catalogue's name, too
    assert first("cost", {"h100": 100.0}, tokens="1T") == "a100"
    assert first("longest-context", seq_len=None, batch_tokens="512k", gpus=1) == "h100"


def test_money_s_interval_is_that_of_the_step() -> None:
    found = api.plan_clusters("llama3.2-1b", "h100,a100", gpus=2, objective="cost", tokens="1T", **WISH)
    best = found.best.best
    low, high = figure_interval(found.best)
    usd = best.training(1e12).usd
    assert usd is not None and low < usd < high
    assert (low / usd, high / usd) == pytest.approx(
        [seconds / best.step_seconds for seconds in best.interval]
    )
    told = found.to_json(why=False)
    assert [row["cluster"] for row in told["clusters"]] == list(found.found)
    assert told["clusters"][0]["objective_interval"] == [low, high] and told["best"]["usd"] == usd
    overlapping = [name for name, plans in found.found.items() if figure_interval(plans)[0] < high][1:]
    assert told["undecided"] == overlapping


def test_a_cluster_that_does_not_do_is_told_beside_the_others() -> None:
    wish = {**WISH, "objective": "cost"}
    found = api.plan_clusters("llama3-8b", "h100:8,h200:1,b300:8,l4:1", max_memory=None, **wish)
    reasons = dict(found.refused)
    assert list(found.found) == ["h100"] and found.undecided == ()
    assert reasons["b300"] == "no price is known of b300; give --price b300=USD for a device and hour"
    assert "nothing fits 1 x L4 24 GB" in reasons["l4"] and "devices of l4" in reasons["l4"]
    assert "nothing fits 1 x H200" in reasons["h200"]


def test_where_none_does_the_reasons_are_told_once() -> None:
    with pytest.raises(UserError, match=r"^--batch-tokens: is missing"):
        api.plan_clusters("llama3-8b", "h100,a100")
    with pytest.raises(UserError, match=r"^l4: llama3-8b: nothing .*; rtx-4090: llama3-8b: nothing fits"):
        api.plan_clusters("llama3-8b", "l4,rtx-4090", gpus=1, **WISH)


@pytest.mark.parametrize(
    ("clusters", "gpus", "says"),
    [
        ("h100,h10", None, "cluster: 'h10' is neither a name of the catalogue .* did you mean 'h100'"),
        ("h100,h100", None, "--cluster: 'h100' is given twice; give each once"),
        ("h100,a100,h100-sxm", 8, "'h100' is given twice, the second time as 'h100-sxm'"),
        ("h100,,a100", None, "a name is missing between commas"),
        ("h100:0,a100", None, "--cluster: 'h100:0' has no number of devices behind its colon"),
        ("h100:64..8,a100", None, "'h100:64..8' has no number of devices .* such as 8..64"),
        ("h100:many,a100", None, "'h100:many' has no number behind its colon; give such as h100:8"),
        ("h100:8,a100:8", 16, "--gpus: 16 is given, and each cluster has a number of its own; leave it out"),
    ],
)
def test_a_mistake_in_a_list_is_one_sentence(clusters: str, gpus: int | None, says: str) -> None:
    with pytest.raises(UserError, match=says):
        asked_clusters(clusters, gpus)


def test_one_cluster_may_be_asked_for_by_several_numbers_of_devices() -> None:
    asked = asked_clusters(["h100:8", "h100:16..64", cluster("a100", 4)], 2)
    assert [(each.name, each.gpus) for each in asked] == [
        ("h100:8", "8"),
        ("h100:16..64", "16..64"),
        ("a100-80-sxm", 2),
    ]
    assert [each.cluster.price for each in priced(asked, {"h100": 9.0})] == [9.0, 9.0, 1.8]
    with pytest.raises(UserError, match="--price: 'h10' is none of the clusters; did you mean 'h100'"):
        priced(asked, {"h10": 1.0})
