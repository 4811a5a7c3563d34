"""Sweeps of `meshwright verify`: bugs that they find, ranks that end, commands that repeat a failure."""

from __future__ import annotations

import json
import pickle
import shlex
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from broken_trainers import in_own_precision, verify_broken
from meshwright import api
from meshwright.api import sweeps as subject
from meshwright.cli.parser import parse
from meshwright.cli.runs import spec_of as spec_of_call
from meshwright.cli.verify import verify as verify_verb
from meshwright.comm.control import Control
from meshwright.comm.mesh import Mesh
from meshwright.rank.failure import RanksFailed
from meshwright.spec import RunSpec, UserError
from meshwright.spec.errors import CollectiveError
from meshwright.train.step import Trainer
from meshwright.verify import sweep as swept
from meshwright.verify import verify as verification
from meshwright.verify.sweep import check_layouts, row_of
from meshwright.verify.sweep_layouts import SweepLayouts, describe
from ranks import Ranks
from small import measure_gradients, scale_gradients, spec_of

BASE = {
    "model.vocab_size": 61,
    "data.seq_len": 16,
    "train.batch_tokens": 8 * 16,
    "train.warmup_steps": 1,
}


FEW = BASE | {
    "model.layers": 1,
    "model.hidden": 32,
    "model.ffn": 40,
    "model.heads": 2,
    "model.kv_heads": 2,
    "train.batch_tokens": 4 * 16,
}


def verify_with_bug(mesh: Mesh, run: RunSpec) -> dict[str, Any] | None:
    """`verify` of a trainer whose gradients are twice too large where tensor and context ranks meet."""

    def harm(trainer: verification.Trainer) -> None:
        if trainer.mesh.tensor.size > 1 and trainer.mesh.context.size > 1:
            scale_gradients(trainer.states, 2.0)

    return verify_broken(mesh, run, harm)


def on_pool(
    ranks: Ranks,
    verify: Callable[..., Any],
    before: Callable[[int], None] = lambda _: None,
    precision: str = "exact",
) -> Any:
    """A launcher that takes the pool's ranks, and no new ones; `before` is called with a layout's place."""

    def run_on_ranks(call: Callable[[], Any], *_: Any, **__: Any) -> list[dict[str, Any]]:
        runs, first, _, given, _, found, _ = pickle.loads(pickle.dumps(call)).args
        assert given == precision
        rows: list[Any] = []
        for place, run in enumerate(runs[first:], first):
            found.write_text(json.dumps(rows))
            before(place)
            rows.append(row_of(run, ranks.run(run.layout, verify, run)[0], 0.0))
        return rows

    return run_on_ranks


def test_a_bug_of_two_axes_is_found_and_its_command_finds_it_again(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subject, "run_on_ranks", on_pool(ranks, verify_with_bug))
    flags = {key: str(value) for key, value in FEW.items()}
    flags |= {"train.batch_tokens": "32", "train.compile": "true"}
    found = api.sweep(spec_of(flags), 4, steps=1, given=((), list(flags.items())))
    assert found["equal"] is False
    wrong = {row["layout"] for row in found["layouts"] if row["verdict"] == "UNEQUAL"}
    assert wrong == {row["layout"] for row in found["layouts"] if "cp=2 x tp=2" in row["layout"]} != set()
    failure = found["first_failure"]
    assert "each is 2 times what it should be (tp or cp or " in failure["sentence"]
    again = repeated(failure["command"])
    assert again.layout.tp == again.layout.cp == 2
    assert describe(again) == failure["layout"]
    assert not ranks.run(again.layout, verify_with_bug, again)[0]["equal"]
    assert ranks.run(again.layout, verify_as_it_is, again)[0]["equal"]


def verify_as_it_is(mesh: Mesh, run: RunSpec) -> dict[str, Any] | None:
    """Compare one step."""
    return verification.verify(run, mesh, 1)


def repeated(command: str) -> RunSpec:
    """The run of a command that repeats a failure."""
    program, verb, *words = shlex.split(command)
    assert (program, verb) == ("meshwright", "verify")
    return spec_of_call(parse(verify_verb, words))


def two_tensor_ranks_differ(trainer: Trainer) -> None:
    """The gradients of the second are twice what they should be."""
    finish, states = trainer.states.finish_step, trainer.states

    def scaled() -> None:
        finish()
        scale_gradients(states, 1.0 + trainer.mesh.tensor.rank)
        measure_gradients(states)

    states.finish_step = scaled  # type: ignore[method-assign]


