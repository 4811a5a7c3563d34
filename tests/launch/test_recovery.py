"""Faults of ranks in real runs of two: each run goes on, and ends as if there had been none."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from meshwright.api import runs
from meshwright.comm.heartbeat import PHASES
from meshwright.launch import hang, slow, start
from meshwright.rank.failure import RanksFailed
from meshwright.runs.record import read_run
from meshwright.spec import UserError
from meshwright.spec.errors import CRASH_LOOP
from supervised import (
    STEPS,
    Fault,
    alive,
    check_as_if_unfaulted,
    environment,
    events,
    parent,
    spec_of,
    train,
)


def check_stopped(event: dict[str, Any], fault: Fault, out: Path, sent: float) -> None:
    """The event of a rank that SIGSTOP has stopped names it, has stacks, and is early."""
    rows = [row["seconds"] for row in read_run(out).metrics if "loss" in row]
    learnt = sorted(rows)[len(rows) // 2]
    assert event["kind"] == "hang" and event["ranks"] == [fault.rank]
    assert f"rank {fault.rank} has been stopped for" in event["message"] and "in phase " in event["message"]
    assert event["seconds"] <= 3 * max(learnt, start.POLL_S) + 2
    told = datetime.fromisoformat(event["time"]).timestamp()
    assert told - sent <= event["seconds"] + start.STACKS_S + 2
    stacks = (out / event["stacks"]).read_text()
    for rank in (0, 1):
        assert "most recent call first" in stacks.split(f"rank {rank}:")[1]


def test_ranks_that_are_killed_or_stopped_are_named_and_the_run_ends_as_if_nothing_was(
    corpus: Path, whole: dict[str, Any], tmp_path: Path
) -> None:
    faults = [
        Fault(0, "forward", 13, number=signal.SIGSTOP),
        Fault(1, "save", 27),
    ]
    result, thread = train(spec_of(corpus), tmp_path, faults)
    assert len(thread.sent) == len(faults)
    check_as_if_unfaulted(tmp_path, result, whole)
    assert not any(map(alive, thread.pids))
    stopped, killed = events(tmp_path)
    check_stopped(stopped, faults[0], tmp_path, thread.sent[0])
    assert killed["kind"] == "failure" and killed["generation"] == 1
    assert "rank 1 of 2 was ended by SIGKILL" in killed["message"]


@pytest.mark.parametrize(
    "outer",
    [
        {"outer__every": 4, "outer__fragments": 2, "outer__delay": 3},
        pytest.param({"outer__staleness": 3, "layout__zero": 1}, marks=pytest.mark.full),
    ],
)
def test_a_rank_that_dies_while_exchanges_are_under_way_costs_nothing(
    corpus: Path, tmp_path: Path, outer: dict[str, object]
) -> None:
    """Snapshots have other tensors in each step."""
    keys: dict[str, object] = {"layout__dp": 1, "layout__replicate": 2, "recovery__snapshot_every": 1}
    spec = spec_of(corpus, **keys, **outer)
    whole, _ = train(spec, tmp_path / "whole", [])
    result, thread = train(spec, tmp_path / "killed", [Fault(1, "forward", 6), Fault(0, "backward", 17)])
    assert len(thread.sent) == 2
    check_as_if_unfaulted(tmp_path / "killed", result, whole)


@pytest.mark.full
@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("phase", ["forward", "save", "evaluate"])
def test_a_stopped_rank_is_noticed_soon_in_any_phase(
    corpus: Path, whole: dict[str, Any], tmp_path: Path, number: int, phase: str
) -> None:
    fault = Fault(number, phase, 31 if phase == "evaluate" else 17, number=signal.SIGSTOP)
    result, thread = train(spec_of(corpus), tmp_path, [fault])
    check_as_if_unfaulted(tmp_path, result, whole)
    (event,) = events(tmp_path)
    check_stopped(event, fault, tmp_path, thread.sent[0])


@pytest.mark.full
@pytest.mark.parametrize("number", [0, 1])
def test_a_rank_that_is_stuck_is_named_with_its_stack(
    corpus: Path, whole: dict[str, Any], tmp_path: Path, number: int
) -> None:
    result, _ = train(spec_of(corpus), tmp_path, deed="sleep", rank=number, step=21)
    check_as_if_unfaulted(tmp_path, result, whole)
    (event,) = events(tmp_path)
    assert event["kind"] == "hang" and event["ranks"] == [number] and event["step"] == 20
    assert f"rank {number} has not moved for" in event["message"]
    assert hang.IDLE_S <= event["seconds"] <= hang.IDLE_S + 5
    stack = (tmp_path / event["stacks"]).read_text().split(f"rank {number}:")[1].split("rank 1:")[0]
    assert "planted_sleep" in stack


@pytest.mark.full
@pytest.mark.parametrize("seed", range(10))
def test_kills_at_any_moment(corpus: Path, whole: dict[str, Any], tmp_path: Path, seed: int) -> None:
    """Five in each run, of any rank or the zygote, from the start to the end."""
    draw = random.Random(seed)
    places = sorted((draw.randrange(STEPS + 1), draw.choice(PHASES)) for _ in range(5))
    places[0] = (0, draw.choice(["start", "data"]))
    if seed % 2:
        places[-1] = (STEPS, draw.choice(["save", "evaluate", "end"]))
    faults = [
        Fault(draw.randrange(2), phase, step, draw.random() / 20, zygote=draw.random() < 0.2)
        for step, phase in places
    ]
    result, thread = train(spec_of(corpus), tmp_path, faults)
    check_as_if_unfaulted(tmp_path, result, whole)
    assert not any(map(alive, thread.pids))
    assert len(thread.sent) >= 3


LAUNCHER = """
from pathlib import Path
from supervised import spec_of, train
train(spec_of(Path({corpus!r})), Path({out!r}), resume="auto")
"""


def processes(mark: str) -> list[int]:
    """Pids of living processes that were started with an environment which holds the mark."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if mark.encode() in (folder / "environ").read_bytes() and alive(int(folder.name)):
                found.append(int(folder.name))
    return found


