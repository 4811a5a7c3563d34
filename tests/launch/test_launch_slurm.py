"""Jobs that `meshwright launch` gives to a real Slurm with two nodes: followed, looked at, stopped, swept."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from launcher_rows import hold
from meshwright import api
from meshwright.runs.record import read_metrics, read_run
from meshwright.runs.status import read_status
from meshwright.spec import UserError
from slurm import Slurm, missing, slurm
from small_run_file import run_file

pytestmark = pytest.mark.timeout(1200)  # jobs wait for each other, and for a scheduler's turns

STEPS = 60
TRAINED_S = 300.0
"""Most time in which a job of so few steps is over, also beside other work."""
RUN = run_file(STEPS)
SIZE = ["--gpus-per-node", "1", "--cpu", "--cpus-per-rank", "1"]
"""Two nodes of a core, without GPUs."""


NODES = pytest.mark.parametrize(
    "nodes",
    [(), pytest.param(("--nodes", "1:2"), marks=pytest.mark.full)],
    ids=["srun", "launchers"],
)
"""Who starts the ranks; `make test` has srun alone, and hosts that meet in `test_membership.py`."""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    if (reason := missing()) is not None:
        pytest.skip(reason)
    with slurm(tmp_path_factory.mktemp("launch") / "cluster") as made:
        (made.folder / "run.toml").write_text(RUN, encoding="utf-8")
        yield made


@pytest.fixture(autouse=True)
def here(cluster: Slurm, monkeypatch: pytest.MonkeyPatch) -> None:
    """This process is on the login node, with what the jobs' processes inherit."""
    found = {
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "OMP_NUM_THREADS": "1",
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        **cluster.environment,
    }
    for name, value in found.items():
        monkeypatch.setenv(name, value)


def meshwright(*words: str, code: int = 0) -> str:
    """Return what a command prints that ends with this exit code."""
    command = [sys.executable, "-m", "meshwright", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=TRAINED_S)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def launched(cluster: Slurm, *words: str, code: int = 0) -> tuple[Path, str]:
    """Launch the run with these flags; return its folder and what the command printed."""
    out = cluster.folder / f"run-{time.monotonic_ns()}"
    run = [str(cluster.folder / "run.toml"), "--on", "slurm", "--out", str(out)]
    return out, meshwright("launch", *run, *SIZE, *words, code=code)


def wait_for_steps(out: Path, count: int) -> None:
    limit = time.monotonic() + TRAINED_S
    while len(read_metrics(out)) < count:
        assert time.monotonic() < limit, "\n".join(api.logs(out))
        time.sleep(0.1)


def wait_for_end(out: Path) -> list[str]:
    """Wait until no run of a job is pending or running; return the scheduler's states."""
    limit = time.monotonic() + TRAINED_S
    while True:
        states = [run["state"] for run in api.status(out)["runs"]]
        if not {"pending", "running"} & {*states}:
            return states
        assert time.monotonic() < limit, states
        time.sleep(0.2)


def test_a_launched_run_is_followed_to_its_last_step(cluster: Slurm) -> None:
    out, told = launched(cluster, "--follow", "--time", "10", "--train.lr", "1e-3")
    assert read_status(out) == ("done", "")
    assert read_run(out).info["world_size"] == 2
    assert read_run(out).info["spec"]["train"]["lr"] == 1e-3
    assert "size: 2 nodes of 1 rank" in told and "slurm: done" in told
    assert "doctor: nothing found: 2 ranks on 2 hosts" in told
    assert f"step {STEPS}/{STEPS}" in told  # of the run's own log
    record = json.loads((out / "job.json").read_text())
    [job] = record["ids"]
    assert cluster.state(job)["TimeLimit"] == "00:10:00" and cluster.state(job)["NumNodes"] == "2"
    [start] = read_run(out).info["starts"]
    assert start["job"] == {"scheduler": "slurm", "job": job, "restarts": 0}
    shown = " ".join(meshwright("status", str(out)).split())  # rows are as wide as paths allow
    assert f"slurm: {job}" in shown and f"step {STEPS}/{STEPS}" in shown
    assert f"step {STEPS}/{STEPS}" in meshwright("logs", str(out))


