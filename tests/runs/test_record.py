"""The run's record survives crashes, full disks and resumes with whole lines and no step twice."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from meshwright.checkpoint import CheckpointError, Lease
from meshwright.runs.record import RunRecord, append_event, read_metrics, read_run, write_atomically
from meshwright.spec import UserError, load


def record_steps(out: Path, first: int, last: int, total: int = 100) -> None:
    """Record steps first+1..last of a run and break off, as a killed trainer does."""
    record = RunRecord(out)
    record.on_start({"spec": load().to_json(), "step": first, "last_step": total})
    for step in range(first + 1, last + 1):
        record.on_step({"step": step, "loss": 10.0 / step})
    record.close()


def steps_of(out: Path) -> list[int]:
    return [row["step"] for row in read_metrics(out)]


def run_python(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), *arguments], capture_output=True, text=True, timeout=120
    )


def test_rows_come_back_as_they_were_told(tmp_path: Path) -> None:
    record = RunRecord(tmp_path)
    record.on_start({"spec": {}, "step": 0, "last_step": 2})
    rows: list[dict[str, Any]] = [{"step": 1, "loss": 5.5, "lr": 1e-4}, {"step": 2, "loss": 0.1 + 0.2}]
    for row in rows:
        record.on_step(row)
    record.on_eval({"step": 2, "val_loss": 4.0, "val_bits_per_byte": 1.5})
    record.on_event("checkpoint", {"step": 2, "path": "checkpoints/2"})
    record.on_end({"final_loss": 0.3, "steps": 2})
    run = read_run(tmp_path)
    assert run.metrics == [*rows, {"step": 2, "val_loss": 4.0, "val_bits_per_byte": 1.5}]
    assert [(event["kind"], event["path"]) for event in run.events] == [("checkpoint", "checkpoints/2")]
    assert run.result == {"final_loss": 0.3, "steps": 2}


def test_a_line_is_on_disk_before_the_next_step(tmp_path: Path) -> None:
    record = RunRecord(tmp_path)
    record.on_start({"step": 0})
    for step in (1, 2, 3):
        record.on_step({"step": step})
        assert steps_of(tmp_path)[-1] == step
    record.close()


def test_numbers_that_are_not_finite_stay_json(tmp_path: Path) -> None:
    record = RunRecord(tmp_path)
    record.on_start({"step": 0})
    record.on_step({"step": 1, "loss": float("nan"), "grad_norm": float("inf"), "list": [float("-inf"), 1.0]})
    record.on_end({"final_loss": float("nan")})

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is not JSON")

    for name in ("metrics.jsonl", "result.json"):
        json.loads((tmp_path / name).read_text(), parse_constant=refuse)
    assert read_metrics(tmp_path) == [{"step": 1, "loss": None, "grad_norm": None, "list": [None, 1.0]}]


def test_a_rollback_drops_the_steps_that_were_given_up(tmp_path: Path) -> None:
    record = RunRecord(tmp_path)
    record.on_start({"step": 0})
    for step in (1, 2, 3):
        record.on_step({"step": step})
    record.on_event("rollback", {"step": 1, "from": 3})
    assert steps_of(tmp_path) == [1]
    record.on_step({"step": 2})
    record.close()
    assert steps_of(tmp_path) == [1, 2]
    assert [(event["kind"], event["from"]) for event in read_run(tmp_path).events] == [("rollback", 3)]


def test_a_resume_drops_the_steps_that_were_lost(tmp_path: Path) -> None:
    record_steps(tmp_path, 0, 9)
    kept = (tmp_path / "metrics.jsonl").read_bytes().splitlines(keepends=True)[:5]
    record_steps(tmp_path, 5, 12)
    assert steps_of(tmp_path) == list(range(1, 13))
    assert (tmp_path / "metrics.jsonl").read_bytes().startswith(b"".join(kept))
    resumed = [event for event in read_run(tmp_path).events if event["kind"] == "resumed"]
    assert [(event["step"], event["lost_rows"]) for event in resumed] == [(5, 4)]


def without_rows(out: Path, steps: set[int]) -> None:
    """Take the rows of some steps out of a record, as a damaged disk or a hand does."""
    lines = (out / "metrics.jsonl").read_text().splitlines(keepends=True)
    (out / "metrics.jsonl").write_text(
        "".join(line for line in lines if json.loads(line)["step"] not in steps)
    )


@pytest.mark.parametrize(
    ("lost", "words"),
    [
        ({4}, r"1 row of steps that the run has done are missing \(step 4\)"),
        ({2, 3, 4, 7}, r"4 rows .* \(steps 2 to 4, 7\); it goes on after step 8"),
        (set(range(1, 9)), r"8 rows .* \(steps 1 to 8\)"),
    ],
)
def test_rows_that_are_missing_before_the_checkpoint_are_told(
    tmp_path: Path, lost: set[int], words: str
) -> None:
    record_steps(tmp_path, 0, 9)
    without_rows(tmp_path, lost)
    with pytest.warns(UserWarning, match=words):
        record_steps(tmp_path, 8, 10)
    told = [row for row in read_run(tmp_path).events if row["kind"] == "rows_missing"]
    assert [(row["rows"], row["step"]) for row in told] == [(len(lost), 8)]
    record_steps(tmp_path, 10, 11)  # which tells nothing that is known
    without_rows(tmp_path, {11})
    with pytest.warns(UserWarning, match="rows? of steps"):
        record_steps(tmp_path, 11, 12)


@pytest.mark.parametrize(
    ("order", "count"),
    [
        ([1, 2, 3, 1, 2, 3], 3),  # such as of two copies of the file in one
        ([3, 2, 1], 2),
        ([1, 2, 2, 3], 1),
    ],
)
def test_a_resume_leaves_each_step_once_and_in_order(tmp_path: Path, order: list[int], count: int) -> None:
    record_steps(tmp_path, 0, 3)
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    validation = json.dumps({"step": 2, "val_loss": 1.0})
    (tmp_path / "metrics.jsonl").write_text("\n".join([*(lines[step - 1] for step in order), validation, ""]))
    with pytest.warns(
        UserWarning, match=rf"{count} rows? of earlier steps stood there again or out of order"
    ):
        record_steps(tmp_path, 3, 4)
    assert [(row["step"], "val_loss" in row) for row in read_metrics(tmp_path)] == [
        (1, False), (2, False), (2, True), (3, False), (4, False)
    ]  # fmt: skip
    assert [row["kind"] for row in read_run(tmp_path).events] == ["resumed", "warning"]
    record_steps(tmp_path, 4, 5)  # nothing is left to tell
    assert [row["kind"] for row in read_run(tmp_path).events] == ["resumed", "warning", "resumed"]


@pytest.mark.parametrize("starts", ["three", [3], {"step": 3}])
def test_starts_that_are_no_objects_are_a_sentence(tmp_path: Path, starts: object) -> None:
    record_steps(tmp_path, 0, 3)
    info = json.loads((tmp_path / "run.json").read_text())
    (tmp_path / "run.json").write_text(json.dumps({**info, "starts": starts}))
    with pytest.raises(UserError, match=r"run\.json: starts has something else than objects; the file"):
        record_steps(tmp_path, 3, 4)


def test_a_record_that_is_gone_is_told(tmp_path: Path) -> None:
    record_steps(tmp_path, 0, 9)
    (tmp_path / "metrics.jsonl").unlink()
    with pytest.warns(UserWarning, match=r"5 rows .* \(steps 1 to 5\)"):
        record_steps(tmp_path, 5, 6)


def test_rows_that_were_not_due_are_not_missing(tmp_path: Path) -> None:
    every = {"spec": load(None, [("train.log_every", "3")]).to_json(), "last_step": 7}
    record = RunRecord(tmp_path)
    record.on_start({**every, "step": 0})
    for step in (3, 6, 7):  # the last step has a row
        record.on_step({"step": step, "loss": 1.0})
    record.close()
    record_steps(tmp_path, 7, 9)  # with a row for each step from now on
    record_steps(tmp_path, 4, 5)  # back to an earlier one
    record_steps(tmp_path, 5, 6)
    record_steps(tmp_path / "moved", 40, 41)  # a checkpoint.dir of a run with another folder
    record_steps(tmp_path / "moved", 41, 42)
    assert not [row for row in read_run(tmp_path).events if row["kind"] == "rows_missing"]
    assert steps_of(tmp_path) == [3, 5, 6]


def test_a_restart_from_nothing_starts_the_curve_again(tmp_path: Path) -> None:
    record_steps(tmp_path, 0, 4)
    record_steps(tmp_path, 0, 2)
    assert steps_of(tmp_path) == [1, 2]


def test_a_resume_keeps_when_the_run_first_started(tmp_path: Path) -> None:
    record_steps(tmp_path, 0, 4)
    first = read_run(tmp_path).info
    record_steps(tmp_path, 4, 6)
    second = read_run(tmp_path).info
    assert second["started"] == first["started"]
    assert [start["step"] for start in second["starts"]] == [0, 4]


def test_the_spec_of_a_run_loads_from_its_folder(tmp_path: Path) -> None:
    spec = load(None, [("train.steps", "7"), ("layout.dp", "2")])
    record = RunRecord(tmp_path)
    record.on_start({"spec": spec.to_json(), "step": 0, "last_step": 7})
    record.close()
    assert load(tmp_path) == spec


def test_an_earlier_result_stays_until_the_run_goes_on(tmp_path: Path) -> None:
    record = RunRecord(tmp_path)
    record.on_start({"step": 0})
    record.on_step({"step": 1})
    record.on_end({"steps": 1})
    again = RunRecord(tmp_path)
    again.on_start({"step": 1})
    assert read_run(tmp_path).result == {"steps": 1}
    again.on_step({"step": 2})
    assert read_run(tmp_path).result is None
    again.close()


def test_a_file_cut_at_any_byte_reads_and_resumes(tmp_path: Path) -> None:
    record_steps(tmp_path, 0, 3)
    path = tmp_path / "metrics.jsonl"
    whole = path.read_bytes()
    for length in range(len(whole) + 1):
        path.write_bytes(whole[:length])
        complete = whole[:length].count(b"\n")
        assert steps_of(tmp_path) == list(range(1, complete + 1))
        record_steps(tmp_path, complete, complete + 1)
        assert steps_of(tmp_path) == list(range(1, complete + 2))


def test_a_killed_process_leaves_whole_lines(tmp_path: Path) -> None:
    code = """
        import os, sys, threading
        from pathlib import Path
        from meshwright.runs.record import RunRecord
        record = RunRecord(Path(sys.argv[1]))
        record.on_start({"step": 0})
        threading.Timer(0.2, os.kill, (os.getpid(), 9)).start()
        step = 0
        while True:
            step += 1
            record.on_step({"step": step, "loss": 1.0, "text": "x" * 20_000})
    """
    ended = run_python(code, str(tmp_path))
    assert ended.returncode == -9, ended.stderr
    steps = steps_of(tmp_path)
    assert steps == list(range(1, len(steps) + 1)) and steps


FULL_DISK = """
    import resource, sys
    from pathlib import Path
    from meshwright.runs.record import RunRecord, write_atomically
    from meshwright.spec import UserError
    out = Path(sys.argv[1])
    record = RunRecord(out)
    record.on_start({"step": 0})
    write_atomically(out / "old.txt", "old")
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, resource.RLIM_INFINITY))
    for name, act in (
        ("rows", lambda: [record.on_step({"step": s, "text": "x" * 300}) for s in range(1, 20)]),
        ("file", lambda: write_atomically(out / "old.txt", "new" * 2000)),
    ):
        try:
            act()
        except UserError as error:
            print(name, error)
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    record.on_step({"step": 20})
"""


def test_a_disk_that_fills_up_is_one_sentence_and_keeps_what_was_written(tmp_path: Path) -> None:
    """The limit on a file's size makes a write fail halfway, as a full disk does."""
    ended = run_python(FULL_DISK, str(tmp_path))
    assert ended.returncode == 0, ended.stderr
    said = ended.stdout.splitlines()
    assert [line.split()[0] for line in said] == ["rows", "file"]
    assert "metrics.jsonl: cannot be written" in said[0]
    # Six rows of 300 and some bytes fit into 2,000; the torn seventh is gone, so the next row is whole.
    *before, after = steps_of(tmp_path)
    assert before == list(range(1, len(before) + 1)) and before and after == 20
    assert (tmp_path / "old.txt").read_text() == "old"
    assert not list(tmp_path.glob("*.tmp")) and not list(tmp_path.glob(".*.tmp"))


