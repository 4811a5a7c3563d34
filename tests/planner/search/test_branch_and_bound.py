"""The search against brute force: the same layouts as the rules accept, the same best ones."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import product
from math import prod
from typing import Any, NamedTuple, get_args

import pytest

from covering import marked, some
from meshwright.hardware.cluster import Cluster
from meshwright.hardware.find import cluster
from meshwright.planner.cost.model import CostModel
from meshwright.planner.cost.software import MESHWRIGHT, STACKS
from meshwright.planner.cost.step import step_time
from meshwright.planner.cost.uncertainty import fits_probability, fitting, room, spread
from meshwright.planner.layout_space import LayoutSpace
from meshwright.planner.memory.exact import memory_model
from meshwright.planner.memory.generic import Generic
from meshwright.planner.programs.table import PROGRAMS
from meshwright.planner.search import simplest
from meshwright.planner.search.branch_and_bound import search
from meshwright.planner.search.least_memory import least_memory
from meshwright.planner.search.problem import SearchProblem
from meshwright.planner.search.results import TimedLayout, kind
from meshwright.planner.search.simplest import Ordering
from meshwright.spec import RunSpec, UserError
from meshwright.spec.arithmetic import divisors
from meshwright.spec.layout import ContextMode, Order
from meshwright.spec.pipeline_schedules import SCHEDULES
from small_runs import run

DENSE = {"preset": "tiny", "layers": 5, "kv_heads": 2}
EXPERTS = {"preset": "moe-tiny", "layers": 3, "moe": {"experts": 4, "ffn": 2}}


@pytest.mark.parametrize(
    ("model", "bound", "axes"),
    [(DENSE, None, {1}), (EXPERTS, None, {1}), (EXPERTS, 2.0, {1, 2, 4})],
    ids=["dense", "experts", "bounded experts"],
)
def test_layouts_of_a_run_with_graphs_are_those_that_graphs_can_hold(
    model: dict[str, Any], bound: float | None, axes: set[int]
) -> None:
    tree = run(model).to_json()
    tree["train"]["cuda_graphs"], tree["data"]["document_mask"] = True, False
    fixed = {"policy": "none"} | ({} if bound is None else {"expert_buffer_factor": bound})
    specs = [*LayoutSpace(RunSpec.model_validate(tree), 4, fixed).layouts()]
    assert {spec.layout.zero for spec in specs} == {0, 1, 2} and {spec.layout.ep for spec in specs} == axes
    assert {(spec.layout.pp, spec.layout.cp) for spec in specs} == {(1, 1)}
    for spec in specs:
        RunSpec.model_validate(spec.to_json())  # no rule refuses it


def accepted(base: RunSpec, ranks: int, replicate: int | None = None) -> Iterator[RunSpec]:
    """Each layout that the rules accept, by trying all, or all of so many replicas."""
    sizes = divisors(ranks)
    tree, moe = base.to_json(), base.model.moe
    experts = list(product(divisors(moe.experts), divisors(moe.ffn))) if moe else [(1, 1)]
    meshes = [
        dict(zip(("dp", "replicate", "tp", "cp", "pp"), each, strict=True))
        for each in product(sizes, repeat=5)
        if prod(each) == ranks and replicate in (None, each[1])
    ]
    for mesh, zero, shared, mode, (ep, etp), micro in product(
        meshes, range(4), (True, False), get_args(ContextMode), experts, divisors(base.batch_sequences)
    ):
        orders: list[tuple[str, int | None, str]] = [("1f1b", None, "even")]
        if mesh["pp"] > 1:
            counts = range(1, (base.model.layers + 2) // mesh["pp"] + 2)
            orders = list(product(tuple(SCHEDULES), counts, ("even", "balanced")))
        for name, virtual, stages in orders:
            layout = {**mesh, "zero": zero, "sequence_parallel": shared, "context_mode": mode}
            layout |= {"ep": ep, "etp": etp, "micro_batch": micro}
            layout |= {"schedule": name, "virtual": virtual, "stages": stages}
            try:
                yield RunSpec.model_validate({**tree, "layout": layout})
            except UserError:
                continue


def essence(spec: RunSpec) -> tuple[Any, ...]:
    """A layout by what it does, so that two names of one thing are equal."""
    from meshwright.spec.stages import stages

    at = spec.layout
    schedule = {("interleaved", 1): "1f1b", ("bfs", 1): "gpipe"}.get((at.schedule, at.chunks), at.schedule)
    schedule = schedule if at.pp > 1 else "none"
    joint = at.ulysses(spec.model.kv_heads) if at.context_mode == "ring+ulysses" else 0
    mode = {1: "ring", at.cp: "ulysses"}.get(joint, at.context_mode) if at.cp > 1 else "ring"
    cut = tuple(len(stage.blocks) for stage in stages(spec.model, at, spec.data.seq_len))
    whole = at.shard_ranks == 1 and spec.step_groups == 1  # nothing is sharded, whatever zero says
    sharding = (at.dp * at.replicate, 1, 0) if whole else (at.dp, at.replicate, at.zero)
    return (
        *(*sharding, at.tp, at.tp == 1 or at.sequence_parallel),
        *(at.cp, mode, at.pp, schedule, cut, at.ep, at.etp, spec.micro_batch, spec.recompute.policy),
    )


@pytest.mark.parametrize(
    ("model", "ranks"),
    [pytest.param(DENSE, 4, marks=pytest.mark.full), (DENSE, 3), (EXPERTS, 2), (DENSE, 2), (DENSE, 1)],
)
def test_the_space_is_what_the_rules_accept(model: dict[str, Any], ranks: int) -> None:
    base = run(model, seq_len=48, sequences=6 if ranks == 3 else 4)
    made = [essence(spec) for spec in LayoutSpace(base, ranks, {"policy": "none"}).layouts()]
    assert len(made) == len(set(made)) > 0
    assert set(made) == {essence(spec) for spec in accepted(base, ranks)}


def islands_of(model: dict[str, Any]) -> RunSpec:
    tree = run(model, seq_len=48, sequences=4).to_json()
    return RunSpec.model_validate({**tree, "layout": {"replicate": 2}, "outer": {"every": 10, "delay": 2}})


@pytest.mark.parametrize(("model", "ranks"), [(DENSE, 4), (EXPERTS, 2)])
def test_the_space_of_islands_is_what_the_rules_accept(model: dict[str, Any], ranks: int) -> None:
    """Without stages of ZeRO that ranks of an island do not share, and with islands apart from each other."""

    def without_idle_zero(spec: RunSpec) -> tuple[Any, ...]:
        alone = spec.layout.shard_ranks == 1
        return essence(
            spec.model_copy(update={"layout": spec.layout.model_copy(update={"zero": 0})}) if alone else spec
        )

    base = islands_of(model)
    space = LayoutSpace(base, ranks, {"policy": "none", "replicate": 2})
    specs = [*space.layouts()]
    made = [essence(spec) for spec in specs]
    assert len(made) == len(set(made)) > 0
    assert set(made) == {without_idle_zero(spec) for spec in accepted(base, ranks, replicate=2)}
    for spec in specs:
        assert (
            spec.layout.strides["replicate"] == ranks // 2 and RunSpec.model_validate(spec.to_json()) == spec
        )


@pytest.mark.parametrize("tenth", [2, 9])
def test_the_search_for_islands_finds_what_brute_force_does(tenth: int) -> None:
    base, on = islands_of(DENSE), CostModel(cluster("h100", 4))
    space, memory = LayoutSpace(base, 4, {"replicate": 2, "context_mode": "ring"}), memory_model(on)
    every = [(step_time(spec, on).seconds, memory.peak(spec).device) for spec in space.layouts()]
    capacity = sorted(needs for _, needs in every)[len(every) * tenth // 10]
    found = search(space, on, capacity, 1, memory=memory)
    best = min(seconds for seconds, needs in every if needs <= capacity)
    assert found.best[0].seconds == pytest.approx(best, rel=1e-9)


def test_a_very_deep_model_has_few_cuts() -> None:
    space = LayoutSpace(run({"preset": "tiny", "layers": 6000}), 2)
    assert all(len(cut.blocks) <= 256 for cut in space.cuts(2))
    assert len(space.cuts(2)) < 600
    assert [cut.chunks for cut in LayoutSpace(space.base, 2, {"virtual": 300}).cuts(2)] == [300, 300]


def test_every_layout_of_a_larger_space_validates() -> None:
    base, chosen = run(EXPERTS, sequences=16), random.Random(5)
    specs = [spec for spec in LayoutSpace(base, 8).layouts() if chosen.random() < 0.01]
    assert len(specs) > 100
    for spec in specs:
        assert RunSpec.model_validate(spec.to_json()).to_json() == spec.to_json()
        assert spec.layout.world_size == 8


QUICK_SEEDS = {(0, 0.05), (1, 0.05), (2, 0.3), (3, 0.3)}
"""Two seeds of dense models, two of experts."""


class Drawn(NamedTuple):
    """A space of layouts, and each of them timed on devices that hold only some."""

    space: LayoutSpace
    on: CostModel
    fixed: dict[str, Any]
    every: list[TimedLayout]
    capacity: float


@cache
def drawn(seed: int) -> Drawn:
    """Devices so small that about half of the layouts do not fit."""
    chosen = random.Random(seed)
    model, ranks = (EXPERTS, chosen.choice([2, 4])) if seed % 2 else (DENSE, chosen.choice([2, 4, 6]))
    sequences = ranks * chosen.choice([1, 2, 4])
    base = run(model, chosen.choice([32, 256]), sequences)
    megatron = "megatron-core" if seed % 2 else "megatron-2021"  # which has no experts
    stack = STACKS[chosen.choice(["meshwright", megatron, "fsdp"])]
    on = CostModel(cluster(chosen.choice(["h100", "rtx-4090", "gh200"]), ranks), stack)
    fixed: dict[str, Any] = {"sequence_parallel": True} if seed % 3 else {"context_mode": "ring"}
    fixed |= {"policy": chosen.choice(["none", "selective", "full"])} if ranks > 2 else {}
    fixed |= {"context_mode": "ring", "etp": chosen.choice([1, 2])} if seed % 2 and ranks > 2 else {}
    space = LayoutSpace(base, ranks, fixed, program=PROGRAMS[stack.name])
    every = []
    for spec in space.layouts():
        every.append(TimedLayout(step_time(spec, on).seconds, Generic(on).peak(spec).device, spec))
    needs = sorted(each.memory for each in every)
    return Drawn(space, on, fixed, every, needs[len(needs) * chosen.choice([1, 5, 9]) // 10])


def probability(timed: TimedLayout, on: CostModel) -> float:
    """The chance that a layout fits, which is sure where its memory was not asked for."""
    return (
        1.0
        if timed.memory == 0
        else fits_probability(timed.memory, room(on.cluster), spread(on.cluster, on.stack))
    )


def assert_first(found: TimedLayout | None, every: list[TimedLayout], on: CostModel, near: float) -> None:
    """The fastest of those that change least, of all layouts that fit and are near the fastest, or of those
    of them that fit with 95% if there are any."""
    ordering, fastest = Ordering(on.cluster), min(each.seconds for each in every)
    close = [each for each in every if each.seconds <= fastest * (1 + near)]
    close = [each for each in close if probability(each, on) >= 0.95] or close
    first = min(close, key=lambda each: (ordering.of(each.spec), each.seconds))
    assert found is not None
    assert ordering.of(found.spec) == ordering.of(first.spec)
    assert found.seconds == pytest.approx(first.seconds, rel=1e-9)


@pytest.mark.parametrize(
    ("seed", "near"),
    [
        pytest.param(seed, near, marks=() if (seed, near) in QUICK_SEEDS else pytest.mark.full)
        for seed, near in product(range(8), (0.05, 0.3))
    ],
)
def test_the_search_finds_what_brute_force_does(
    seed: int, near: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(simplest, "NEAR", near)
    space, on, fixed, every, capacity = drawn(seed)
    fitting = sorted((each for each in every if each.memory <= capacity), key=lambda each: each.order)
    different: dict[tuple[Any, ...], TimedLayout] = {}
    for each in fitting:
        different.setdefault(kind(each.spec), each)
    top = min(12, len(different))
    found = search(space, on, capacity, top)
    assert [each.seconds for each in found.best] == pytest.approx(
        [each.seconds for each in different.values()][:top], rel=1e-9
    )
    assert len({kind(each.spec) for each in found.best}) == top
    for few in (found, search(space, on, capacity, 1)):
        assert few.best[0].seconds == pytest.approx(fitting[0].seconds, rel=1e-9)
        assert_first(few.preferred, fitting, on, near)
    for each in found.best:
        assert each.seconds == pytest.approx(step_time(each.spec, on).seconds, rel=1e-9)
        assert each.memory == pytest.approx(Generic(on).peak(each.spec).device, rel=1e-9)
    assert found.counts.timed < len(every)
    least = SearchProblem(space.base, on.cluster, on.stack, fixed).least_memory()
    assert least is not None and least.device <= min(each.memory for each in every)


@pytest.mark.parametrize(
    ("model", "tenth"),
    some([(DENSE, 1), (DENSE, 5), (EXPERTS, 1), (EXPERTS, 5)], [(DENSE, 5), (EXPERTS, 1)]),
)
def test_the_search_for_a_program_that_keeps_outputs_by_name_finds_what_brute_force_does(
    model: dict[str, Any], tenth: int
) -> None:
    base, on = run(model, 256, 4), CostModel(cluster("tpu-v6e", 4), STACKS["maxtext"])
    fixed, memory = {"context_mode": "ring"}, Generic(on)
    space = LayoutSpace(base, 4, fixed, program=PROGRAMS["maxtext"])
    every = [(step_time(spec, on).seconds, memory.peak(spec).device) for spec in space.layouts()]
    capacity = sorted(needs for _, needs in every)[len(every) * tenth // 10]
    found = search(space, on, capacity, 1)
    best = min(seconds for seconds, needs in every if needs <= capacity)
    assert found.best[0].seconds == pytest.approx(best, rel=1e-9)


SPACES: dict[str, tuple[dict[str, Any], int, dict[str, Any]]] = {
    "dense": ({"preset": "llama3-8b", "layers": 5}, 4096, {"context_mode": "ring"}),
    "experts": ({"preset": "mixtral-8x7b", "layers": 3}, 2048, {"context_mode": "ring", "etp": 1}),
    "long context": ({"preset": "llama3-8b", "layers": 3}, 131072, {}),
}


def space_of(name: str, offload: str) -> tuple[LayoutSpace, CostModel]:
    """A space of layouts of four ranks in which most bytes are activations, and a model of their costs."""
    (model, seq_len, fixed), ranks = SPACES[name], 4
    base = run(model, seq_len, 8)
    base = base.model_copy(update={"train": base.train.model_copy(update={"offload_activations": offload})})
    return LayoutSpace(base, ranks, fixed | {"sequence_parallel": True}), CostModel(cluster("h100", ranks))


@cache
def timed(name: str, offload: str) -> list[TimedLayout]:
    """Every layout of such a space, with its exact memory."""
    space, on = space_of(name, offload)
    memory = memory_model(on)
    return [
        TimedLayout(step_time(spec, on).seconds, memory.peak(spec).device, spec) for spec in space.layouts()
    ]


QUICK = {("dense", "none", 4), ("experts", "host", 1)}


@pytest.mark.parametrize(
    ("name", "offload", "tenth"),
    [
        pytest.param(*each, marks=() if each in QUICK else pytest.mark.full)
        for each in product(SPACES, ("none", "host"), (1, 4, 8))
    ],
)
def test_the_search_finds_what_brute_force_does_by_the_exact_memory(
    name: str, offload: str, tenth: int
) -> None:
    """Devices which so many tenths of the layouts fit."""
    (space, on), every = space_of(name, offload), timed(name, offload)
    capacity = sorted(each.memory for each in every)[len(every) * tenth // 10]
    different: dict[tuple[Any, ...], TimedLayout] = {}
    for each in sorted((each for each in every if each.memory <= capacity), key=lambda each: each.order):
        different.setdefault(kind(each.spec), each)
    wanted = list(different.values())[:12]
    found = search(space, on, capacity, len(wanted), memory=memory_model(on))
    assert_first(found.preferred, [each for each in every if each.memory <= capacity], on, simplest.NEAR)
    assert [each[:2] for each in found.best] == [pytest.approx(each[:2]) for each in wanted]
    assert found.counts.timed < len(every)


@pytest.mark.parametrize("tenth", [2, 3])
def test_a_layout_that_fits_comfortably_is_before_one_that_changes_less(
    tenth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Devices which so many tenths of the layouts fit with 80%, and fewer with 95%."""
    monkeypatch.setattr(simplest, "NEAR", 0.3)
    (space, on), every = space_of("dense", "none"), timed("dense", "none")
    capacity = sorted(each.memory for each in every)[len(every) * tenth // 10]
    size = capacity / fitting(1.0, spread(on.cluster, on.stack))
    device = replace(on.cluster.device, memory=round(size))
    on = CostModel(replace(on.cluster, device=device), on.stack)
    fit = [each for each in every if each.memory <= capacity]
    found = search(space, on, capacity, 1, memory=memory_model(on)).preferred
    assert_first(found, fit, on, simplest.NEAR)
    assert found is not None and probability(found, on) >= 0.95
    near = [each for each in fit if each.seconds <= 1.3 * min(other.seconds for other in fit)]
    plainest = min(near, key=lambda each: (Ordering(on.cluster).of(each.spec), each.seconds))
    assert probability(plainest, on) < 0.95


def small_nodes(ranks: int) -> Cluster:
    """Nodes of two devices, on a network that is slow beside them."""
    found = cluster("h100", 8).resized(ranks)
    (host,) = found.levels
    slow = replace(host, name="network", link=replace(host.link, bandwidth=2e9))
    return replace(found, levels=(replace(host, devices=2), slow), beyond=())


@pytest.mark.parametrize(("seq_len", "sequences", "batch"), [(256, 8, 1), (2048, 64, 1), (32, 8, 2)])
def test_no_order_of_the_axes_is_better_than_the_best_that_is_found(
    seq_len: int, sequences: int, batch: int
) -> None:
    base, ranks = run(DENSE, seq_len, sequences), 4
    on, fixed = (
        CostModel(small_nodes(ranks)),
        {"policy": "none", "micro_batch": batch, "context_mode": "ring"},
    )
    every = []
    for order in get_args(Order):
        for spec in LayoutSpace(base, ranks, fixed | {"order": order}).layouts():
            every.append(TimedLayout(step_time(spec, on).seconds, 0.0, spec))
    levels = [level.devices for level in on.cluster.levels]
    found = search(LayoutSpace(base, ranks, fixed, levels=levels), on, 80e9, 1)
    assert found.best[0].seconds == pytest.approx(min(each.seconds for each in every), rel=1e-9)
    assert_first(found.preferred, every, on, simplest.NEAR)


def test_an_order_that_brings_pipeline_ranks_closer_is_among_the_choices() -> None:
    base = run(DENSE, sequences=8)
    space = LayoutSpace(base, 4, {"policy": "none"}, levels=[2, 4])
    assert {spec.layout.order for spec in space.layouts()} == set(get_args(Order))
    assert {spec.layout.order for spec in LayoutSpace(base, 4, levels=[4]).layouts()} == {
        "pp-replicate-dp-tp"
    }


def test_the_search_knows_that_ranks_share_cores() -> None:
    base, on = (
        run(DENSE, sequences=8),
        CostModel(replace(cluster("cpu", 4), device=replace(cluster("cpu", 4).device, units=2))),
    )
    space = LayoutSpace(base, 4, {"policy": "none", "sequence_parallel": True, "context_mode": "ring"})
    different: dict[tuple[Any, ...], float] = {}
    for seconds, spec in sorted(
        ((step_time(spec, on).seconds, spec) for spec in space.layouts()), key=lambda each: each[0]
    ):
        different.setdefault(kind(spec), seconds)
    found = search(space, on, 80e9, 8)
    assert on.shared is not None
    assert [each.seconds for each in found.best] == pytest.approx([*different.values()][:8], rel=1e-9)
    every = [TimedLayout(step_time(spec, on).seconds, 0.0, spec) for spec in space.layouts()]
    assert_first(found.preferred, every, on, simplest.NEAR)


def test_any_layout_that_fits_is_an_answer_where_any_will_do() -> None:
    base = run(DENSE)
    on = CostModel(cluster("h100", 4))
    space = LayoutSpace(base, 4)
    found = search(space, on, 80e9, any_will_do=True)
    assert len(found.best) == 1 and found.best[0].memory <= 80e9


FIXED: dict[str, dict[str, Any]] = {
    "zero": {"zero": 1, "context_mode": "ring"},
    "whole": {"pp": 1, "context_mode": "ring"},
    "stages": {"pp": 2, "policy": "none"},
}
TOO_LARGE: list[dict[str, Any]] = [
    {"experts": experts, "seq_len": seq_len, "fixed": fixed}
    for experts, seq_len, fixed in product((False, True), (32, 512), FIXED)
]


@pytest.mark.parametrize("case", marked(TOO_LARGE, [TOO_LARGE[number] for number in (0, 5, 7)]))
def test_where_no_layout_fits_nothing_is_searched(case: dict[str, Any]) -> None:
    """By the least memory of all layouts, few microbatches of which hold fewer gradients at a time."""
    on, model = CostModel(cluster("h100", 4)), EXPERTS if case["experts"] else DENSE
    space, memory = LayoutSpace(run(model, case["seq_len"]), 4, FIXED[case["fixed"]]), memory_model(on)
    needs = min(memory.peak(spec).device for spec in space.layouts())
    least = least_memory(space, on, memory)
    assert least is not None and least.device <= needs
    nothing = search(space, on, least.device * 0.999, memory=memory)
    assert not nothing.best and nothing.counts.branches == 0
    enough = least_memory(space, on, memory, least.device)
    assert enough is not None and enough.device <= least.device
    short = least_memory(space, on, memory, least.device * 0.999)
    assert short is None or short.device >= least.device
    assert least_memory(space, on, memory, least.device / 100) is None  # by states alone


def test_estimates_do_not_depend_on_what_was_asked_before() -> None:
    """Engines remember blocks; what data ranks change is not of them."""
    base, seen = run(EXPERTS, sequences=16), random.Random(1)
    specs = [spec for spec in LayoutSpace(base, 8, {"policy": "full"}).layouts() if seen.random() < 0.004]
    assert len(specs) > 10
    on = CostModel(cluster("h100", 8), MESHWRIGHT)
    for spec in specs:
        alone = CostModel(cluster("h100", 8), MESHWRIGHT)
        assert step_time(spec, on).seconds == step_time(spec, alone).seconds
        assert Generic(on).peak(spec) == Generic(alone).peak(spec)


def test_the_best_so_far_is_told_as_it_is_found() -> None:
    told: list[float] = []
    on = CostModel(cluster("h100", 8))
    found = search(LayoutSpace(run(DENSE), 8), on, 80e9, 1, lambda best, _: told.append(best.seconds))
    assert told == sorted(told, reverse=True) and told[-1] == found.best[0].seconds
    times = [each.seconds for each in found.front]
    needs = [each.memory for each in found.front]
    assert times == sorted(times) and needs == sorted(needs, reverse=True)


@pytest.mark.parametrize("lora", [{"rank": 2}, {"rank": 2, "quantise": "nf4", "targets": ["q_proj"]}])
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_search_finds_what_brute_force_does_where_weights_are_frozen(
    lora: dict[str, Any], ranks: int
) -> None:
    """Whose backward takes less than that of all weights, which bounds may not count."""
    tree = run(DENSE, 256, 8).to_json()
    tree["lora"], tree["precision"]["compute"] = lora, "bf16"
    on, space = CostModel(cluster("rtx-4090", ranks)), LayoutSpace(RunSpec.model_validate(tree), ranks, {})
    every = [TimedLayout(step_time(spec, on).seconds, 0.0, spec) for spec in space.layouts()]
    fastest = min(each.seconds for each in every)
    for top in (1, 3):
        found = search(space, on, 24e9, top)
        assert found.best[0].seconds == pytest.approx(fastest, rel=1e-9)
        assert_first(found.preferred, every, on, simplest.NEAR)