@pytest.mark.full
@pytest.mark.parametrize("kills", [1, 20])
def test_a_run_whose_launcher_is_killed_leaves_nothing_and_resumes(
    corpus: Path, whole: dict[str, Any], tmp_path: Path, kills: int
) -> None:
    """At any moment; every third time after one of its ranks."""
    draw, out, temporary = random.Random(3), tmp_path / "run", tmp_path / "temporary"
    temporary.mkdir()
    program = LAUNCHER.format(corpus=str(corpus), out=str(out))
    given = {**os.environ, **environment(), "TMPDIR": str(temporary)}
    for number in range(kills):
        launcher = subprocess.Popen([sys.executable, "-c", program], env=given)
        moment = time.monotonic() + 8 * draw.random()
        while time.monotonic() < moment and launcher.poll() is None:
            time.sleep(0.01)
        ranks = [pid for pid in processes(str(temporary)) if parent(pid) != launcher.pid]
        if number % 3 == 2 and len(ranks) > 1:
            os.kill(ranks[-1], signal.SIGKILL)
        launcher.kill()
        assert launcher.wait(30) in (0, -signal.SIGKILL)
        gone = time.monotonic() + 20
        while left := processes(str(temporary)):
            assert time.monotonic() < gone, left
            time.sleep(0.05)
    subprocess.run([sys.executable, "-c", program], env=given, check=True, timeout=120)
    assert not processes(str(temporary)) and not list(temporary.glob("meshwright-*"))
    check_as_if_unfaulted(out, json.loads((out / "result.json").read_text()), whole)


@pytest.mark.full
def test_an_error_that_comes_again_is_a_crash_loop(corpus: Path, tmp_path: Path) -> None:
    with pytest.raises(RanksFailed) as caught:
        train(spec_of(corpus), tmp_path, deed="raise", rank=1, step=9, generations=list(range(100)))
    assert caught.value.code == CRASH_LOOP == 79
    assert str(caught.value) == (
        "rank 1 of 2 failed with ValueError: planted at step 9; the ranks were started again once and do not "
        "get beyond step 8"
    )
    assert "planted_error" in caught.value.details
    assert [event["step"] for event in events(tmp_path)] == [8, 8]


@pytest.mark.full
def test_an_error_before_the_first_step_ends_the_run_at_once(corpus: Path, tmp_path: Path) -> None:
    with pytest.raises(RanksFailed, match=r"planted at step 0$") as caught:
        train(spec_of(corpus), tmp_path, deed="raise", rank=0, step=0, generations=list(range(100)))
    assert caught.value.code == 1


@pytest.mark.full
def test_a_mistake_of_the_users_is_not_repeated(corpus: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^planted: step 9 is a mistake$"):
        train(spec_of(corpus), tmp_path, deed="mistake", rank=1, step=9)
    assert [(event["kind"], event["step"]) for event in events(tmp_path)] == [("failure", 8)]


@pytest.mark.full
def test_without_restarts_a_failure_ends_the_run_and_is_recorded(corpus: Path, tmp_path: Path) -> None:
    with pytest.raises(RanksFailed, match="rank 1 of 2 was ended by SIGKILL") as caught:
        train(spec_of(corpus, recovery__max_restarts=0), tmp_path, deed="kill", rank=1, step=10)
    assert caught.value.code == 137
    assert [(event["kind"], event["step"]) for event in events(tmp_path)] == [("failure", 9)]


@pytest.mark.full
@pytest.mark.parametrize("deed", ["slow", "nothing"])
def test_a_slow_rank_is_named_and_no_other(corpus: Path, tmp_path: Path, deed: str) -> None:
    """It sleeps for a third of each step from the tenth on; windows are of 20 steps."""
    spec = spec_of(corpus, train__steps=180, train__batch_tokens=16 * 128, data__seq_len=128)
    plan = {"deed": deed, "rank": 1, "step": 10} if deed == "slow" else {}
    with patch.object(slow, "WINDOW_S", 0.1):
        train(spec, tmp_path, **plan)
    found = events(tmp_path)
    assert [(event["kind"], event["rank"]) for event in found] == ([("slow", 1)] if deed == "slow" else [])


def test_an_event_that_cannot_be_recorded_is_a_warning(tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").write_text("damaged\n")
    with pytest.warns(UserWarning, match="'failure' was not recorded: .*line 1 is not a JSON object"):
        runs.record_event(tmp_path, None, "failure", {"generation": 0, "step": 3})