def own_with_bug(mesh: Mesh, run: RunSpec) -> dict[str, Any] | None:
    """The comparison in the run's own precision, of a trainer whose tensor ranks differ."""
    return in_own_precision(mesh, run, 1, two_tensor_ranks_differ)


def own_as_it_is(mesh: Mesh, run: RunSpec) -> dict[str, Any] | None:
    """One step in the run's own precision."""
    return in_own_precision(mesh, run, 1)


@pytest.mark.full  # the test above has a sweep in float64, and `test_precision_run.py` layouts in bf16
def test_layouts_in_bf16_are_equal_but_for_those_with_a_bug(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subject, "run_on_ranks", on_pool(ranks, own_with_bug, precision="run"))
    flags = {key: str(value) for key, value in FEW.items()} | {"precision.compute": "bf16"}
    found = api.sweep(spec_of(flags), 2, steps=1, precision="run", given=((), list(flags.items())))
    assert found["equal"] is False
    verdicts = {row["layout"]: row["verdict"] for row in found["layouts"]}
    assert {layout for layout, verdict in verdicts.items() if verdict == "UNEQUAL"} == {
        layout for layout in verdicts if "tp=2" in layout
    }
    assert set(verdicts.values()) == {"equal", "UNEQUAL"}
    failure = found["first_failure"]
    assert "which rounding does not explain" in failure["sentence"] or "by a factor" in failure["sentence"]
    assert shlex.split(failure["command"])[2:].count("--precision") == 1
    assert failure["command"].endswith("--steps 1 --precision run")
    again = repeated(failure["command"])
    assert describe(again) == failure["layout"]
    assert not ranks.run(again.layout, own_with_bug, again)[0]["equal"]
    assert ranks.run(again.layout, own_as_it_is, again)[0]["equal"]


SELECTIVE = """
[recompute]
save = ["attention"]
[layout]
pp = 2
schedule = "interleaved"
virtual = 2
stages = [0, 1, 1, 0]
micro_batch = 1
"""
PATTERNS = """
[train.lr_factors]
"blocks.11.*" = 0.5
"head.*" = 2
"""  # a narrowed copy has fewer blocks


@pytest.mark.parametrize(
    ("text", "flags"),
    [
        ("", {"model.preset": "moe-tiny"}),  # narrowed
        ("", BASE | {"recompute.save": "attention"}),
        (SELECTIVE, BASE),
        (SELECTIVE, BASE | {"recompute.policy": "full"}),
        (SELECTIVE, BASE | {"recompute.save": "matmul", "layout.virtual": 2}),
        (PATTERNS, {"model.preset": "moe-tiny", "model.layers": 12, "train.lr_factors.blocks.10.*": 0.5}),
    ],
)
def test_each_command_of_a_sweep_is_that_of_its_layout(
    text: str, flags: dict[str, Any], tmp_path: Path
) -> None:
    file = tmp_path / "run.toml"
    file.write_text(text)
    if "model.preset" not in flags:
        flags = {"model.layers": 2, "model.hidden": 32, "model.ffn": 40, "model.heads": 4, **flags}
    call = parse(verify_verb, [str(file), *words_of(flags)])
    spec = spec_of_call(call)
    layouts = SweepLayouts(spec, 4)
    policies = set()
    for place in range(layouts.needed):
        small = layouts.run(place)
        policies.add(small.recompute.policy)
        command = subject.command_of(spec, small, (call.words, call.overrides), 2, "exact")
        again, wanted = repeated(command).to_json(), small.to_json()
        for tree in (again, wanted):
            del tree["model"]["preset"]
        assert again == wanted
    assert policies == {"none", "selective", "full"}


