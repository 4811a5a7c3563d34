"""An explanation: what it adds up to, which neighbours there are, and what would change the choice."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache

import pytest

from meshwright import api
from meshwright.hardware.find import cluster
from meshwright.planner.cost.model import CostModel
from meshwright.planner.cost.software import STACKS
from meshwright.planner.cost.step import ScheduleTimes, step_time
from meshwright.planner.explain.candidate import TIE, Candidate
from meshwright.planner.explain.explanation import Explanation, describe
from meshwright.planner.explain.link_load import communication
from meshwright.planner.explain.neighbours import TERMS, changes
from meshwright.planner.explain.sensitivity import MOST, figures
from meshwright.planner.memory.exact import memory_model
from meshwright.planner.traffic.messages import traffic
from meshwright.report.plan_text import WIDTH, text
from meshwright.spec import RunSpec, UserError

LAYOUTS = {
    "dense": {"dp": 4, "tp": 4, "cp": 2, "pp": 4, "zero": 2, "micro_batch": 1},
    "sharded": {"dp": 16, "replicate": 2, "zero": 3, "micro_batch": 1},
    "experts": {"dp": 4, "tp": 2, "cp": 2, "ep": 8, "pp": 2, "zero": 1, "micro_batch": 1, "schedule": "zb-v"},
}
MODELS = {"dense": "llama2-70b", "sharded": "llama2-13b", "experts": "mixtral-8x7b"}


def run(layout: dict, model: str = "llama2-7b", sequences: int = 64) -> RunSpec:
    return RunSpec.model_validate(
        {
            "model": {"preset": model},
            "data": {"seq_len": 4096},
            "train": {"batch_tokens": sequences * 4096},
            "precision": {"compute": "bf16"},
            "layout": layout,
        }
    )


def engines(spec: RunSpec, name: str = "h100") -> CostModel:
    return CostModel(cluster(name, spec.layout.world_size))


@cache
def explained(name: str) -> Explanation:
    spec = run(LAYOUTS[name], MODELS[name])
    return Explanation(spec, engines(spec))


every = pytest.mark.parametrize("name", list(LAYOUTS))


@every
def test_parts_of_every_rank_add_up_to_the_step(name: str) -> None:
    found = explained(name)
    for rank in range(found.spec.layout.pp):
        assert sum(found.time.parts_of(rank).values()) == pytest.approx(found.time.seconds)
    assert sum(found.mean_parts.values()) == pytest.approx(found.time.seconds)


@every
def test_compute_slowed_by_messages_is_a_part_of_its_own(name: str) -> None:
    found = explained(name)
    for rank, parts in enumerate(found.parts_by_rank):
        data = found.time.ranks[rank].data
        assert parts["data axis"] == pytest.approx(data.exposed)
        assert parts["slowed by messages"] == pytest.approx(data.slowed)
    assert any(parts["slowed by messages"] for parts in found.parts_by_rank)


def test_what_was_never_measured_is_said() -> None:
    found = explained("dense")
    assert found.to_json()["never_measured"] == ["this program has never been timed on GPUs"]
    assert "\nnever measured  this program has never been timed on GPUs\n" in text(found)
    on = CostModel(cluster("h100", found.spec.layout.world_size), STACKS["megatron-core"])
    timed = Explanation(found.spec, on)
    assert timed.to_json()["never_measured"] == [] and "never measured" not in text(timed)


@pytest.mark.parametrize(("experts", "low", "high"), [(8, 1.04, 1.44), (4, 1.02, 1.23)])
def test_what_uneven_routing_costs_is_said(experts: int, low: float, high: float) -> None:
    spec = run(LAYOUTS["experts"] | {"ep": experts}, MODELS["experts"])
    found = Explanation(spec, engines(spec))
    told = found.to_json()["uneven_routing"]
    assert told["rows"] == pytest.approx([low, high], abs=0.01)
    assert found.seconds < told["step_seconds"][0] < told["step_seconds"][1] < high * found.seconds
    assert found.memory.device < told["memory"][0] < told["memory"][1]
    grown = [
        (size - found.memory.device) / (rows - 1)
        for size, rows in zip(told["memory"], told["rows"], strict=True)
    ]
    assert grown[0] == pytest.approx(grown[1]) and grown[0] < found.memory.activations
    words = f"if the busiest of {experts} expert ranks gets {low:.2f} to {high:.2f} times"
    assert f"routing         even but for chance; {words}" in text(found)
    assert explained("dense").uneven is None and "\nrouting" not in text(explained("dense"))


def test_a_capacity_that_leaves_no_rank_more_than_the_mean_is_said() -> None:
    spec = run(LAYOUTS["experts"], MODELS["experts"])
    assert spec.model.moe is not None
    moe = spec.model.moe.model_copy(update={"capacity_factor": 1.0})
    model = spec.model.model_copy(update={"moe": moe})
    full = spec.model_copy(update={"model": model})
    words = "even, since the capacity leaves no expert rank more than 1.00 times the mean"
    assert f"routing         {words}" in text(Explanation(full, engines(full)))


@every
def test_terms_of_memory_add_up_on_every_rank(name: str) -> None:
    found = explained(name)
    assert len(found.memories) == found.spec.layout.pp
    for each in found.memories:
        assert sum(getattr(each, term) for term in TERMS) == pytest.approx(each.device)
    assert memory_model(found.costs).peak(found.spec).device == max(each.device for each in found.memories)


def test_engines_that_served_another_layout_give_the_same() -> None:
    spec = run({"dp": 8, "cp": 2, "pp": 2, "zero": 1, "micro_batch": 1})
    shared = engines(spec)
    every_change = list(changes(spec).items())
    for _, changed in every_change:
        memory_model(shared).ranks(changed), step_time(changed, shared)
    for words, changed in (*every_change, every_change[0]):
        alone = engines(spec)
        assert step_time(changed, shared).seconds == step_time(changed, alone).seconds, words
        assert memory_model(shared).ranks(changed) == memory_model(alone).ranks(changed), words


@every
def test_bytes_are_the_programs(name: str) -> None:
    found = explained(name)
    sent = traffic(found.spec, found.time.rank)
    assert found.axes
    for each in found.axes:
        assert each.operations == {
            operation: size
            for (axis, operation), size in sent.items()
            if axis == each.axis and operation != "scalars"
        }
        assert 0 <= each.hidden <= 1 and each.exposed <= each.seconds


@every
def test_no_link_carries_more_than_it_can(name: str) -> None:
    for each in explained(name).axes:
        assert each.levels
        assert all(0 < level.utilisation < 1 for level in each.levels)


def test_an_axis_crosses_the_level_that_its_ranks_are_apart() -> None:
    found = {each.axis: [load.level for load in each.levels] for each in explained("dense").axes}
    assert found == {
        "tensor": ["node"],
        "context": ["node"],
        "shard": ["node", "leaf"],
        "pipeline": ["leaf"],
    }
    sharded = {each.axis: each for each in explained("sharded").axes}
    assert [load.level for load in sharded["shard"].levels] == ["node", "leaf"]
    inside, outside = sharded["shard"].levels
    assert inside.bytes == pytest.approx(sharded["shard"].bytes)
    assert outside.bytes == pytest.approx(inside.bytes / 8)  # a ring leaves a node by all of its devices


def test_a_ring_of_neighbours_over_nodes_is_on_the_network() -> None:
    spec = run({"cp": 16, "dp": 4, "zero": 3})
    context = next(each for each in Explanation(spec, engines(spec)).axes if each.axis == "context")
    assert [load.level for load in context.levels] == ["leaf"]


def test_nothing_is_hidden_by_a_stack_that_overlaps_nothing() -> None:
    spec = run({"dp": 2, "tp": 4, "zero": 1})
    bare = replace(STACKS["megatron-core"], overlaps=("pipeline",))
    hidden = []
    for stack in (bare, STACKS["megatron-core"]):
        on = CostModel(cluster("h100", 8), stack)
        hidden.append([each.hidden for each in communication(spec, on, step_time(spec, on))])
    assert hidden[0] == pytest.approx([0.0, 0.0])
    assert all(share > 0.1 for share in hidden[1])


@every
def test_neighbours_are_runs_that_differ_in_one_thing(name: str) -> None:
    found = explained(name)
    chosen = found.spec.layout.model_dump() | {"recompute": found.spec.recompute.policy}
    pairs = {"replicate", "dp", "cp", "tp", "pp"}
    seen, keys = [], set()
    for each in found.neighbours:
        spec = each.estimate.spec
        again = RunSpec.model_validate(spec.to_json())
        assert again.layout == spec.layout and spec.layout.world_size == found.spec.layout.world_size
        other = spec.layout.model_dump() | {"recompute": spec.recompute.policy}
        differ = {key for key, value in other.items() if value != chosen[key]}
        keys |= differ
        assert all(key in each.words for key in differ if key != "virtual")
        moved = len(differ) == 2 and (differ <= pairs or differ == {"ep", "etp"})
        assert len(differ) == 1 or moved or differ == {"schedule", "virtual"}
        assert other not in seen
        seen.append(other)
    assert {"zero", "recompute"} <= keys


def test_a_neighbour_that_is_too_large_names_the_term_that_grew_most() -> None:
    found = explained("sharded")
    chosen, too_large = found.memory, [each for each in found.neighbours if each.verdict == "does not fit"]
    assert too_large
    for each in too_large:
        other = memory_model(found.costs).peak(each.estimate.spec)
        grown = {term: getattr(other, term) - getattr(chosen, term) for term in TERMS}
        assert each.most == max(grown, key=lambda term: grown[term])
        assert each.by == grown[each.most]
        assert other.device > found.capacity
        assert each.most in each.why.replace(" states", "").replace("the device's ", "")


@every
def test_a_slower_neighbour_names_the_part_that_grew_most(name: str) -> None:
    found = explained(name)
    assert any(each.verdict == "slower" for each in found.neighbours)
    for each in found.neighbours:
        timed = step_time(each.estimate.spec, found.costs)
        grown = {part: timed.parts[part] - found.time.parts[part] for part in timed.parts}
        if each.verdict == "slower":
            assert timed.seconds > found.time.seconds and each.by == max(grown.values()) == grown[each.most]
        if each.verdict == "faster":
            assert timed.seconds < found.time.seconds and each.by == min(grown.values()) == grown[each.most]


@every
def test_neighbours_are_sorted_by_how_close_they_are(name: str) -> None:
    found = explained(name).neighbours
    better = [each.verdict == "faster" for each in found]
    assert better == sorted(better, reverse=True)
    rest = [each.distance for each in found if each.verdict != "faster"]
    assert rest == sorted(rest) and rest[0] >= 0


@every
def test_the_nearest_are_those_that_would_be_first_of_all(name: str) -> None:
    found = explained(name)
    few = Explanation(found.spec, found.costs, most=6)
    assert len(few.candidates) == len(found.neighbours) and len(few.neighbours) == 6
    assert [each.why for each in few.neighbours] == [each.why for each in found.neighbours[:6]]
    assert few.assumptions == found.assumptions


@every
def test_a_quick_look_is_no_more_than_the_step_and_an_exact_one_is_the_step(name: str) -> None:
    spec, times = explained(name).spec, ScheduleTimes()
    for on in (engines(spec), figures(engines(spec), 1e9)[0].scaled(0.7)[0]):
        for words, changed in changes(spec).items():
            layout, timed = Candidate(changed, on, times), step_time(changed, on)
            assert layout.bound <= timed.seconds * (1 + 1e-9), words
            assert layout.seconds == timed.seconds, words
            assert layout.parts == pytest.approx(timed.parts), words
            assert layout.time_on(on).bound <= timed.seconds * (1 + 1e-9), words


def preferred(found: Explanation, on: CostModel, capacity: float) -> set[str]:
    """By timing everything again: what is ahead of the chosen layout then, and was not before."""
    chosen, holds = step_time(found.spec, on).seconds, found.memory.device <= capacity
    ahead = set()
    for each in found.neighbours:
        if each.verdict == "faster" or each.estimate.memory.device > capacity:
            continue
        if not holds or step_time(each.estimate.spec, on).seconds < chosen * (1 - TIE):
            ahead.add(each.words)
    return ahead


def test_the_change_that_turns_the_choice_is_the_smallest() -> None:
    """For each figure nothing is ahead one percent before the percent found, and something is ahead there."""
    turned = 0
    for name in LAYOUTS:
        found = explained(name)
        scaled = {figure.name: figure.scaled for figure in figures(found.costs, found.capacity)}
        assert found.assumptions[-1].name == "memory capacity" and found.assumptions[-1].turns
        for each in found.assumptions:
            for sign in (1, -1):
                (turn,) = [turn for turn in each.turns if turn.percent * sign > 0] or [None]
                if turn is None:
                    assert not preferred(found, *scaled[each.name](1 + sign * MOST / 100))
                    continue
                turned += 1
                at, before = (1 + (turn.percent - back) / 100 for back in (0, sign))
                ahead = preferred(found, *scaled[each.name](at))
                if turn.preferred is None:  # only with less memory may nothing fit
                    assert each.name == "memory capacity" and turn.percent < 0 and not ahead
                else:
                    assert turn.preferred in ahead
                assert not preferred(found, *scaled[each.name](before))
    assert turned


def test_a_layout_that_does_not_fit_says_so() -> None:
    spec = run({"dp": 8, "zero": 1, "micro_batch": 4})
    found = Explanation(spec, engines(spec))
    assert not found.fits(found.capacity) and not found.assumptions and found.fits_probability < 0.01
    saves = [each for each in found.neighbours if each.verdict == "fits"]
    assert saves and found.neighbours[: len(saves)] == tuple(saves)
    assert all(each.why.startswith("fits, with") for each in saves)
    assert all(each.by < 0 for each in saves)
    assert "does not fit, so nothing is compared" in text(found)


def test_neighbours_may_fill_as_much_as_plans() -> None:
    """Bytes that fit with 80%, or the whole device of a layout that is less sure to fit itself."""
    sure = run({"dp": 16, "replicate": 2, "zero": 3, "micro_batch": 1})
    tight = run({"dp": 16, "zero": 3, "micro_batch": 4})
    for spec, fills in ((sure, 85.52 / (1 + 0.8416 * 0.12)), (tight, 85.52)):
        found = Explanation(spec, engines(spec))
        assert found.capacity / 1e9 == pytest.approx(fills, rel=1e-3), found.memory.device
        assert found.to_json()["room"] / 1e9 == pytest.approx(85.52, rel=1e-3)
        assert f" of 85.5 GB on pipeline rank {found.memory.rank}; fits with" in text(found)
    assert "memory capacity (85.52 GB, of which a plan may fill 77.68)" in text(
        Explanation(sure, engines(sure))
    )
    assert Explanation(sure, engines(sure), limit=5e10).capacity == 5e10


@every
def test_the_text_is_within_its_columns_and_json_is_plain(name: str) -> None:
    found = explained(name)
    assert max(map(len, text(found).splitlines())) <= WIDTH
    told = json.loads(json.dumps(found.to_json()))
    assert told["step_seconds"] == found.time.seconds
    assert len(told["neighbours"]) == len(found.neighbours)
    assert [each["bytes"] for each in told["communication"]] == [each.bytes for each in found.axes]


def test_layouts_that_differ_look_different() -> None:
    base = {"dp": 2, "cp": 2, "tp": 2, "pp": 2, "ep": 2, "micro_batch": 1, "schedule": "zb-v"}
    plain = (
        "dp=2 x cp=2 x tp=2 x pp=2 x ep=2, zero=0, schedule=zb-v, virtual=2, micro_batch=1, recompute=none"
    )
    assert describe(run(base, MODELS["experts"])) == plain
    for more, policy, says in (
        ({"stages": "even"}, {}, "virtual=2, stages=even, micro"),
        ({"stages": (9, 9, 9, 5)}, {}, "virtual=2, stages=9,9,9,5, micro"),
        (
            {"context_mode": "gather", "sequence_parallel": False},
            {},
            "context_mode=gather, sequence_parallel=off,",
        ),
        ({"expert_parts": 2}, {}, "virtual=2, expert_parts=2, micro"),
        ({"ep": 2, "expert_buffer_factor": 1.5}, {}, "virtual=2, expert_buffer_factor=1.5, micro"),
        ({}, {"policy": "selective", "save": ["attention"]}, "=selective, recompute.save=attention"),
        ({}, {"policy": "selective", "save": []}, "=selective, recompute.save=nothing"),
    ):
        spec = RunSpec.model_validate(
            run(base | more, MODELS["experts"]).to_json() | {"recompute": policy or {"policy": "none"}}
        )
        assert says in describe(spec), describe(spec)
    parts = run({"dp": 8, "ep": 8, "expert_parts": 2}, MODELS["experts"])
    assert "what layout.expert_parts = 2 hides is not modelled" in " ".join(
        text(Explanation(parts, engines(parts))).split()
    )


def test_a_cluster_of_another_size_is_a_sentence() -> None:
    spec = run({"dp": 8})
    with pytest.raises(UserError, match=r"is 8 ranks, but h100-sxm has 16 devices"):
        Explanation(spec, CostModel(cluster("h100", 16)))


def test_a_program_without_the_default_schedule_is_explained_with_1f1b() -> None:
    tree = {"model": {"preset": "llama2-7b"}, "train": {"batch_tokens": 2**20}}
    for given, stack, explained in (
        ({}, "meshwright", "zb-h1"),
        ({}, "megatron-core", "1f1b"),
        ({}, "maxtext", "gpipe"),
        ({"schedule": "zb-v"}, "fsdp", "zb-v"),
    ):
        spec = RunSpec.model_validate({**tree, "layout": {"pp": 4, "tp": 2, **given}})
        assert api.explain(spec, cluster="h100", stack=stack).spec.layout.schedule == explained
