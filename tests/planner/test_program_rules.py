"""Layouts of other programs: published runs keep the rules, plans keep them exactly, and refusals say why."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from meshwright import api
from meshwright.cli.main import main
from meshwright.hardware.find import cluster
from meshwright.planner.cost.model import CostModel
from meshwright.planner.cost.software import STACKS
from meshwright.planner.cost.step import step_time
from meshwright.planner.explain.explanation import Explanation
from meshwright.planner.layout_space import LayoutSpace
from meshwright.planner.memory.generic import Generic
from meshwright.planner.programs.rules import LayoutChoice, ProgramLayouts
from meshwright.planner.programs.table import OWN, PROGRAMS
from meshwright.planner.search.branch_and_bound import search
from meshwright.planner.search.problem import SearchProblem
from meshwright.planner.validation.cases import case_of
from meshwright.planner.validation.table import FRONTIER, PUBLISHED, Row, read
from meshwright.spec import Layout, RunSpec, UserError
from meshwright.spec.pipeline_schedules import SCHEDULES
from small_runs import run

OTHERS = [name for name, program in PROGRAMS.items() if program is not OWN]
DENSE: dict[str, Any] = {"preset": "tiny", "layers": 4, "kv_heads": 2}
EXPERTS: dict[str, Any] = {"preset": "moe-tiny", "layers": 4, "moe": {"experts": 4, "ffn": 2}}


def test_every_stack_has_its_layouts_with_their_source() -> None:
    assert set(PROGRAMS) == set(STACKS)
    for name in OTHERS:
        program = PROGRAMS[name]
        assert program.rules and len(program.source) > 40
        assert set(program.schedules) <= set(SCHEDULES)
        assert any(rule.key == "schedule" and rule.step == "schedule" for rule in program.rules) == bool(
            program.schedules
        )


def published() -> Iterator[tuple[str, RunSpec, Row]]:
    """Each run that a row of the published tables may describe, with its program."""
    for table in (PUBLISHED, FRONTIER):
        rows = read(table)
        for row in rows:
            try:
                case = case_of(row, rows)
            except UserError:  # of such rows `validate` tells the reason
                continue
            yield from ((case.stack.name, spec, row) for spec in case.specs)


def test_no_published_run_breaks_a_rule_of_its_program() -> None:
    """They ran. Where one breaks a rule, the rule is wrong."""
    seen = set()
    for name, spec, row in published():
        rule = PROGRAMS[name].broken(spec)
        assert rule is None, (
            f"{row.words['source']}, row {row.number}: {rule and rule.reason(name, '', spec)}"
        )
        seen.add(name)
    assert len(seen) >= 12


@cache
def all_layouts(experts: bool, ranks: int) -> tuple[RunSpec, ...]:
    """The layouts of a small model that the rules of this program accept."""
    base = run(EXPERTS if experts else DENSE, seq_len=64, sequences=4)
    return tuple(LayoutSpace(base, ranks, {"policy": "none"}).layouts())


def essence(spec: RunSpec) -> tuple[Any, ...]:
    """A layout by what it does, whatever its stages are called."""
    at = LayoutChoice.of(spec)
    return (*at[2:], spec.micro_batch)


@pytest.mark.parametrize("experts", [False, True], ids=["dense", "experts"])
@pytest.mark.parametrize("name", OTHERS)
def test_the_space_of_a_program_is_all_that_its_rules_take(name: str, experts: bool) -> None:
    """None more and none less of all layouts, and of those with the program's own stages."""
    program, every = PROGRAMS[name], all_layouts(experts, 4)
    dealt = [
        spec.model_copy(update={"layout": program.dealt(spec.model, spec.layout)})
        for spec in every
        if program.cut is not None
    ]
    wanted = {essence(spec) for spec in (*every, *dealt) if program.broken(spec) is None}
    base = run(EXPERTS if experts else DENSE, seq_len=64, sequences=4)
    made = [essence(spec) for spec in LayoutSpace(base, 4, {"policy": "none"}, program=program).layouts()]
    assert set(made) == wanted and len(made) == len(wanted)
    has_experts = not any(rule.key == "model.moe" for rule in program.rules)
    assert bool(wanted) == (has_experts or not experts)


QUICK = {("megatron-core", True), ("fsdp-compiled", False), ("nanotron", False), ("maxtext", True)}