def test_a_layout_that_ends_its_ranks_does_not_end_the_sweep(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(place: int) -> None:
        if place in (0, 2):
            raise CollectiveError("in step 1 rank 1 calls")

    monkeypatch.setattr(subject, "run_on_ranks", on_pool(ranks, as_equal, fail))
    found = api.sweep(spec_of(FEW), 2)
    verdicts = [row["verdict"] for row in found["layouts"]]
    assert verdicts[:4] == ["failed", "equal", "failed", "equal"]
    assert set(verdicts[3:]) == {"equal"}
    assert found["equal"] is None
    assert found["first_failure"]["sentence"] == "in step 1 rank 1 calls"
    assert found["checked"] == found["of"] == len(verdicts)


def as_equal(mesh: Mesh, run: RunSpec) -> dict[str, Any]:
    """A verdict without a comparison."""
    return {"equal": True, "worst_relative": 0.0, "first": None}


def test_a_sweep_gives_up_after_some_failures(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(place: int) -> None:
        raise RanksFailed("rank 1 was ended by SIGSEGV", 139)

    monkeypatch.setattr(subject, "run_on_ranks", on_pool(ranks, as_equal, fail))
    found = api.sweep(spec_of(FEW), 2)
    assert found["checked"] == subject.MOST_FAILURES < found["of"]


def test_a_budget_ends_a_sweep() -> None:
    """Each layout takes a second of a clock that nothing else moves."""
    layouts = SweepLayouts(spec_of(FEW), 2)
    runs, clock, rows = [layouts.run(place) for place in range(6)], [0.0], []

    def as_second(*_: object) -> dict[str, Any]:
        clock[0] += 1.0
        return {"equal": True, "worst_relative": 0.0, "first": None}

    with patch.object(swept, "verify", as_second), patch.object(swept.time, "time", lambda: clock[0]):
        check_layouts(runs, 1, "exact", 2.5, Control(), lambda run: nullcontext(None), rows.append)  # type: ignore[arg-type, return-value]
    assert [row is None for row in rows] == [True, False] * 3


@pytest.mark.full
@pytest.mark.parametrize("precision", ["exact", "run"])
def test_the_command_checks_the_layouts_of_two_ranks(precision: str, tmp_path: Path) -> None:
    """One head and 18 tokens leave data and pipeline ranks; compiled blocks two schedules of one stage."""
    flags = FEW | {"model.heads": 1, "model.kv_heads": 1, "data.seq_len": 18, "train.batch_tokens": 2 * 18}
    compiled = {"train.compile": "true"} if precision == "exact" else {}
    words = words_of(flags | compiled | {"precision.compute": "bf16"})
    words += ["--sweep", "2", "--precision", precision, "--out", str(tmp_path)]
    command = [sys.executable, "-m", "meshwright", "verify", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "verify.json").read_text())
    assert found["equal"] is True
    assert found["checked"] == found["of"] == len(found["layouts"]) > 5
    assert found["pairs_covered"] == found["pairs"]
    lines = done.stdout.splitlines()
    assert sum(" equal " in line for line in lines) == found["checked"]
    assert any(line.startswith(f"equal: {found['of']} of {found['of']} layouts") for line in lines)


def words_of(flags: dict[str, Any]) -> list[str]:
    """Flags as words of a command."""
    return [word for key, value in flags.items() for word in (f"--{key}", str(value))]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--budget", "60s"], "--budget: is the time of a sweep"),
        (["--sweep", "2", "--through", "checkpoint"], "--through: does not go with --sweep"),
        (["--sweep", "2", "--nproc", "2"], "--nproc: does not go with --sweep"),
        (["--sweep", "2", "--locate"], "--locate: is of one layout"),
        (["--layout.dp", "2", "--save", "saved"], "--save: does not start the 2 ranks of the layout"),
        (["--save", "saved", "--through", "checkpoint"], "--save: is one part of --through alone"),
        (["--save", "saved", "--load", "saved"], "--save: is one part of --through alone"),
        (
            ["--model.preset", "moe-tiny", "--model.family", "llama", "--through", "export"],
            "model.family: HF's llama has no model.moe",
        ),
    ],
)
def test_flags_that_do_not_go_together_are_told(words: list[str], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        verify_verb.function(parse(verify_verb, words))


@pytest.mark.parametrize(("equal", "code"), [(True, 0), (False, 1), (None, 70)])
def test_exit_codes(equal: bool | None, code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """An unequal layout is 1, one that could not be compared 70."""
    row = {"layout": "dp=2", "verdict": "failed", "worst": None, "seconds": None, "sentence": "rank 1 calls"}
    counts = {"checked": 1, "of": 2, "pairs_covered": 3, "pairs": 4, "seconds": 1.0, "narrowed": None}
    result = {"equal": equal, "layouts": [row], "first_failure": row | {"command": "meshwright"}} | counts
    monkeypatch.setattr(api, "sweep", lambda *_, **__: result)
    assert verify_verb.function(parse(verify_verb, ["--sweep", "2"])) == code