def test_a_damaged_line_is_named(tmp_path: Path) -> None:
    record_steps(tmp_path, 0, 3)
    path = tmp_path / "metrics.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(lines[0] + b'{"step": 2, "lo\xff\n' + lines[2])
    with pytest.raises(UserError, match=r"metrics\.jsonl: line 2 "):
        read_metrics(tmp_path)


def test_a_folder_that_holds_no_run_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"holds no run\.json"):
        read_run(tmp_path)


def test_a_folder_that_cannot_be_made_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(UserError, match="cannot be written"):
        RunRecord(tmp_path / "file" / "out").on_start({"step": 0})


def test_atomic_writing_replaces_the_whole_file(tmp_path: Path) -> None:
    write_atomically(tmp_path / "a.txt", "a long first text")
    write_atomically(tmp_path / "a.txt", "short")
    assert (tmp_path / "a.txt").read_text() == "short"
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]


def test_a_row_whose_step_is_no_number_is_named(tmp_path: Path) -> None:
    record_steps(tmp_path, 0, 1)
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step": "foo"}\n')
    with pytest.raises(UserError, match=r"metrics.jsonl: a row has the step 'foo'"):
        record_steps(tmp_path, 1, 2)


def files_of(out: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in out.iterdir() if path.suffix in (".json", ".jsonl")}


