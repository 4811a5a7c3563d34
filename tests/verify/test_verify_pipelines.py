"""Every schedule equals one device, on every number of stages and microbatches, alone and with other axes."""

from __future__ import annotations

import random

import pytest

from covering import each_choice, marked, name
from equality import equal_to_one_device
from meshwright.schedule import NAMES
from meshwright.verify.narrow import narrow
from pipeline_cases import AXES, BASE
from ranks import Ranks
from small import spec_of

V_SHAPED = ("zb-v", "v-half", "v-min", "dualpipe-v")
LOOPED = ("interleaved", "bfs")


def check(ranks: Ranks, sequences: int, **flags: object) -> None:
    equal_to_one_device(ranks, spec_of(BASE, **flags, train__batch_tokens=16 * sequences), 1e-9)


def virtuals(schedule: str) -> tuple[int, ...]:
    return (2,) if schedule in V_SHAPED else (1, 2) if schedule in LOOPED else (1,)


CASES: list[dict[str, object]] = [
    {"layout__schedule": schedule, "layout__pp": pp, "layout__virtual": virtual, "microbatches": microbatches}
    for schedule in NAMES
    for pp in (2, 4)
    for virtual in virtuals(schedule)
    for microbatches in ("few", "many")
]
MICROBATCHES = {("few", 2): 2, ("many", 2): 5, ("few", 4): 4, ("many", 4): 9}
QUICK_CASES = [
    case
    for case in CASES
    if (case["layout__pp"], case["microbatches"], case["layout__virtual"])
    == ((4, "few") if case["layout__schedule"] in ("1f1b", "zb-v") else (2, "many"))
    + (virtuals(str(case["layout__schedule"]))[-1],)
]
"""Each schedule, on two stages or four."""


@pytest.mark.parametrize("case", marked(CASES, QUICK_CASES))
def test_every_schedule_equals_one_device(ranks: Ranks, case: dict[str, object]) -> None:
    flags = dict(case)
    check(ranks, MICROBATCHES[str(flags.pop("microbatches")), int(str(case["layout__pp"]))], **flags)


def with_the_rest(axes: dict[str, object], schedule: str) -> dict[str, object]:
    """A case of these axes, with a choice of what does not belong to them that is drawn by its name."""
    choose = random.Random(f"{axes} {schedule}").choice
    one = {f"layout__{axis}": 1 for axis in ("replicate", "dp", "cp", "tp")}
    return {
        **one,
        "layout__pp": 2,
        "layout__zero": 0,
        "layout__schedule": schedule,
        "model__tied": choose(["true", "false"]),
        "model__qk_norm": choose(["true", "false"]),
        "layout__sequence_parallel": choose(["true", "false"]),
        "recompute__policy": choose(["none", "full", "selective"]),
        "data__pack": choose(["true", "false"]),
        "layout__stages": choose(["even", "balanced"]),
    } | axes


PAIRS = [
    with_the_rest(axes, schedule)
    for number, axes in enumerate(AXES)
    for schedule in (("1f1b", "zb-v") if number % 2 else ("interleaved", "zb-h1"))
]


PLACES = [
    {key: case[f"layout__{key}"] for key in ("replicate", "dp", "cp", "tp", "pp", "zero", "schedule")}
    for case in PAIRS
]
QUICK = [case for case, place in zip(PAIRS, PLACES, strict=True) if place in each_choice(PLACES)]
"""Each size of each axis, each stage of ZeRO and each schedule; of the rest what is drawn for them."""


@pytest.mark.parametrize("case", marked(PAIRS, QUICK))
def test_pipelines_go_with_every_other_axis(ranks: Ranks, case: dict[str, object]) -> None:
    data_ranks = int(str(case["layout__dp"])) * int(str(case["layout__replicate"]))
    microbatches, layers = (3, 5) if case["layout__pp"] == 2 else (5, 7)
    check(ranks, microbatches * data_ranks, **case, model__layers=layers)


RECOMPUTED: list[dict[str, object]] = [
    {"mode": mode, "recompute": recompute}
    for mode in ("gather", "ulysses", "ring+ulysses")
    for recompute in ("full", "selective")
]


@pytest.mark.parametrize("case", marked(RECOMPUTED, RECOMPUTED[3:4]))
def test_recomputation_over_context_ranks_in_a_pipeline(ranks: Ranks, case: dict[str, str]) -> None:
    """Microbatches are under way together, and stages have several blocks."""
    flags = {"layout__pp": 2, "layout__cp": 4, "layout__virtual": 2, "layout__schedule": "interleaved"}
    rest = {"layout__context_mode": case["mode"], "recompute__policy": case["recompute"], "data__seq_len": 32}
    heads = 8 if case["mode"] == "ulysses" else 2
    check(ranks, 4, **flags, **rest, model__heads=8, model__kv_heads=heads, model__layers=8)


CUTS: list[dict[str, object]] = [
    {"layout__schedule": schedule, "layout__stages": stages}
    for schedule in ("1f1b", "zb-h1", "zb-h2")
    for stages in ("0,4,3,0", "3,0,2,2", "7,0,0,0")
]


@pytest.mark.parametrize("case", marked(CUTS, CUTS[4:5]), ids=name)
def test_cuts_by_hand_and_stages_that_hold_nothing(ranks: Ranks, case: dict[str, object]) -> None:
    check(ranks, 6, **case, layout__pp=4, model__tied="true")


def test_a_pipeline_of_gpt2(ranks: Ranks) -> None:
    flags = {
        "layout__pp": 2, "layout__tp": 2, "layout__schedule": "zb-h1", "model__family": "gpt2",
        "model__norm": "layernorm", "model__activation": "gelu_tanh", "model__position": "learned",
        "model__kv_heads": 4, "model__qkv_bias": "true", "model__out_bias": "true", "model__mlp_bias": "true",
        "model__tied": "true",
    }  # fmt: skip
    check(ranks, 8, **flags)


def test_a_narrowed_copy_keeps_a_layer_for_each_stage() -> None:
    spec = spec_of(
        {"model.preset": "llama3-8b", "layout.pp": 8, "layout.schedule": "zb-v", "data.seq_len": 4096},
        train__batch_tokens=4096 * 64, layout__micro_batch=1, model__layers=32,
    )  # fmt: skip
    small, note = narrow(spec)
    assert note is not None and small.model.layers == 16 and small.microbatches == 16
