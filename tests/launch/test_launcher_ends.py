"""How runs end under launchers of ranks on one host: what a rank and its launcher exit with, the status, and
what the same command does then. The rows of the table that docs/cluster.md shows are asserted here."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from _pytest.mark import ParameterSet

from launcher_rows import hold, rows
from meshwright.checkpoint.directory import latest_step
from meshwright.runs.record import read_metrics
from meshwright.runs.status import read_status
from small_run_file import run_file

STEPS, SIGNAL_AT = 120, 20
"""Steps of a run, and the rows of its record after which it gets a signal."""
LONGEST_S = 240.0
RANK = """
import os, runpy, sys
from pathlib import Path

leave = os._exit

def recorded(code):
    (Path(os.environ["CODES"]) / str(os.getpid())).write_text(str(code))
    leave(code)

os._exit = recorded
runpy.run_module("meshwright", run_name="__main__", alter_sys=True)
"""
"""A rank that leaves its exit code in a file, which its launcher may hide."""
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
HANDLED = ["--signals-to-handle", "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"]
LAUNCHERS: dict[str, list[str]] = {
    "`meshwright train`": [sys.executable, "-m", "meshwright"],
    "`torchrun`": [*TORCHRUN, "RANK"],
    "`torchrun --signals-to-handle`": [*TORCHRUN, *HANDLED, "RANK"],
    "`mpirun` (Open MPI)": [
        "mpirun",
        "--allow-run-as-root",
        "--oversubscribe",
        "-n",
        "2",
        sys.executable,
        "RANK",
    ],
}
"""Commands whose further words are those of `meshwright`."""
FAILURE, KILLED = "a run that fails for good", "a rank is killed"
FAILS = ["--train.lr", "1e38", "--train.warmup_steps", "0"]
QUICK = {("`torchrun`", "SIGTERM")}
"""`make test` has signals of other launchers in `test_cli_process.py`, mpirun's world in `test_embedded.py`,
ranks that are killed in `test_recovery.py`, and runs that fail for good in `test_restarts.py`."""


def started(folder: Path, launcher: str, words: Sequence[str] = ()) -> subprocess.Popen[bytes]:
    """Start the run of a folder under a launcher, with a process group of its own."""
    (folder / "codes").mkdir(exist_ok=True)
    (folder / "rank.py").write_text(RANK, encoding="utf-8")
    (folder / "run.toml").write_text(run_file(STEPS), encoding="utf-8")
    command = [str(folder / "rank.py") if word == "RANK" else word for word in LAUNCHERS[launcher]]
    run = ["train", str(folder / "run.toml"), "--out", str(folder / "run"), "--resume", "auto", *words]
    with (folder / "log").open("ab") as log:
        return subprocess.Popen(
            [*command, *run], stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "CODES": str(folder / "codes")},
        )  # fmt: skip


def wait_for_steps(folder: Path, process: subprocess.Popen[bytes]) -> None:
    """Return once the run has its steps and a whole checkpoint, which a slow disk ends later."""
    limit = time.monotonic() + LONGEST_S
    saved = folder / "run/checkpoints"
    while len(read_metrics(folder / "run")) < SIGNAL_AT or latest_step(saved) is None:
        assert process.poll() is None and time.monotonic() < limit, (folder / "log").read_text()
        time.sleep(0.05)


def codes(folder: Path) -> set[str]:
    """The exit codes of ranks that have ended by themselves."""
    return {file.read_text() for file in (folder / "codes").iterdir()}


def status_word(folder: Path) -> str:
    return (read_status(folder / "run") or ("none",))[0]


@pytest.fixture(scope="module")
def twin(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The hash of the parameters of the run that nothing disturbs."""
    folder = tmp_path_factory.mktemp("twin")
    assert started(folder, "`meshwright train`").wait(LONGEST_S) == 0
    return parameters(folder)


def parameters(folder: Path) -> str:
    return str(json.loads((folder / "run/result.json").read_text())["parameters_sha256"])


def holder(folder: Path) -> int:
    """The process of the run's first rank, which holds its lease."""
    return int(json.loads((folder / "run/lease.json").read_text())["pid"])


def ended(folder: Path, launcher: str, event: str) -> dict[str, str]:
    """Exit codes of the ranks and of the launcher of a run that `event` ends, and its status."""
    process = started(folder, launcher, FAILS if event == FAILURE else ())
    try:
        if event != FAILURE:
            wait_for_steps(folder, process)
        if event == KILLED:
            os.kill(holder(folder), signal.SIGKILL)
        elif event != FAILURE:
            process.send_signal(signal.Signals[event])
        code = process.wait(LONGEST_S)
    finally:
        process.kill()
    found = codes(folder)
    if event == KILLED:
        found = {"137"}  # it leaves no code, and others leave those of whatever they were doing
    elif event == FAILURE and len(found) > 1:
        found -= {"143"}  # the launcher ends a rank that is still writing when another has failed
    return {
        "rank": ", ".join(sorted(found)) or "-",
        "launcher_code": str(128 - code if code < 0 else code),
        "status": f"`{status_word(folder)}`",
    }


def cases() -> Iterator[ParameterSet]:
    """Launcher, event of a row, and what is done."""
    for row in rows():
        if row.test.startswith(Path(__file__).name):
            events = re.findall(r"SIG[A-Z0-9]+", row.event) or [row.event]
            for event in events:
                marks = [] if (row.launcher, event) in QUICK else [pytest.mark.full]
                if "mpirun" in row.launcher and shutil.which("mpirun") is None:
                    marks.append(pytest.mark.skip(reason="Open MPI (openmpi-bin) is not installed"))
                name = f"{row.launcher}-{event}".replace("`", "")
                yield pytest.param(row.launcher, row.event, event, id=name, marks=marks)


@pytest.mark.parametrize(("launcher", "event", "done"), [*cases()])
def test_a_run_ends_as_the_table_says(
    launcher: str, event: str, done: str, twin: str, tmp_path: Path
) -> None:
    found = ended(tmp_path, launcher, done)
    words = FAILS if done == FAILURE else []
    again = started(tmp_path, launcher, words).wait(LONGEST_S)
    if done == FAILURE:
        assert again == int(found["launcher_code"]) and status_word(tmp_path) == "failed"
        then = "fails again"
    else:
        assert (again, status_word(tmp_path), parameters(tmp_path)) == (0, "done", twin)
        starts = json.loads((tmp_path / "run/run.json").read_text())["starts"]
        assert len(starts) > 1 and starts[-1]["step"] > 0
        then = "goes on"
    row = hold(launcher, event, "test_a_run_ends_as_the_table_says", **found)
    assert row.then.startswith(then) or found["status"] == "`done`"