ZOMBIE: dict[str, tuple[Any, ...]] = {
    "on_step": ({"step": 2, "loss": 66.0},),
    "on_eval": ({"step": 2, "val_loss": 66.0},),
    "on_event": ("checkpoint", {"step": 66}),
    "on_end": ({"steps": 66},),
    "on_start": ({"step": 0},),
}


@pytest.mark.filterwarnings("ignore:.*waiting 0.2 s")
@pytest.mark.parametrize("call", ZOMBIE)
def test_a_process_that_was_stopped_leaves_the_record_of_its_heir_alone(
    tmp_path: Path, call: str, capfd: pytest.CaptureFixture[str]
) -> None:
    zombie = os.fork()
    if zombie == 0:
        code = 9
        try:
            lease = Lease(tmp_path, "zombie", stale_s=0.2)
            lease.acquire()
            record = RunRecord(tmp_path, lease)
            record.on_start({"step": 0})
            record.on_step({"step": 1, "loss": 5.0})
            os.kill(os.getpid(), signal.SIGSTOP)
            try:
                getattr(record, call)(*ZOMBIE[call])
            except CheckpointError as error:
                print(error, flush=True)
                code = 5
        finally:
            os._exit(code)
    os.waitpid(zombie, os.WUNTRACED)
    path = tmp_path / "lease.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "place": "elsewhere"}))
    with Lease(tmp_path, "heir", stale_s=0.2) as lease:
        heir = RunRecord(tmp_path, lease)
        heir.on_start({"step": 1})
        heir.on_step({"step": 2, "loss": 4.0})
        heir.on_end({"steps": 2})
        finished = files_of(tmp_path)
        os.kill(zombie, signal.SIGCONT)
        assert os.waitstatus_to_exitcode(os.waitpid(zombie, 0)[1]) == 5
        assert "lost the lease" in (said := capfd.readouterr().out) and "heir" in said
        assert files_of(tmp_path) == finished


def test_an_event_from_outside_follows_a_torn_line_that_a_killed_rank_left(tmp_path: Path) -> None:
    record_steps(tmp_path, 0, 2)
    with open(tmp_path / "events.jsonl", "a") as file:
        file.write('{"step": 2, "kind": "checkp')
    append_event(tmp_path, "failure", {"step": 2}, alone=True)
    append_event(tmp_path, "slow", {"step": 3}, alone=False)
    record_steps(tmp_path, 2, 4)
    assert [event["kind"] for event in read_run(tmp_path).events] == ["failure", "slow", "resumed"]