@pytest.mark.parametrize(
    ("name", "experts"),
    [
        pytest.param(name, experts, marks=() if (name, experts) in QUICK else pytest.mark.full)
        for name in (
            "megatron-2021",
            "megatron-deepspeed",
            "megatron-core",
            "fsdp-compiled",
            "nanotron",
            "maxtext",
        )
        for experts in (False, True)
        if not (experts and any(rule.key == "model.moe" for rule in PROGRAMS[name].rules))
    ],
)
@pytest.mark.parametrize("tenth", [1, 6])
def test_the_plan_for_a_program_is_what_brute_force_finds(name: str, experts: bool, tenth: int) -> None:
    """The best of the layouts that it runs, on devices that so many tenths of them fit."""
    base, on = run(EXPERTS if experts else DENSE, 256, 8), CostModel(cluster("h100", 4), STACKS[name])
    space, memory = LayoutSpace(base, 4, {"context_mode": "ring"}, program=PROGRAMS[name]), Generic(on)
    every = [(step_time(spec, on).seconds, memory.peak(spec).device) for spec in space.layouts()]
    capacity = sorted(needs for _, needs in every)[len(every) * tenth // 10]
    found = search(space, on, capacity, 1)
    best = min(seconds for seconds, needs in every if needs <= capacity)
    assert found.best[0].seconds == pytest.approx(best, rel=1e-9)
    assert PROGRAMS[name].broken(found.best[0].spec) is None
    problem = SearchProblem(base, on.cluster, on.stack, {"context_mode": "ring"})
    least = problem.least_memory()
    assert least is not None and least.device <= min(needs for _, needs in every)


WISH: dict[str, Any] = {"gpus": 64, "seq_len": 8192, "batch_tokens": "4M"}


@pytest.mark.parametrize(
    ("stack", "keys", "says"),
    [
        (
            "megatron-core",
            {"zero": 2},
            r"^layout\.zero: 2 .* states alone .* 0 or 1, or --stack megatron-fsdp$",
        ),
        (
            "megatron-core",
            {"schedule": "zb-v"},
            "schedule: zb-v .* 1f1b or interleaved; give layout.schedule",
        ),
        ("nemo", {"tp": 16}, r"tp: 16 .* by nemo of 2025, .* model\.kv_heads is 8; give layout\.tp = 8$"),
        ("megatron-lm", {"cp": 2}, "cp: 2 .* no context parallelism; give layout.cp = 1"),
        ("megatron-lm", {"pp": 2, "schedule": "interleaved"}, "pp: 2 .* more than two pipeline ranks; give"),
        ("megatron-2021", {"virtual": 3}, "pp: .* 3 of them cannot hold 32 layers so"),
        ("megatron-2021", {"replicate": 2, "zero": 1}, "replicate: 2 .* over all data ranks"),
        ("megatron-deepspeed", {"zero": 2, "pp": 4}, "zero: 2 .* ZeRO-1 alone .* 0 or 1, or layout.pp = 1"),
        ("megatron-deepspeed", {"tp": 2, "sequence_parallel": "true"}, "sequence_parallel: true .* = false"),
        (
            "deepspeed-zero3",
            {"zero": 1},
            "zero: 1 .* is DeepSpeed's ZeRO-3; give layout.zero = 3, or --stack",
        ),
        ("llm-foundry", {"pp": 2}, "pp: 2 .* has no pipelines; give layout.pp = 1"),
        ("nanotron", {"stages": "balanced", "pp": 4}, "stages: balanced .* give layout.stages = 9,9,8,6, or"),
        ("nanotron", {"zero": 3}, "zero: 3 .*zero_stage above 0 is ZeRO-1; give layout.zero = 0 or 1"),
        ("fsdp", {"cp": 2, "context_mode": "ulysses"}, "context_mode: ulysses .* give .* ring or gather"),
        ("fsdp-compiled", {"zero": 1}, "zero: 1 .* reshard_after_forward.*; give layout.zero = 0, 2 or 3"),
        (
            "fsdp-compiled",
            {"pp": 4, "schedule": "zb-v"},
            "schedule: zb-v .* gpipe, 1f1b, interleaved or bfs;",
        ),
        (
            "fsdp",
            {"dp": 2, "pp": 32, "micro_batch": 64, "schedule": "1f1b"},
            "schedule: 1f1b .* as many microbatches as stages, and a rank has 4 for 32 .* has 32$",
        ),
        ("maxtext", {"pp": 4, "schedule": "1f1b"}, "schedule: 1f1b .* gpipe or bfs; give layout.schedule"),
        ("hai-llm", {"cp": 2, "zero": 3}, "is not run by hai-llm"),
    ],
)
def test_a_layout_that_a_program_does_not_run_is_one_sentence(
    stack: str, keys: dict[str, Any], says: str
) -> None:
    given = [(f"layout.{key}", str(value)) for key, value in keys.items()]
    with pytest.raises(UserError, match=says) as error:
        api.plan("llama3-8b", "h100", stack=stack, overrides=given, **WISH)
    assert "\n" not in str(error.value)


def test_stages_that_a_program_cannot_make_are_refused() -> None:
    wish = {"gpus": 1024, "seq_len": 8192, "batch_tokens": "16M", "overrides": [("layout.pp", "4")]}
    with pytest.raises(
        UserError, match=r"pp: 4 .* 4 x . of them cannot hold 126 layers so; give layout.pp = "
    ):
        api.plan("llama3-405b", "h100", stack="megatron-lm", **wish)


def test_a_model_that_a_program_has_not_is_refused() -> None:
    with pytest.raises(
        UserError, match=r"model\.moe: a model of 8 experts is not run by llm-foundry of 2023, which has"
    ):
        api.plan("mixtral-8x7b", "h100", stack="llm-foundry", **WISH)


@pytest.mark.parametrize(
    ("stack", "instead"),
    [
        ("meshwright", "this program does not multiply in it as it trains; give nvfp4 or mxfp8 on devices"),
        ("nemo", "nemo does not multiply in it as it trains; give nvfp4 or mxfp8 on devices that have it"),
        ("fsdp-compiled", "fsdp-compiled does not .*; give mxfp8 on devices that have it"),
        ("megatron-lm", "megatron-lm does not .*; give bf16"),
    ],
)
def test_plans_in_mxfp4_are_refused_with_what_the_program_has(stack: str, instead: str) -> None:
    given = [("precision.compute", "mxfp4")]
    with pytest.raises(UserError, match=f"^precision.compute: 'mxfp4' is a format of weights .*{instead}"):
        api.plan("llama3-8b", "b200", stack=stack, overrides=given, gpus=8, batch_tokens="1M")


def test_explain_refuses_what_the_program_does_not_run_and_takes_its_habits() -> None:
    tree = run({"preset": "tiny", "layers": 5}).to_json()
    for layout, says in (
        ({"dp": 2, "zero": 2}, "layout.zero: 2 is not run by megatron-core"),
        ({"pp": 2, "schedule": "zb-h1"}, "layout.schedule: zb-h1 is not run by megatron-core"),
    ):
        with pytest.raises(UserError, match=says):
            api.explain(
                RunSpec.model_validate({**tree, "layout": layout}), cluster="h100", stack="megatron-core"
            )
    open_keys = RunSpec.model_validate({**tree, "layout": {"pp": 2, "micro_batch": 1}})
    taken = api.explain(open_keys, cluster="h100", stack="nanotron").spec.layout
    assert taken.schedule == "1f1b" and PROGRAMS["nanotron"].broken(open_keys) is not None
    assert PROGRAMS["nanotron"].broken(open_keys.model_copy(update={"layout": taken})) is None


@pytest.mark.parametrize("name", ["megatron-core", "fsdp-compiled", "nanotron", "maxtext"])
def test_neighbours_are_layouts_that_the_program_runs(name: str) -> None:
    program = PROGRAMS[name]
    base = run({"preset": "llama3-8b"}, 4096, 64)
    layout = Layout(dp=4, zero=program_zero(program), pp=4, schedule=program.schedules[0], micro_batch=1)
    spec = base.model_copy(update={"layout": program.dealt(base.model, layout)})
    assert program.broken(spec) is None
    found = Explanation(spec, CostModel(cluster("h100", 16), STACKS[name])).candidates
    assert {each.spec.layout.pp for each in found.values()} >= {2, 4}
    assert not any(program.broken(each.spec) for each in found.values())


def program_zero(program: ProgramLayouts) -> int:
    """The largest stage of ZeRO that a program has a name for."""
    return max(program.sharding)


@pytest.mark.parametrize(
    ("stack", "keys", "label", "setting"),
    [
        ("fsdp-compiled", {"zero": 2}, "reshard=never", "fsdp_reshard_after_forward = never (ZeRO-2)"),
        ("fsdp-compiled", {"zero": 3}, "reshard=always", "fsdp_reshard_after_forward = always (ZeRO-3)"),
        ("llm-foundry", {"zero": 2}, "SHARD_GRAD_OP", "= SHARD_GRAD_OP"),
        ("llm-foundry", {"zero": 3, "replicate": 2}, "FULL_SHARD", "= HYBRID_SHARD"),
        ("megatron-fsdp", {"zero": 2}, "optim_grads", "--data-parallel-sharding-strategy optim_grads"),
        ("megatron-core", {"zero": 1}, "zero1", "--use-distributed-optimizer"),
        ("maxtext", {"zero": 3}, "fsdp", "ici_fsdp_parallelism = 8 (ZeRO-3)"),
    ],
)
def test_sharding_is_named_as_the_program_names_it(
    stack: str, keys: dict[str, int], label: str, setting: str, capsys: pytest.CaptureFixture[str]
) -> None:
    size = ["--cluster", "h100", "--gpus", "8", "--batch-tokens", "64k", "--seq-len", "1024", "--top", "1"]
    given = [word for key, value in keys.items() for word in (f"--layout.{key}", str(value))]
    given += ["--layout.tp", "1", "--layout.cp", "1", "--layout.pp", "1", "--no-why"]
    assert main(["plan", "gpt2", *size, *given, "--stack", stack]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert f" {label} mb" in printed
    assert (
        f"Sharding: {setting}" in printed or f"Sharding: fsdp_config.sharding_strategy {setting}" in printed
    )


def test_the_page_lists_the_schedules_and_stages_of_zero_of_every_program() -> None:
    page = (Path(__file__).parents[2] / "docs" / "planner.md").read_text(encoding="utf-8")
    rows = [line.split("|")[1:] for line in page.partition("| `--stack` |")[2].split("\n\n")[0].splitlines()]
    told = {name: row for row in rows for name in re.findall(r"`([\w-]+)`", row[0])}
    assert set(told) == set(OTHERS)
    for name, row in told.items():
        assert set(re.findall(r"[\w-]+", row[1])) & set(SCHEDULES) == set(PROGRAMS[name].schedules)
        zero = {int(stage) for stage in re.findall(r"\b\d\b", row[3].replace("0 to 3", "0, 1, 2, 3"))}
        assert zero == set(PROGRAMS[name].sharding or (0, 1))


def test_programs_are_planned_on_devices_that_they_run_on(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "llama3-8b", "--batch-tokens", "1M", "--top", "1", "--no-why", "--gpus", "16"]
    assert main([*words, "--cluster", "tpu-v5p", "--stack", "maxtext"]) == 0
    assert "this program runs on" not in capsys.readouterr().out  # which is not the one that is planned for
    for name in ("torchtitan", "megatron", "nanotron"):
        with pytest.raises(UserError) as no:
            main([*words, "--cluster", "tpu-v5p", "--stack", name])
        said = "does not run on tpu-v5p, but on CUDA, ROCm and CPUs; give --stack maxtext"
        assert said in str(no.value)


def test_what_is_left_open_is_the_programs_own() -> None:
    """Tokens are not shared by tensor ranks of DeepSpeed's fork, unless a layout asks for it."""
    spec = run(DENSE)
    for given in ({"tp": 2}, {"tp": 2, "sequence_parallel": True}):
        open_run = spec.model_copy(update={"layout": Layout.model_validate(given)})
        shared = PROGRAMS["megatron-deepspeed"].opened(open_run).layout.sequence_parallel
        assert shared is ("sequence_parallel" in given)
    assert (
        PROGRAMS["megatron-core"]
        .opened(spec.model_copy(update={"layout": Layout(tp=2)}))
        .layout.sequence_parallel
    )


@pytest.mark.parametrize(("axis", "ranks"), [("pp", 3), ("cp", 5)])
def test_ranks_that_divide_no_number_of_devices_are_said_so(axis: str, ranks: int) -> None:
    with pytest.raises(
        UserError, match=rf"layout\.{axis}: {ranks} does not divide the number of devices = 8; try"
    ):
        api.plan("llama3-8b", "h100", gpus=8, batch_tokens="1M", overrides=[(f"layout.{axis}", str(ranks))])
