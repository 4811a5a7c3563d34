"""Islands as processes: killed at any moment, the others go on, and it comes back."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from itertools import pairwise
from pathlib import Path
from unittest.mock import patch

import pytest

from meshwright import api
from meshwright.api import island_runs
from meshwright.api.island_runs import _failure, _stopped, train_islands
from meshwright.islands.island_log import Entry, IslandLog
from meshwright.launch.island_supervisor import Island, IslandsSupervisor
from meshwright.rank.processes import process_state
from meshwright.spec import load
from meshwright.spec.errors import REQUEUE, StorageError, UserError
from ranks import Ranks
from small import spec_of
from training_runs import run_and_watch

STEPS = 60


def start(spec_file: Path, out: Path, *flags: str) -> subprocess.Popen[str]:
    argv = [sys.executable, "-m", "meshwright", "train", str(spec_file), "--out", str(out), *flags]
    return subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def written(corpus: Path, folder: Path, **flags: object) -> Path:
    base = {
        "model.vocab_size": 300, "data.corpus": corpus, "data.tokenizer": "byte", "data.seq_len": 16,
        "data.cache": folder / "tokens", "train.batch_tokens": 8 * 16, "train.steps": STEPS,
        "train.eval_tokens": 512, "layout.replicate": 2, "outer.every": 2, "outer.momentum": 0.0,
        "outer.lr": 0.5, "outer.quorum": 1,
    }  # fmt: skip
    spec = spec_of(base, **flags)
    file = folder / "run.json"
    file.write_text(json.dumps({"spec": spec.to_json()}))
    return file


def entries(out: Path) -> list[Entry]:
    return list(IslandLog(out / "islands").entries())


def process_of(out: Path, island: int) -> int | None:
    """The process that supervises an island."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        flags = [b"--outer.island", str(island).encode(), b"--out", str(out).encode()]
        if any(words[place : place + 4] == flags for place in range(len(words))):
            return int(folder.name)
    return None


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.full) for seed in range(1, 20))])
def test_an_island_killed_at_any_moment_costs_its_tokens_alone(
    corpus: Path, tmp_path: Path, seed: int
) -> None:
    draw, out = random.Random(seed), tmp_path / "run"
    running = start(written(corpus, tmp_path), out)
    killed, after = draw.randrange(2), draw.randrange(2, STEPS // 2)
    limit = time.monotonic() + 120
    while sum(entry.kind == "exchange" for entry in entries(out)) < after and time.monotonic() < limit:
        time.sleep(0.02)
    pid = process_of(out, killed)
    assert pid is not None
    time.sleep(draw.random() * 0.2)
    os.killpg(pid, signal.SIGKILL)
    printed, _ = running.communicate(timeout=180)
    assert running.returncode == 0, printed
    log = entries(out)
    lost = next(place for place, entry in enumerate(log) if entry.kind == "leave" and entry.island == killed)
    assert log[lost].reason == "lost"
    others = [
        entry for entry in log[lost:] if entry.kind == "exchange" and entry.contributions[0][0] != killed
    ]
    back = [entry for entry in log[lost:] if entry.kind == "join" and entry.island == killed]
    assert len(back) == 1
    steps = Counter(row[0] for entry in log for row in entry.contributions)
    assert steps[1 - killed] == STEPS // 2  # the other island did all of its own
    assert steps[killed] >= STEPS // 2
    waits = [b.at - a.at for a, b in pairwise(others)]
    assert not waits or max(waits) < 5
    events = [json.loads(line) for line in (out / "events.jsonl").read_text().splitlines()]
    assert [(each["island"], each["restarted"]) for each in events] == [(killed, True)]
    told = [
        json.loads(line) for line in (out / f"island.{1 - killed}" / "events.jsonl").read_text().splitlines()
    ]
    done = next(place for place, entry in enumerate(log) if entry.reason == "done" and entry.island != killed)
    assert lost > done or "island_lost" in {each["kind"] for each in told}
    result = json.loads((out / "result.json").read_text())
    assert {row["code"] for row in result["islands"]} == {0}
    assert {row["island"]: row["starts"] for row in result["islands"]} == {killed: 2, 1 - killed: 1}
    assert sum(result["lateness"].values()) > 0


def test_a_run_of_one_world_goes_on_as_free_islands(corpus: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    usual: dict[str, object] = {"outer__every": 0, "outer__quorum": "none", "outer__lr": 0.7}
    one = {"outer__momentum": 0.9, "layout__replicate": 1, "layout__dp": 1, "train__stop_at": 8}
    assert api.train(load(written(corpus, tmp_path, **usual, **one)), out=out, quiet=True)["steps"] == 8
    free = ["--outer.every", "2", "--outer.quorum", "1", "--outer.momentum", "0"]
    free += ["--layout.replicate", "2"]
    again = start(out, out, *free, "--resume", "auto", "--train.stop_at", "16")
    printed, _ = again.communicate(timeout=120)
    assert again.returncode == 0, printed
    for island in (0, 1):
        rows = [json.loads(line) for line in (out / f"island.{island}" / "metrics.jsonl").open()]
        assert next(row["step"] for row in rows if "loss" in row) == 9
    assert (out / "checkpoints").is_symlink() and (out / "checkpoints").resolve().is_dir()
    _one_that_is_refused_is_named(out)


def _one_that_is_refused_is_named(out: Path) -> None:
    """Go on with a run whose island 1 refuses its record: the other ends well, and the exit code tells."""
    (out / "island.1" / "metrics.jsonl").write_text("damaged\n")
    again = start(out, out, "--resume", "auto", "--train.stop_at", "24")
    printed, _ = again.communicate(timeout=120)
    words = " ".join(printed.split())
    assert again.returncode == 2, printed
    assert f"island 1: {out}/island.1/metrics.jsonl: line 1 is not a JSON object" in words
    assert "it is left out from now on" in words
    assert f"the model in {out} is of island 0 alone" in words
    rows = json.loads((out / "result.json").read_text())["islands"]
    assert {row["island"]: (row["code"], row["steps"]) for row in rows} == {0: (0, 24), 1: (2, None)}


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("islands/secret", r"--out: .*secret, .* cannot be read or made"),
        ("run.json", r"run\.json: is not JSON .* damaged"),
        ("no spec", r"run\.json: holds no spec of a run; the file is damaged"),
    ],
)
def test_a_damaged_file_of_free_islands_is_a_sentence_before_any_starts(
    tmp_path: Path, name: str, words: str
) -> None:
    free = {"layout.replicate": 2, "layout.dp": 1, "outer.every": 2, "outer.quorum": 2}
    spec = spec_of({"data.corpus": "synthetic", **free})
    (tmp_path / "islands").mkdir()
    (tmp_path / "run.json").write_text("{}" if name == "no spec" else json.dumps({"spec": spec.to_json()}))
    if name != "no spec":
        (tmp_path / name).write_text("{")
    never = patch.object(IslandsSupervisor, "run", side_effect=AssertionError)
    with never, pytest.raises(UserError, match=words):
        train_islands(spec, tmp_path, "auto", quiet=True)