@pytest.mark.full  # `test_submit_programs.py` has `stop` on a stand-in for Slurm
def test_a_run_that_is_stopped_has_saved_and_is_not_started_again(cluster: Slurm) -> None:
    out, _ = launched(cluster, "--train.steps", "100000")
    wait_for_steps(out, 20)
    with pytest.raises(UserError, match=r"has the job \d+ of slurm already, which is running; end it with"):
        api.launch(cluster.folder / "run.toml", on="slurm", out=out, gpus_per_node=1, cpu=True)
    assert "it was running" in meshwright("stop", str(out))
    assert wait_for_end(out) == ["stopped"]
    word, reason = read_status(out) or ("", "")
    assert word == "stopped" and f"meshwright launch {cluster.folder / 'run.toml'} --on slurm --out" in reason
    assert api.status(out)["runs"][0]["starts"] == 1
    assert list((out / "checkpoints").glob("step-*"))
    record = json.loads((out / "job.json").read_text())
    state = cluster.state(record["ids"][0])
    assert state["Restarts"] == "0"
    code = state["ExitCode"].partition(":")[0]
    hold(
        "`srun`", "`meshwright stop`", "test_a_run_that_is_stopped_has_saved_and_is_not_started_again",
        rank=code, launcher_code=code, status=f"`{word}`",
    )  # fmt: skip
    last = str(api.status(out)["runs"][0]["step"] + 10)
    again = [str(cluster.folder / "run.toml"), "--on", "slurm", "--out", str(out), *SIZE, "--follow"]
    assert "slurm: done" in meshwright("launch", *again, "--train.steps", last)
    assert read_status(out) == ("done", "") and len(read_run(out).info["starts"]) == 2


@pytest.mark.full  # `test_slurm.py` has a job that a signal requeues
def test_a_signal_requeues_a_launched_run_until_its_bound(cluster: Slurm) -> None:
    out, _ = launched(cluster, "--train.steps", "100000", "--restarts", "1")
    [job] = json.loads((out / "job.json").read_text())["ids"]
    for starts in (1, 2):
        limit = time.monotonic() + TRAINED_S
        while api.status(out)["runs"][0]["starts"] < starts:
            assert time.monotonic() < limit
            time.sleep(0.2)
        before = len(read_metrics(out))
        wait_for_steps(out, before + 5)
        cluster.run("scancel", "-s", "USR1", job)
    assert wait_for_end(out) == ["failed"]
    assert cluster.state(job)["Restarts"] == "1" and cluster.state(job)["ExitCode"] == "75:0"
    jobs = [start["job"]["restarts"] for start in read_run(out).info["starts"]]
    assert jobs == [0, 1]
    examined = [line for line in api.logs(out) if line.startswith("doctor: ")]
    assert len(examined) == 1  # before the job's first start alone


@NODES
def test_a_run_that_fails_for_good_is_told(cluster: Slurm, nodes: tuple[str, ...]) -> None:
    """The launchers of a range of nodes, which pods have too, end with the run's own code."""
    bad = ["--train.lr", "1e38", "--train.warmup_steps", "0"]
    out, told = launched(cluster, "--follow", *nodes, *bad, code=1)
    [job] = json.loads((out / "job.json").read_text())["ids"]
    assert cluster.state(job)["ExitCode"] == "78:0"
    assert "slurm: failed" in told
    assert read_status(out) is not None and (read_status(out) or ("",))[0] == "failed"
    [run] = api.status(out)["runs"]
    assert run["reason"] and cluster.state(job)["Restarts"] == "0"


