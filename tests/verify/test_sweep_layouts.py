"""The layouts that a sweep of `meshwright verify` checks, and their order."""

from __future__ import annotations

from itertools import combinations, product
from typing import Any, get_args

import pytest

from meshwright.spec import RunSpec, UserError
from meshwright.spec.layout import ContextMode, ulysses_ranks
from meshwright.spec.pipeline_schedules import SCHEDULES
from meshwright.verify.sweep_layouts import SIZES, SweepLayouts, _cases
from small import spec_of

BASE = {
    "model.vocab_size": 61,
    "data.seq_len": 16,
    "train.batch_tokens": 8 * 16,
    "train.warmup_steps": 1,
}
MOE = {"model.moe.experts": 4, "model.moe.top_k": 2, "model.moe.ffn": 8}


def microbatches(spec: RunSpec, case: dict[str, Any]) -> str:
    """'one' or 'several' of a rank; nothing where the rules of a run do not accept the case."""
    tree = spec.to_json()
    tree["layout"] |= case
    try:
        found = RunSpec.model_validate(tree)
    except UserError:
        return ""
    return ("several" if found.microbatches > 1 else "one") * (found.microbatches <= 2 * found.layout.pp)


def canonical(spec: RunSpec, case: dict[str, Any]) -> bool:
    """False for the second name of a layout, such as a mode of an axis of one rank."""
    heads = max(1, spec.model.kv_heads // case["tp"])
    mixed = case["context_mode"] == "ring+ulysses"
    return (
        (case["cp"] > 1 or case["context_mode"] == "ring")
        and (not mixed or 1 < ulysses_ranks(case["cp"], heads, "ring+ulysses") < case["cp"])
        and (case["tp"] > 1 or case["sequence_parallel"])
        and (case["pp"] > 1 or (case["schedule"], case["virtual"]) == (spec.layout.schedule, None))
        and (case["pp"] == 1 or case["virtual"] is not None)
        and (case["schedule"] not in ("interleaved", "bfs") or case["virtual"] > 1)
        and (case["dp"] * case["cp"] > 1 or case["zero"] == 0)
    )


@pytest.mark.parametrize("model", [{}, MOE], ids=["dense", "experts"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_the_layouts_are_all_that_the_rules_accept(model: dict[str, object], ranks: int) -> None:
    spec = spec_of(BASE | model, model__layers=2)
    found = {tuple(case.items()) for case in _cases(spec, ranks) if case["policy"] == "none"}
    sizes = [size for size in (1, 2, 4) if size <= ranks]
    values: dict[str, list[Any]] = dict.fromkeys(SIZES, sizes) | {
        "zero": [0, 1, 2, 3],
        "sequence_parallel": [True, False],
        "context_mode": list(get_args(ContextMode)),
        "schedule": list(SCHEDULES),
        "virtual": [None, 1, 2],
        "micro_batch": [1, 2, 4, 8],
    }
    wanted = set()
    for axes in product(*(values[name] for name in SIZES)):
        world = dict(zip(SIZES, axes, strict=True))
        folded = world["ep"] * world["etp"]
        if world["replicate"] * world["dp"] * world["tp"] * world["cp"] * world["pp"] != ranks:
            continue
        if folded > ranks or (folded > 1 and not model):
            continue
        names = [name for name in values if name not in SIZES]
        for choices in product(*(values[name] for name in names)):
            case = world | dict(zip(names, choices, strict=True))
            if canonical(spec, case) and (count := microbatches(spec, case)):
                wanted.add((*case.items(), ("microbatches", count), ("policy", "none")))
    assert found == wanted
    assert len(found) > 20


@pytest.mark.parametrize("model", [{}, MOE], ids=["dense", "experts"])
def test_the_first_layouts_cover_all_pairs_and_all_of_them_all_sizes(model: dict[str, object]) -> None:
    layouts = SweepLayouts(spec_of(BASE | model), 4)
    cases, order = layouts.cases, layouts.order

    def pairs(numbers: list[int]) -> set[object]:
        return {
            pair for number in numbers for pair in combinations(sorted(cases[number].items(), key=str), 2)
        }

    def sizes(numbers: list[int]) -> set[object]:
        return {tuple(cases[number][name] for name in SIZES) for number in numbers}

    every = list(range(len(cases)))
    assert pairs(order[: layouts.needed]) == pairs(every)
    assert len(pairs(every)) == layouts.pairs.total == layouts.pairs.covered(order)
    assert len(pairs(order[:3])) == layouts.pairs.covered(order[:3])
    assert sizes(order) == sizes(every)
    assert len(set(order)) == len(order) < len(cases) / 4
    for place in range(len(order)):
        assert layouts.run(place).layout.world_size == 4


def test_the_first_layouts_take_little_time() -> None:
    """They compute fewer blocks than those that cover as many pairs whatever their time."""
    layouts = SweepLayouts(spec_of(BASE), 4)

    def blocks(numbers: list[int]) -> int:
        chosen = [layouts.cases[number] for number in numbers]
        return sum(case["tp"] * case["cp"] * 8 // case["micro_batch"] for case in chosen)

    plain = layouts.pairs.covering()
    assert layouts.pairs.covered(plain) == layouts.pairs.covered(layouts.order[: layouts.needed])
    assert blocks(layouts.order[: layouts.needed]) < 0.8 * blocks(plain)
    several = {case["schedule"] for case in layouts.cases if case["microbatches"] == "several"}
    runs = [layouts.run(place) for place in range(layouts.needed)]
    assert {run.layout.schedule for run in runs if run.microbatches > 1} == several


def test_a_narrowed_copy_has_only_layouts_that_the_run_allows_too() -> None:
    """Four tensor ranks have no equal shares of 6 key-value heads; 328 tokens are not cut into 16 pieces."""
    spec = spec_of(
        {"model.hidden": 384, "model.heads": 24, "model.kv_heads": 6, "data.seq_len": 328},
        model__ffn=1024,
        model__layers=9,
        train__batch_tokens=328 * 16,
    )
    layouts = SweepLayouts(spec, 8)
    assert layouts.note is not None and layouts.small.model.parameters < spec.model.parameters / 20
    runs = [layouts.run(place) for place in range(len(layouts.order))]
    for run in runs:
        tree = spec.to_json()
        tree["layout"] |= run.to_json()["layout"] | {"micro_batch": None}
        assert RunSpec.model_validate(tree).layout.world_size == 8
    assert {run.layout.cp for run in runs} == {1, 2, 4}
    assert 4 not in {run.layout.tp for run in runs}


def test_without_layouts_another_number_is_proposed() -> None:
    with pytest.raises(UserError, match=r"no layout of 7 ranks fits the run; .* such as 6"):
        SweepLayouts(spec_of(BASE), 7)