def test_the_record_stays_where_all_islands_refuse_what_is_new(tmp_path: Path) -> None:
    free = {"layout.replicate": 2, "layout.dp": 1, "outer.every": 2, "outer.quorum": 2}
    spec = spec_of({"data.corpus": "synthetic", **free})
    record = json.dumps({"spec": spec.to_json()})
    (tmp_path / "run.json").write_text(record)

    def refusing(number: int, _argv: list[str], cores: list[int], log: Path) -> Island:
        return Island(number, ["nonsense"], cores, log)

    with (
        patch.object(island_runs, "Island", refusing),
        pytest.warns(UserWarning, match="it is left out"),
        pytest.raises(UserError, match=r"island 0: 'nonsense': unknown verb.*; no island came to its end"),
    ):
        train_islands(spec_of({"data.corpus": "synthetic", **free}, train__steps=3), tmp_path, "auto", True)
    assert (tmp_path / "run.json").read_text() == record


def test_a_stop_that_would_come_too_late_is_told_in_time(ranks: Ranks, corpus: Path, tmp_path: Path) -> None:
    keys: dict[str, object] = {"outer__every": 1000, "outer__quorum": "none", "recovery__grace_seconds": 0.1}
    spec = load(written(corpus, tmp_path, **keys, train__steps=6))
    _, events = ranks.run(spec.layout, run_and_watch, spec, tmp_path / "run")[0]
    (words,) = [fields["message"] for kind, fields in events if kind == "warning"]
    assert "recovery.grace_seconds: 0.1 is less than the " in words
    assert "between exchanges of islands (outer.every = 1000)" in words


@pytest.mark.full
def test_ctrl_c_ends_free_islands_as_any_run(corpus: Path, tmp_path: Path) -> None:
    out, file = tmp_path / "run", written(corpus, tmp_path, train__steps=4000)
    running = start(file, out)
    limit = time.monotonic() + 120
    while sum(entry.kind == "exchange" for entry in entries(out)) < 4 and time.monotonic() < limit:
        time.sleep(0.02)
    running.send_signal(signal.SIGINT)
    printed, _ = running.communicate(timeout=120)
    assert running.returncode == 130, printed
    assert "stopped by SIGINT, and each island is saved; go on with meshwright train" in printed