@NODES
def test_a_run_that_would_fail_on_its_nodes_is_not_begun(cluster: Slurm, nodes: tuple[str, ...]) -> None:
    """No folder can be made in /proc, which the run itself would notice at its first checkpoint."""
    bad = ["--checkpoint.dir", "/proc/meshwright"]
    out, told = launched(cluster, "--follow", *nodes, *bad, code=1)
    [job] = json.loads((out / "job.json").read_text())["ids"]
    assert cluster.state(job)["ExitCode"] == "2:0" and cluster.state(job)["Restarts"] == "0"
    word, reason = read_status(out) or ("", "")
    sentence = "doctor: the run would fail on these hosts: folder: no rank can make a folder in /proc"
    assert word == "failed" and reason.startswith(sentence) and "(all 2 ranks)" in reason
    assert sentence in told and sentence in " ".join(meshwright("status", str(out)).split())
    assert not (out / "run.json").exists()
    hold(
        "`srun meshwright train --nodes`" if nodes else "`srun`", "a finding of `doctor`",
        "test_a_run_that_would_fail_on_its_nodes_is_not_begun",
        launcher_code=cluster.state(job)["ExitCode"].partition(":")[0], status=f"`{word}`",
    )  # fmt: skip


@pytest.mark.full  # `test_submit_kubernetes.py` has the folders and flags
def test_a_sweep_is_an_array_whose_runs_have_folders_and_values_of_their_own(cluster: Slurm) -> None:
    sweep = ["--sweep", "train.lr=1e-3,3e-3", "--sweep", "train.weight_decay=0,0.1", "--at-once", "1"]
    out, told = launched(cluster, "--follow", *sweep, "--train.steps", "10")
    assert all(f"[{member}] slurm: done" in told for member in range(4))
    found = [read_run(out / str(member)).info["spec"]["train"] for member in range(4)]
    values = [(train["lr"], train["weight_decay"]) for train in found]
    assert values == [(1e-3, 0.0), (1e-3, 0.1), (3e-3, 0.0), (3e-3, 0.1)]
    tasks = [read_run(out / str(member)).info["starts"][0]["job"]["task"] for member in range(4)]
    assert tasks == ["0", "1", "2", "3"]
    assert "step 10/10" in meshwright("logs", str(out), "--run", "3", "--n", "30")


@pytest.mark.full  # `test_slurm.py` has a job that a signal requeues
def test_a_task_of_a_sweep_is_requeued_alone(cluster: Slurm) -> None:
    sweep = ["--sweep", "train.lr=1e-3,3e-3", "--at-once", "1"]
    out, _ = launched(cluster, *sweep, "--train.steps", "100")
    [job] = json.loads((out / "job.json").read_text())["ids"]
    wait_for_steps(out / "1", 10)  # the last task, whose own number is that of the whole array
    cluster.run("scancel", "-s", "USR1", f"{job}_1")
    assert wait_for_end(out) == ["done", "done"]
    assert [run["starts"] for run in api.status(out)["runs"]] == [1, 2]


def test_a_range_of_nodes_is_a_launcher_on_each(cluster: Slurm) -> None:
    out, told = launched(cluster, "--nodes", "1:2", "--follow")
    assert "slurm: done" in told and "size: 1 to 2 nodes of 1 rank" in told
    [job] = json.loads((out / "job.json").read_text())["ids"]
    assert cluster.state(job)["NumNodes"] == "2"
    assert "--nodes" in (out / "slurm.sbatch").read_text()


def test_a_run_whose_layout_is_planned_goes_by_a_file_that_says_it(
    cluster: Slurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_layout = cluster.folder / "open.toml"
    open_layout.write_text(RUN.replace("layout = { dp = 2 }", ""), encoding="utf-8")
    out = cluster.folder / "planned"
    with pytest.raises(UserError, match=r"layout: no axis is sized.*--cluster NAME"):
        api.launch(open_layout, on="slurm", out=out)
    found = api.launch(open_layout, on="slurm", out=out, cluster="h100-sxm", gpus=16, dry_run=True)
    assert "#SBATCH --nodes=2" in found["file"] and "#SBATCH --ntasks-per-node=8" in found["file"]
    assert found["commands"][0][-2] == str(out / "run.toml")
    assert any(sentence.startswith("time: 60 steps of at most") for sentence in found["told"])
    assert not out.exists()
