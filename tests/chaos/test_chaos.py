"""Runs under faults end as those without, and what does not hold is told."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from meshwright import api
from meshwright.api import chaos_runs
from meshwright.chaos.chaos import Chaos
from meshwright.chaos.faults import DEFAULT_KINDS, Fault, FaultPlan
from meshwright.chaos.verdict import ORACLES, report
from meshwright.cli.chaos import chaos as chaos_verb
from meshwright.cli.main import main
from meshwright.report.chaos_page import write_chaos_page
from meshwright.spec import UserError
from meshwright.spec.errors import REQUEUE, Stopped
from small import spec_of

RUN = """
[model]
layers = 1
hidden = 32
ffn = 40
heads = 4
kv_heads = 2
vocab_size = 64
[data]
corpus = "synthetic"
seq_len = 32
[train]
steps = 40
batch_tokens = 128
[layout]
dp = 2
[checkpoint]
every = 5
"""
FAULTS = (
    Fault("slow", 1, "forward", step=3, seconds=0.01, steps=3),
    Fault("clock-jump", 0, "optimiser", step=7, seconds=-3600.0),
    Fault("kill", 1, "backward", step=9),
    Fault("flip-checkpoint", 0, "reduce", step=17, generation=1, number=4711),
    Fault("stop", 0, "data", step=29, generation=2),
    Fault("kill-anytime", 1, "forward", step=32, generation=3, seconds=0.01),
)


@pytest.fixture
def run_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    file = tmp_path / "run.toml"
    file.write_text(RUN)
    return file


def write_log(path: Path, faults: tuple[Fault, ...]) -> Path:
    path.write_text("".join(json.dumps({"event": "fault", **fault.to_json()}) + "\n" for fault in faults))
    return path


def chaos(*words: object) -> tuple[int, dict[str, Any]]:
    """The exit code of the verb, and its report."""
    words = ("chaos", *words)
    code = main([str(word) for word in words])
    out = Path(str(words[words.index("--out") + 1]))
    return code, json.loads((out / "chaos.json").read_text())


def places(rows: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    return [tuple(row[key] for key in ("kind", "rank", "generation", "step", "phase")) for row in rows]


def broken(report: dict[str, Any]) -> list[str]:
    return [name for name, holds in report["oracles"].items() if not holds]


@pytest.mark.full
def test_a_run_under_faults_ends_as_the_one_without_and_each_fault_hits_where_the_log_says(
    run_file: Path, tmp_path: Path
) -> None:
    log = write_log(tmp_path / "given.jsonl", FAULTS)
    code, found = chaos(run_file, "--replay", log, "--out", tmp_path / "out")
    assert (code, broken(found), found["end"]) == (0, [], "")
    assert places(found["faults"]) == places([fault.to_json() for fault in FAULTS])
    rows = {row["kind"]: row for row in found["faults"]}
    assert all(row["back"] is not None for row in rows.values())
    for kind in ("kill", "flip-checkpoint", "stop", "kill-anytime"):
        assert 0 <= rows[kind]["noticed"] < rows[kind]["resumed"] <= rows[kind]["back"], kind
        assert f"rank {rows[kind]['rank']} " in rows[kind]["message"]
    assert rows["flip-checkpoint"]["target"] in ("step-00000010", "step-00000015")  # the save may be late
    assert rows["flip-checkpoint"]["lost"] >= 7
    assert found["restart_seconds"] > found["detection_seconds"] > 0
    assert 0 < found["effective"] < 1 and found["save_seconds"] > 0
    page = (tmp_path / "out" / "chaos.html").read_text()
    assert all(kind in page for kind in rows) and "NO<" not in page
    replayed = [json.loads(line) for line in (tmp_path / "out" / "chaos.jsonl").read_text().splitlines()]
    assert places([row for row in replayed if row["event"] == "fault"]) == places(found["faults"])


@pytest.mark.full
def test_a_save_that_a_disk_fails_is_told_and_the_run_goes_on(run_file: Path, tmp_path: Path) -> None:
    faults = (Fault("io-error", 1, "data", step=3), Fault("disk-full", 0, "forward", step=12))
    log = write_log(tmp_path / "given.jsonl", faults)
    code, found = chaos(run_file, "--train.steps", 20, "--replay", log, "--out", tmp_path / "out")
    assert (code, broken(found), found["end"]) == (0, [], "")
    assert [row["kind"] for row in found["faults"]] == ["io-error", "disk-full"]
    assert all(row["resumed"] is None and row["noticed"] is not None for row in found["faults"])


@pytest.mark.full
def test_a_scheduled_run_of_many_faults_and_its_replay(run_file: Path, tmp_path: Path) -> None:
    restarts = ("--recovery.max_restarts", 30)  # some faults leave no time for progress
    words = (run_file, "--train.steps", 400, *restarts, "--out", tmp_path / "out")
    kinds = [
        kind for kind in DEFAULT_KINDS if kind != "kill-anytime"
    ]  # a replay need not kill at the same step
    drawn = ("--kinds", ",".join(kinds), "--seed", 74)
    code, first = chaos(*words, "--faults", 20, "--mtbf", "500ms", *drawn)
    assert (code, broken(first)) == (0, [])
    assert first["injected"] == 20
    assert {row["kind"] for row in first["faults"]} == set(kinds)
    code, again = chaos(*words, "--replay", tmp_path / "out" / "chaos.jsonl")
    assert (code, broken(again)) == (0, [])
    assert places(again["faults"]) == places(first["faults"])


@pytest.mark.full  # `test_bad_batches.py` has each kind of batch, and `test_inject.py` their faults
def test_a_run_with_bad_batches_ends_as_its_twin_without_their_steps(run_file: Path, tmp_path: Path) -> None:
    """Also where the batch is computed again after a failure, from a checkpoint before it."""
    faults = (
        Fault("nan-batch", 1, "data", step=6, number=6),
        Fault("kill", 0, "backward", step=7),
        Fault("inf-batch", 0, "data", step=11, generation=1, number=5),
    )
    flags = ["--recovery.snapshot_every", "0", "--precision.compute", "fp8", "--model.ffn", "48"]
    flags += ["--train.steps", "15"]
    log = write_log(tmp_path / "log.jsonl", faults)
    code, report = chaos(run_file, "--replay", log, *flags, "--out", tmp_path / "out")
    assert (code, broken(report)) == (0, [])
    assert report["oracles"]["parameters"] is True
    results = [json.loads((tmp_path / "out" / name / "result.json").read_text()) for name in ("run", "twin")]
    assert results[0]["parameters_sha256"] != results[1]["parameters_sha256"]
    events = (tmp_path / "out" / "run" / "events.jsonl").read_text().splitlines()
    skipped = [event["step"] for line in events if (event := json.loads(line))["kind"] == "skipped_step"]
    assert skipped == [7, 7, 12]


# The verdict ------------------------------------------------------------------------------------------


def verdict_on(
    tmp_path: Path,
    faults: tuple[Fault, ...],
    tell: Callable[[Chaos], None] = lambda chaos: None,
    result: dict[str, str] | None = None,
    steps: tuple[int, ...] = (1, 2, 3),
    events: tuple[tuple[float, dict[str, Any]], ...] = (),
    left: tuple[str, ...] = (),
) -> dict[str, Any]:
    """The report on a run of three steps, in which each fault has hit at step 1, with what was told then.

    The first hits after a second, each other one a second later; events have their seconds.
    """
    run = tmp_path / "run"
    run.mkdir(exist_ok=True)
    (run / "run.json").write_text("{}")
    (run / "metrics.jsonl").write_text("".join(json.dumps({"step": s, "loss": 1.0}) + "\n" for s in steps))
    twin = {"wall_seconds": 1.0, "step_seconds": 0.1, "parameters_sha256": "p", "samples_sha256": "s"}
    digests = {"parameters_sha256": "p", "samples_sha256": "s"}
    with FaultPlan(faults) as plan:
        chaos = Chaos(plan, [], tmp_path / "chaos.jsonl", run, run / "checkpoints")
        for number in range(len(faults)):
            at = int((chaos.began + 1 + number) * 1e9)
            plan.hits.write(number, step=1, starts=1, acted=at, acted_step=1)
            if number + 1 < len(faults):
                plan.hits.write(number, back=at + 1)
        tell(chaos)
        (run / "events.jsonl").write_text(
            "".join(
                json.dumps(event | {"time": (chaos.began_at + timedelta(seconds=at)).isoformat()}) + "\n"
                for at, event in events
            )
        )
        spec = spec_of({}, train__steps=3)
        return report(spec, chaos, twin, result or digests, 2.0, left)


def told(kind: str, message: str, after: float = 1.5) -> Callable[[Chaos], None]:
    def tell(chaos: Chaos) -> None:
        chaos.tell(kind, {"message": message, "noticed": chaos.began + after, "furthest": 1})

    return tell


KILL = (Fault("kill", 1),)
KILLED = "rank 1 of 2 was ended by SIGKILL"


def test_a_fault_that_was_noticed_and_named_holds(tmp_path: Path) -> None:
    found = verdict_on(tmp_path, KILL, told("failure", KILLED))
    assert broken(found) == [] and found["holds"]
    assert found["faults"][0]["noticed"] == pytest.approx(0.5)
    assert found["kinds"][0] | {"noticed_median": 0.5} == {
        "kind": "kill", "n": 1, "noticed_median": 0.5, "noticed_worst": pytest.approx(0.5),
        "back_median": None, "back_worst": None, "lost": 0, "unnoticed": 0, "misnamed": 0,
    }  # fmt: skip


def test_steps_of_the_rank_that_was_furthest_count(tmp_path: Path) -> None:
    def tell(chaos: Chaos) -> None:
        chaos.tell("hang", {"message": "rank 1 is stopped", "noticed": chaos.began + 1.5, "furthest": 46})
        chaos.plan.hits.write(0, resumed_step=42, resumed=int((chaos.began + 3) * 1e9))

    assert verdict_on(tmp_path, (Fault("stop", 1),), tell)["faults"][0]["lost"] == 4


@pytest.mark.parametrize(
    ("faults", "changes", "fails"),
    [
        (KILL, {}, ["noticed"]),
        (KILL, {"tell": told("failure", "rank 0 of 2 was ended by SIGKILL")}, ["named"]),
        (KILL, {"tell": told("failure", "rank 1 of 2 failed with ValueError")}, ["named"]),
        (KILL, {"tell": told("hang", KILLED)}, ["named"]),
        ((Fault("stop", 1),), {"tell": told("hang", "rank 1 waited")}, ["named"]),
        ((Fault("slow", 1),), {"tell": told("hang", "rank 1 has been stopped")}, ["named"]),
        ((), {"tell": told("failure", KILLED)}, ["explained"]),
        ((), {"result": {"parameters_sha256": "x", "samples_sha256": "s"}}, ["parameters"]),
        ((), {"result": {"parameters_sha256": "p", "samples_sha256": "x"}}, ["samples"]),
        ((), {"steps": (1, 3)}, ["rows"]),
        ((), {"steps": (1, 2, 2, 3)}, ["rows"]),
        ((), {"left": ("process 1",)}, ["clean"]),
        ((Fault("io-error", 1),), {}, ["noticed"]),
    ],
)
def test_what_does_not_hold_is_found(
    tmp_path: Path, faults: tuple[Fault, ...], changes: dict[str, Any], fails: list[str]
) -> None:
    found = verdict_on(tmp_path, faults, **changes)
    assert broken(found) == fails and not found["holds"]
    about = {"nproc": 2, "mtbf_seconds": 1.0, "seed": 1, "end": ""}
    write_chaos_page(tmp_path / "chaos.html", found | about, ORACLES)
    assert "<td>NO</td>" in (tmp_path / "chaos.html").read_text()


FAILED_SAVE = {"kind": "warning", "message": "could not write: Input/output error"}


@pytest.mark.parametrize(
    ("after", "at", "fails"),
    [
        ((Fault("slow", 1),), (1.5,), []),
        ((Fault("slow", 1),), (2.5,), []),  # in a replay the next fault may hit before it is told
        ((Fault("slow", 1),), (), ["noticed"]),
        ((Fault("slow", 1),), (0.5,), ["noticed"]),
        ((Fault("io-error", 0),), (2.5,), ["noticed"]),  # told of the second
        ((Fault("io-error", 0),), (1.5, 2.5), []),
        (KILL, (), []),  # the ranks ended before they learnt of it
        ((*[Fault("slow", 1)] * 10, *KILL), (), ["noticed"]),
    ],
)
def test_a_failed_save_is_to_be_told_before_the_next_one_but_not_by_ranks_that_ended(
    tmp_path: Path, after: tuple[Fault, ...], at: tuple[float, ...], fails: list[str]
) -> None:
    ends = told("failure", KILLED, len(after) + 1.5) if after[-1] in KILL else lambda _: None
    found = verdict_on(
        tmp_path, (Fault("io-error", 1), *after), ends, events=tuple((when, FAILED_SAVE) for when in at)
    )
    assert broken(found) == fails


def test_a_slow_rank_may_be_told_and_a_loaded_machine_is_no_failure(tmp_path: Path) -> None:
    found = verdict_on(tmp_path, (Fault("slow", 1),), told("slow", "rank 1 is slow"))
    assert broken(found) == [] and found["faults"][0]["noticed"] is not None
    assert broken(verdict_on(tmp_path, (), told("slow", "rank 0 is slow"))) == []


def test_digests_are_not_asked_of_a_run_whose_numbers_a_fault_changed(tmp_path: Path) -> None:
    other = {"parameters_sha256": "x", "samples_sha256": "x"}
    found = verdict_on(
        tmp_path, (Fault("flip", 0),), result=other, tell=told("failure", "w differs between its copies")
    )
    assert found["oracles"]["parameters"] is None and found["holds"]


# Mistakes ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--kinds", "kill,stpo"], "--kinds: 'stpo' is not a kind of fault; did you mean 'stop'?"),
        (
            ["--kinds", "io-error", "--checkpoint.every", "0"],
            "--kinds: io-error needs more than 3 checkpoints on the way",
        ),
        (["--mtbf", "soon"], "--mtbf: 'soon' is not valid: a time above 0 is needed"),
        (["--mtbf", "0s"], "--mtbf: '0s' is not valid"),
        (["--kinds", ","], "--kinds: names none; give some of kill, "),
        (["--faults", "0"], "--faults: '0' is not valid"),
        (["--recovery.max_restarts", "0"], "recovery.max_restarts: with 0 the first fault ends the run"),
        (["--checkpoint.dir", "here"], "checkpoint.dir: the run and its twin without faults would share"),
        (["--replay", "gone.jsonl"], "--replay: gone.jsonl cannot be read"),
        (["--nproc", "3"], "layout"),
    ],
)
def test_mistakes_get_a_sentence_before_anything_runs(
    run_file: Path, tmp_path: Path, words: list[str], sentence: str
) -> None:
    with pytest.raises(UserError, match=re.escape(sentence)):
        main(["chaos", str(run_file), "--out", str(tmp_path / "out"), *words])
    assert not (tmp_path / "out").exists()


def test_a_stopped_command_tells_what_was_written_and_nothing_is_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = Stopped("stopped by SIGTERM after step 7, which is saved; go on with --resume auto", REQUEUE)
    stopped = {"train": True, "launch": True}

    def train(*_: Any, out: Path, **__: Any) -> dict[str, Any]:
        out.mkdir(parents=True)
        (out / "metrics.jsonl").write_text('{"step": 1, "loss": 1.0, "seconds": 0.1}\n')
        if stopped["train"]:
            raise saved
        return dict.fromkeys(("parameters_sha256", "samples_sha256", "final_loss"))

    def launch(*_: Any, **__: Any) -> None:
        raise saved

    monkeypatch.setattr(chaos_runs, "train", train)
    monkeypatch.setattr(chaos_runs, "train_on_ranks", launch)
    for during, kept in (("train", []), ("launch", ["chaos.jsonl", "twin", "twin.json"])):
        with pytest.raises(Stopped, match=r"^stopped by SIGTERM") as caught:
            api.chaos(spec_of({}, layout__dp=1), out=tmp_path)
        assert caught.value.code == 143 and "--resume" not in str(caught.value)
        assert (str(tmp_path / "chaos.jsonl") in str(caught.value)) == (during == "launch")
        assert sorted(path.name for path in tmp_path.iterdir()) == kept
        stopped[during] = False


def test_a_twin_that_was_cut_short_or_damaged_gets_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "twin").mkdir()
    with pytest.raises(UserError, match=r"^--out: .*twin is not the finished twin of a run under faults"):
        api.chaos(spec_of({}, layout__dp=1), out=tmp_path)
    for text in ("{", "[]", "{}"):
        (tmp_path / "twin.json").write_text(text)
        with pytest.raises(UserError, match=r"^--out: .*twin.json is damaged"):
            api.chaos(spec_of({}, layout__dp=1), out=tmp_path)


def test_a_mean_time_has_a_unit_or_is_in_seconds() -> None:
    read = {flag.name: flag for flag in chaos_verb.flags}["mtbf"]
    assert read.read is not None and "seconds" in read.summary
    for text, seconds in {"3": 3.0, "30s": 30.0, "5m": 300.0, "3h": 10800.0}.items():
        assert read.read(text) == seconds


def test_a_folder_that_holds_something_else_is_left_alone(run_file: Path, tmp_path: Path) -> None:
    (tmp_path / "out" / "run").mkdir(parents=True)
    with pytest.raises(UserError, match="is not a run under faults"):
        main(["chaos", str(run_file), "--out", str(tmp_path / "out")])
    assert (tmp_path / "out" / "run").is_dir()
