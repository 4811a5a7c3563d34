"""Islands in plans: what their exchanges take, and how many and how often for a slow link."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from meshwright import api
from meshwright.cli.main import main
from meshwright.hardware import hardware_file
from meshwright.hardware.cluster import Cluster, Level, Link
from meshwright.hardware.find import cluster
from meshwright.planner.cost.exchange import waited
from meshwright.planner.cost.model import CostModel
from meshwright.planner.cost.step import step_time
from meshwright.planner.explain.explanation import Explanation
from meshwright.planner.island_plans import LONGEST, USUAL
from meshwright.planner.plan import Plans
from meshwright.planner.traffic.messages import traffic
from meshwright.report.plan_text import WIDTH, text
from meshwright.spec import RunSpec, UserError
from meshwright.spec.outer import OuterSpec
from meshwright.spec.toml import to_toml


def two_sites(bandwidth: float = 125e6, latency: float = 20e-3) -> Cluster:
    """Two nodes of 8 H100 with a slow link between them, in bytes per second of a device."""
    node = cluster("h100", 8)
    slow = Level("wan", 16, Link(latency, bandwidth), kind="ethernet")
    return replace(node, name="two sites", count=16, levels=(node.levels[0], slow), beyond=(), network=None)


def run(outer: dict[str, Any], **layout: Any) -> RunSpec:
    return RunSpec.model_validate(
        {
            "model": {"preset": "llama3-8b"},
            "data": {"seq_len": 4096},
            "train": {"batch_tokens": 64 * 4096},
            "precision": {"compute": "bf16"},
            "recompute": {"policy": "full"},
            "layout": {"replicate": 2, "dp": 8, "zero": 3, "micro_batch": 1, **layout},
            "outer": outer,
        }
    )


def attained(costs: CostModel) -> float:
    """Bytes per second of the link between the sites."""
    return costs.cluster.levels[-1].link.bandwidth * costs.cluster.device.rates.network


# What exchanges take ------------------------------------------------------------------------------------


def mean_wait(outer: OuterSpec, step: float, seconds: Sequence[float]) -> float:
    """Seconds that an island waits in a period, by following very many steps one by one."""
    now = link = 0.0
    coming = deque[tuple[int, float]]()
    periods = 300
    marks = []
    for number in range(1, periods * outer.every + 1):
        now += step
        while coming and coming[0][0] <= number:
            now = max(now, coming.popleft()[1])
        for part in outer.begins(number, last=0):
            link = max(link, now) + seconds[part]
            coming.append((number + outer.delay, link))
        while coming and coming[0][0] <= number:
            now = max(now, coming.popleft()[1])
        if number % outer.every == 0:
            marks.append(now)
    half = periods // 2
    return (marks[-1] - marks[half - 1]) / (periods - half) - outer.every * step


@pytest.mark.parametrize(("every", "fragments", "delay"), [*product([1, 4, 9], [1, 3], [0, 1, 3])])
def test_what_is_waited_for_is_what_following_each_step_finds(every: int, fragments: int, delay: int) -> None:
    if fragments > every or delay >= every:
        with pytest.raises(UserError, match="outer"):
            run({"every": every, "fragments": fragments, "delay": delay})
        return
    outer = OuterSpec(every=every, fragments=fragments, delay=delay)
    for whole in (0.5, 2.0, 3.7, 12.0):
        seconds = [whole * (part + 1) / sum(range(1, fragments + 1)) for part in range(fragments)]
        assert waited(outer, 1.0, seconds) == pytest.approx(mean_wait(outer, 1.0, seconds), abs=0.02)


def test_without_a_delay_a_step_takes_its_share_of_the_whole_exchange_longer() -> None:
    costs = CostModel(two_sites(latency=0.0))
    spec = run({"every": 40})
    alone, found = step_time(spec, costs).alone, step_time(spec, costs).exchange
    assert found.exposed == pytest.approx(found.sent) and found.slowed == pytest.approx(0, abs=1e-12)
    shared = spec.model.parameters / 8 * 4  # both ways, half of it each: all of a rank's numbers, in fp32
    assert 40 * found.sent == pytest.approx(shared / attained(costs), rel=0.01)
    assert step_time(spec, costs).seconds == pytest.approx(alone + found.total)
    parts = step_time(spec, costs).parts
    assert parts["exchange"] == pytest.approx(found.exposed, rel=1e-12)
    assert sum(parts.values()) == pytest.approx(step_time(spec, costs).seconds)


def test_an_island_steps_as_by_itself_but_for_its_exchanges() -> None:
    spec = run({"every": 40})
    alone = spec.of_step_group()
    assert step_time(spec, CostModel(two_sites())).alone == pytest.approx(
        step_time(alone, CostModel(cluster("h100", 8))).seconds
    )


def test_fragments_and_a_delay_hide_what_fits_behind_compute() -> None:
    costs = CostModel(two_sites())
    plain, late, parts = (
        step_time(run({"every": 40, **outer}), costs)
        for outer in ({}, {"delay": 3}, {"delay": 3, "fragments": 8})
    )
    assert plain.exchange.exposed > late.exchange.exposed > 5 * parts.exchange.exposed
    saved = 40 * (plain.exchange.exposed - late.exchange.exposed)
    assert saved == pytest.approx(3 * plain.alone, rel=0.01)


def test_synchronous_replicas_reduce_once_in_a_step() -> None:
    """As many bytes as the program sends, however many microbatches there are."""
    costs = CostModel(two_sites(latency=0.0))
    for zero in (1, 2, 3):
        spec = run({}, zero=zero)
        (rank,) = step_time(spec, costs).ranks
        sent = traffic(spec)["replicate", "all_reduce"]
        assert rank.data.sent["replicate"] == pytest.approx(sent / attained(costs), rel=0.01)


# What is chosen -----------------------------------------------------------------------------------------

WISH: dict[str, Any] = {"gpus": 16, "seq_len": 4096, "batch_tokens": "256k", "top": 1}
ONLY_DATA = [("layout.pp", "1"), ("layout.tp", "1"), ("layout.cp", "1"), ("recompute.policy", "full")]
"""Keys that leave little to search."""


def plans(on: Cluster, islands: int | str | None = "auto", *keys: tuple[str, str], **wish: Any) -> Plans:
    return api.plan("llama3-8b", on, **WISH, islands=islands, overrides=[*ONLY_DATA, *keys], **wish)


@pytest.mark.parametrize("limit", [5.0, 20.0])
def test_the_shortest_period_that_hides_the_link_is_chosen(limit: float) -> None:
    on = two_sites()
    found = plans(on, max_exposed=limit)
    choice, best = found.exchange_choice, found.best
    assert choice is not None and choice.chosen is not None and choice.synchronous is not None
    assert choice.count == best.spec.step_groups == 2 and best.spec.outer == choice.chosen.outer
    assert best.seconds < choice.synchronous.seconds and choice.waiting > limit / 100
    assert choice.chosen.exposed <= limit / 100
    shorter = best.spec.outer.model_copy(update={"every": best.spec.outer.every - 1})
    sooner = best.spec.model_copy(update={"outer": shorter})
    with_sooner = step_time(sooner, best.costs)
    assert with_sooner.exchange.exposed / with_sooner.seconds > limit / 100
    assert RunSpec.model_validate(best.spec.to_json()) == best.spec


def ways(bandwidth: float, latency: float) -> list[OuterSpec]:
    """The exchange that is chosen for a link, and the others."""
    choice = plans(two_sites(bandwidth, latency), 2).exchange_choice
    assert choice is not None and choice.chosen is not None
    return [choice.chosen.outer, *(each.outer for each in choice.others)]


def test_a_slower_link_takes_a_delay_and_the_slowest_fewer_bits() -> None:
    chosen, *others = ways(1.25e9, 1e-3)
    assert chosen.delay == 0 and not chosen.compressed and chosen.every <= USUAL
    assert all(each.every < chosen.every for each in others)  # whole exchanges come first where they do
    chosen, *others = ways(125e6, 20e-3)
    assert chosen.delay > 0 and not chosen.compressed and chosen.every <= USUAL
    assert {each.every > USUAL for each in others if not each.delay} == {True}
    chosen, *others = ways(20e6, 20e-3)
    assert chosen.delay > 0 and chosen.format == "fp4" and chosen.every <= USUAL
    assert all(each.every > USUAL and not each.compressed for each in others)


def test_where_the_link_is_fast_all_ranks_train_together() -> None:
    found = plans(cluster("h100", 16))
    assert found.exchange_choice is not None and found.exchange_choice.chosen is None
    assert found.best.spec.step_groups == 1 and "none are faster" in found.exchange_choice.words


def test_a_link_that_no_period_hides_is_told() -> None:
    choice = plans(two_sites(bandwidth=2e5), 2).exchange_choice
    assert choice is not None and choice.chosen is not None
    assert choice.chosen.exposed > 0.05 and choice.chosen.outer.every == LONGEST
    assert f"No period up to {LONGEST} steps hides that link" in choice.words


def test_islands_that_are_slower_than_none_are_told() -> None:
    found = plans(two_sites(), 2, max_exposed=100.0)
    assert found.exchange_choice is not None and found.best.spec.outer.every == 1
    words = found.exchange_choice.words
    assert "All ranks together are" in words and "times as fast" in words
    assert "would do, too" not in words


def test_keys_that_are_given_stay() -> None:
    on = two_sites()
    found = plans(on, 2, ("outer.fragments", "4"), ("outer.delay", "2"), ("outer.lr", "0.5"))
    outer = found.best.spec.outer
    assert (outer.fragments, outer.delay, outer.lr) == (4, 2, 0.5) and outer.every < LONGEST
    assert plans(on, 2, ("outer.every", "33")).best.spec.outer.every == 33


def test_islands_of_a_run_file_stay(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(to_toml(run({"every": 50, "delay": 1})))
    found = api.plan(file, "h100", gpus=16, top=3, overrides=ONLY_DATA)
    assert {plan.spec.step_groups for plan in found.plans} == {2}
    assert found.best.spec.outer == OuterSpec(every=50, delay=1) and found.exchange_choice is None
    again = api.plan(file, "h100", gpus=16, top=1, overrides=[*ONLY_DATA, ("layout.replicate", "4")])
    assert again.best.spec.step_groups == 4


@pytest.mark.parametrize(
    ("islands", "keys", "wish", "words"),
    [
        ("1", (), {}, "--islands: '1' is not valid: give a number, 2 or more, or auto"),
        ("some", (), {}, "--islands: 'some' is not valid"),
        ("2", (("layout.replicate", "2"),), {}, "--layout.replicate 2; give one of them"),
        ("2", (), {"objective": "longest-context"}, "--objective longest-context; leave one of them out"),
        ("2", (), {"stack": "megatron-core"}, "--stack is megatron-core; leave one of them out"),
        ("auto", (), {"max_exposed": 0.0}, "--max-exposed: 0 is not a share"),
        ("3", (), {}, "--islands: 3 islands cannot have equal shares of 16 devices; give 2 or 4"),
        ("32", (), {}, "--islands: 32 islands cannot have equal shares of 16 devices; give 16"),
        ("2", (("outer.quorum", "1"),), {}, "outer.quorum: 1 is given together with --islands"),
        (None, (("outer.every", "20"),), {}, "and no number of islands; give --islands auto"),
        (None, (), {"max_exposed": 10.0}, "--max-exposed: 10 has no effect without islands"),
        ("2", (("outer.every", "3"), ("outer.delay", "5")), {}, "outer.delay: 5 steps are not over"),
    ],
)
def test_what_cannot_be_gets_a_sentence(
    islands: str | None, keys: tuple[tuple[str, str], ...], wish: dict[str, Any], words: str
) -> None:
    with pytest.raises(UserError) as error:
        plans(two_sites(), islands, *keys, **wish)
    assert words in str(error.value)


def test_other_stacks_have_no_islands() -> None:
    spec = run({"every": 9})
    spec = spec.model_copy(update={"layout": spec.layout.model_copy(update={"zero": 1})})
    with pytest.raises(UserError, match="of this program, and the stack is megatron-core"):
        api.explain(spec, cluster=two_sites(), stack="megatron-core")


# What is told -------------------------------------------------------------------------------------------


def test_an_explanation_tells_of_exchanges_and_keeps_as_many_islands() -> None:
    spec = run({"every": 50, "fragments": 4, "delay": 2})
    found = Explanation(spec, CostModel(two_sites()))
    shown = text(found)
    assert max(map(len, shown.splitlines())) <= WIDTH
    words = " ".join(shown.split())
    assert "outer.every=50, outer.fragments=4, outer.delay=2" in words
    assert "in 50 steps in 4 fragments" in words and "while islands take 2 steps each" in words
    assert found.candidates and {other.spec.step_groups for other in found.candidates.values()} == {2}
    told = found.to_json()["islands"]
    assert told["count"] == 2 and told["synchronous_step_seconds"] > found.seconds
    assert told["bytes"] == pytest.approx(50 * traffic(spec)["replicate", "all_reduce"], rel=1e-6)
    (load,) = (load for load in found.axes if load.axis == "replicate")
    assert load.seconds == pytest.approx(told["seconds"] / 50)
    assert load.exposed == pytest.approx(told["exposed_seconds"] / 50)


def test_the_command_says_what_it_chose_and_writes_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hardware_file.write(two_sites(), tmp_path / "sites.json")
    wish = ["plan", "llama3-8b", "--cluster", str(tmp_path / "sites.json"), "--gpus", "16", "--no-why"]
    wish += ["--seq-len", "4096", "--batch-tokens", "256k", "--islands", "auto", "--top", "2"]
    wish += [word for key, value in ONLY_DATA for word in (f"--{key}", value)]
    assert main([*wish, "--write", str(tmp_path / "run.toml")]) == 0
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= 100
    words = " ".join(shown.split())
    assert "Islands: 2, with outer.every = " in words and "at most 5.0% asked; all ranks together" in words
    assert "its loss is not predicted" in words and "Exchanges: 2, which send" in words
    assert "[outer]" in (tmp_path / "run.toml").read_text()
    assert main([*wish, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["islands"]["count"] == 2 and told["islands"]["level"] == "wan"
    assert told["best"]["islands"]["exposed"] <= 0.05 < told["islands"]["synchronous_exposed"]
    assert main(["explain", str(tmp_path / "run.toml"), "--cluster", str(tmp_path / "sites.json")]) == 0
    assert main(["simulate", str(tmp_path / "run.toml")]) == 0