@pytest.mark.full  # below are the words and codes of a stop; `test_a_resume_equals...` has resumed islands
def test_islands_stop_and_go_on_together(corpus: Path, tmp_path: Path) -> None:
    out, file = tmp_path / "run", written(corpus, tmp_path, train__steps=400)
    running = start(file, out)
    limit = time.monotonic() + 120
    while sum(entry.kind == "exchange" for entry in entries(out)) < 6 and time.monotonic() < limit:
        time.sleep(0.02)
    running.send_signal(signal.SIGTERM)
    printed, _ = running.communicate(timeout=120)
    assert running.returncode == 75, printed
    before = sum(entry.kind == "exchange" for entry in entries(out))
    assert {entry.reason for entry in entries(out) if entry.kind == "leave"} == {"stopped"}
    assert list((out / "checkpoints").glob("step-*"))  # of the island that has followed most exchanges
    record = (out / "run.json").read_text()
    with pytest.raises(UserError, match=r"give layout.replicate = 2, or another --out"):
        train_islands(load(file, [("layout.replicate", "4")]), out, "auto", quiet=True)
    assert (out / "run.json").read_text() == record
    again = start(file, out, "--resume", "auto", "--train.steps", "400", "--train.stop_at", "80")
    printed, _ = again.communicate(timeout=180)
    assert again.returncode == 0, printed
    assert [row["steps"] for row in json.loads((out / "result.json").read_text())["islands"]] == [80, 80]
    log = entries(out)
    later = [entry for entry in log if entry.kind == "exchange"][before:]
    first = later[0].contributions[0]
    assert later and first[1] >= before - 2  # from the newest of the islands' checkpoints, not from the start
    assert all(process_of(out, island) is None for island in range(2))


@pytest.mark.full
def test_no_island_outlives_the_command(corpus: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    running = start(written(corpus, tmp_path, train__steps=4000), out)
    limit = time.monotonic() + 120
    while len(entries(out)) < 4 and time.monotonic() < limit:
        time.sleep(0.02)
    pids = [process_of(out, island) for island in range(2)]
    running.kill()
    running.wait()
    limit = time.monotonic() + 20
    while any(pid and process_state(pid) for pid in pids) and time.monotonic() < limit:
        time.sleep(0.1)
    assert not any(pid and process_state(pid) for pid in pids)


def supervised(
    folder: Path, *argvs: list[str], most: int = 2
) -> tuple[list[Island], list[dict[str, object]]]:
    """Islands that each run a command, after the end of all, and the events that were told."""
    islands = [Island(number, argv, [], folder / f"{number}.log") for number, argv in enumerate(argvs)]
    told: list[dict[str, object]] = []
    IslandsSupervisor(islands, most, lambda _: (0, 0), lambda _, fields: told.append(fields)).run(None)
    return islands, told


def test_the_last_island_that_runs_is_started_again_too(tmp_path: Path) -> None:
    (tmp_path / "1.log").mkdir()  # so its process cannot start
    with pytest.warns(UserWarning, match=r"island 1: its process could not be started .*; it is left out"):
        islands, told = supervised(tmp_path, ["--version"], ["--version"])
    assert [(island.code, island.starts, island.left_out) for island in islands] == [
        (0, 1, False),
        (1, 3, True),
    ]
    assert [each["restarted"] for each in told] == [True, True, False]


def test_the_end_of_all_islands_names_each(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="it is left out"):
        islands, _ = supervised(tmp_path, ["nonsense"], ["tokenise"])
    error = _failure(islands, "no island came to its end")
    assert isinstance(error, UserError)
    words = r"island 0: 'nonsense': unknown verb.*; island 1: 'tokenise': unknown verb.*; no island came"
    assert re.match(words, str(error))


def test_a_stop_names_the_islands_that_did_not_save(tmp_path: Path) -> None:
    islands = [Island(number, [], [], tmp_path / "log") for number in range(3)]
    (tmp_path / "log").write_text("meshwright: error: the disk is full\n")
    islands[0].code, islands[1].code, islands[2].code = REQUEUE, StorageError.code, 0
    stopped = _stopped(signal.SIGTERM, islands, Path("run"))
    assert str(stopped) == "stopped by SIGTERM, and not all islands are saved: island 1: the disk is full"
    assert stopped.code == 128 + signal.SIGTERM
    islands[1].code = REQUEUE
    assert _stopped(signal.SIGTERM, islands, Path("run")).code == REQUEUE
    interrupted = _stopped(signal.SIGINT, islands, Path("run"))
    go_on = "go on with meshwright train run --resume auto"
    assert str(interrupted) == f"stopped by SIGINT, and each island is saved; {go_on}"
    assert interrupted.code == 130
