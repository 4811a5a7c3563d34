"""The job of a scheduler, and a run that ends before it does."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from meshwright.rank.scheduler import JOB_END, deadly_signal, job, job_end
from meshwright.spec import UserError
from meshwright.spec.sections import RecoverySpec
from meshwright.train.job_end import LEAST_MARGIN_S, JobEnd
from small_run_file import run_file


def scontrol(folder: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    """Put a scontrol into the path that prints this text."""
    file = folder / "scontrol"
    file.write_text(f"#!/bin/sh\necho '{text}'\n", encoding="utf-8")
    file.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")


def test_a_job_has_a_number_and_restarts() -> None:
    assert job({}) is None
    assert job({"SLURM_JOB_ID": "41"}) == {"scheduler": "slurm", "job": "41", "restarts": 0}
    array = {"SLURM_ARRAY_JOB_ID": "40", "SLURM_ARRAY_TASK_ID": "3", "SLURM_RESTART_COUNT": "2"}
    wanted = {"scheduler": "slurm", "job": "41", "restarts": 2, "array": "40", "task": "3"}
    assert job({"SLURM_JOB_ID": "41", **array}) == wanted


def test_the_end_of_a_job_is_what_slurm_or_its_script_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert job_end({}) is None
    assert job_end({JOB_END: "1700000000"}) == 1.7e9
    with pytest.raises(UserError, match=r"MESHWRIGHT_JOB_END: 'soon' is not a time .* date \+%s"):
        job_end({JOB_END: "soon"})
    end = "2030-01-02T03:04:05"
    scontrol(
        tmp_path, monkeypatch, f"JobId=41 JobState=RUNNING StartTime=2030-01-01T00:00:00 EndTime={end} X=1"
    )
    assert job_end({"SLURM_JOB_ID": "41"}) == time.mktime(time.strptime(end, "%Y-%m-%dT%H:%M:%S"))
    scontrol(tmp_path, monkeypatch, "JobId=41 EndTime=Unknown")
    assert job_end({"SLURM_JOB_ID": "41"}) is None


def test_a_run_stops_in_time_and_takes_notice_of_more_time(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [1000.0]
    monkeypatch.setattr("meshwright.train.job_end.time.time", lambda: clock[0])
    ends = [2000.0]
    limit = JobEnd(RecoverySpec(), first=True, read=lambda: ends[0])
    assert JobEnd(RecoverySpec(), first=False, read=lambda: ends[0]).end is None
    assert JobEnd(RecoverySpec(job_end_margin=0), first=True, read=lambda: ends[0]).end is None
    near = []
    for clock[0] in (1000.0, 1100.0, 1700.0):  # the longest time from one step to the next is 600 s
        near.append(limit.is_near())
    assert near == [False, False, True]
    assert limit.margin == LEAST_MARGIN_S + 2 * 600
    given = JobEnd(RecoverySpec(job_end_margin=100), first=True, read=lambda: ends[0])
    clock[0] = 1899.0
    assert not given.is_near()
    clock[0], ends[0] = 1901.0, 4000.0
    assert not given.is_near()  # somebody gave the job more time
    clock[0] = 3901.0
    assert given.is_near()


def test_a_scheduler_that_does_not_answer_is_a_warning() -> None:
    def unanswered() -> float | None:
        raise FileNotFoundError(2, "No such file or directory", "scontrol")

    limit = JobEnd(RecoverySpec(), first=True, read=unanswered)
    assert limit.end is None
    assert limit.warning is not None
    assert "scontrol" in limit.warning
    assert "--signal=USR1@300" in limit.warning
    assert not limit.is_near()


@pytest.mark.parametrize("handled", [True, False])
def test_a_torchrun_that_the_jobs_signal_would_kill_is_a_warning(handled: bool) -> None:
    """The parent of the process is what torchrun's agent would be."""
    ask = "from meshwright.rank.scheduler import deadly_signal; print(deadly_signal())"
    agent = "import signal, subprocess, sys; " + "signal.signal(signal.SIGUSR1, print); " * handled
    done = subprocess.run(
        [sys.executable, "-c", f"{agent} subprocess.run([sys.executable, '-c', {ask!r}])"],
        env={**os.environ, "TORCHELASTIC_RUN_ID": "1", "SLURM_JOB_ID": "41"},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert ("--signals-to-handle SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1" in done.stdout) is not handled
    assert deadly_signal({"SLURM_JOB_ID": "41"}) is None


def test_an_end_that_is_no_time_ends_all_ranks(tmp_path: Path) -> None:
    file, out = tmp_path / "run.toml", tmp_path / "run"
    file.write_text(run_file(3), encoding="utf-8")
    command = [sys.executable, "-m", "meshwright", "train", str(file), "--out", str(out)]
    world = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        world["MASTER_PORT"] = str(free.getsockname()[1])
    ranks = [
        subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            env=os.environ | world | {JOB_END: "soon", "RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(2)
    ]  # fmt: skip
    told = [process.communicate(timeout=100)[0] for process in ranks]
    assert [process.returncode for process in ranks] == [2, 2], told
    assert all("MESHWRIGHT_JOB_END: 'soon' is not a time" in text for text in told)
