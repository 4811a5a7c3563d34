"""Jobs of a real Slurm with two nodes: stopped by a signal or their limit, requeued, and equal to a twin."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest

from launcher_rows import hold
from meshwright.runs.record import read_run
from meshwright.runs.status import read_status
from slurm import Slurm, missing, slurm

pytestmark = pytest.mark.timeout(1200)  # jobs wait for each other, and for a scheduler's turns

STEPS = 240
TRAINED_S = 300.0
"""Most time in which a job of so few steps is over, also beside other work."""
WORDS = [
    *("--model.preset", "tiny", "--model.layers", "1", "--model.hidden", "64", "--model.ffn", "64"),
    *("--model.vocab_size", "300", "--data.tokenizer", "byte", "--data.corpus", "synthetic"),
    *("--data.seq_len", "64", "--train.eval_tokens", "512", "--train.log_every", "1"),
]
SHORT = ("--layout.dp", "2", "--train.batch_tokens", "512", "--train.steps", str(STEPS))
EXAMPLES = Path(__file__).parents[2] / "examples/clusters"
SCRIPTS = {
    "slurm.sbatch": "`srun`",
    "slurm-torchrun.sbatch": "`srun torchrun --signals-to-handle`",
    "slurm-nodes.sbatch": "`srun meshwright train --nodes`",
}
"""Shipped scripts, and the launchers that they are of in the table."""
OF_SRUN = ["slurm.sbatch", *(pytest.param(script, marks=pytest.mark.full) for script in [*SCRIPTS][1:])]
"""`make test` has the script of srun alone: signals under the launchers of the others are sent without Slurm
in `test_launcher_ends.py`."""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    if (reason := missing()) is not None:
        pytest.skip(reason)
    with slurm(tmp_path_factory.mktemp("slurm") / "cluster") as made:
        yield made


@pytest.fixture(scope="module")
def twin(cluster: Slurm) -> dict[str, object]:
    """The result of the run that nothing disturbs."""
    job, out = submit(cluster, "slurm.sbatch")
    cluster.wait(job, "COMPLETED", seconds=TRAINED_S)
    assert read_status(out) == ("done", "")
    return result(out)


def submit(
    cluster: Slurm,
    script: str,
    *options: str,
    more: Sequence[str] = (),
    length: Sequence[str] = SHORT,
    out: Path | None = None,
    variables: Mapping[str, str] | None = None,
) -> tuple[str, Path]:
    """Submit a shipped script on two nodes of a core; return the job's number and the run's folder."""
    out = out or cluster.folder / f"run-{time.monotonic_ns()}"
    text = (EXAMPLES / script).read_text(encoding="utf-8")
    run = cluster.folder / "run.toml"
    run.write_text("", encoding="utf-8")
    found = {
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "OMP_NUM_THREADS": "1",
        "RANKS_PER_NODE": "1",
    }
    found |= {"PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])}
    cores = ("--ntasks-per-node=1", "--cpus-per-task=1", "--gpus-per-node=0")
    job = cluster.submit(
        text, *cores, f"--output={out}.log", *options, words=[str(run), str(out), *WORDS, *length, *more],
        environment=found | dict(variables or {}),
    )  # fmt: skip
    return job, out


def result(out: Path) -> dict[str, object]:
    found = json.loads((out / "result.json").read_text())
    return {name: found[name] for name in ("parameters_sha256", "samples_sha256", "steps")}


def steps(out: Path) -> int:
    """The number of steps whose rows are on disk."""
    file = out / "metrics.jsonl"
    return file.read_bytes().count(b"\n") if file.exists() else 0


def wait_for_steps(out: Path, count: int, seconds: float = TRAINED_S) -> None:
    limit = time.monotonic() + seconds
    while steps(out) < count:
        assert time.monotonic() < limit, Path(f"{out}.log").read_text()
        time.sleep(0.1)


def wait_for_start(out: Path, number: int, seconds: float = TRAINED_S) -> int:
    """The step at which a start of a run began, by its number, once it is recorded."""
    limit = time.monotonic() + seconds
    while not (out / "run.json").exists() or len(read_run(out).info["starts"]) < number:
        assert time.monotonic() < limit, Path(f"{out}.log").read_text()
        time.sleep(0.1)
    return int(read_run(out).info["starts"][number - 1]["step"])


def log(out: Path) -> str:
    return Path(f"{out}.log").read_text()


def tasks_codes(out: Path) -> str:
    """The exit codes of tasks other than 0, as srun tells them."""
    return ", ".join(sorted(set(re.findall(r"srun: error: .*: Exited with exit code (\d+)", log(out)))))


def seen(out: Path, script: str) -> dict[str, str]:
    """Codes and status of a job that was to be requeued, of which its log tells."""
    codes, [status] = tasks_codes(out), set(re.findall(r"meshwright: status: (?!done)(\w+)", log(out)))
    ranks = {"rank": codes} if script == "slurm.sbatch" else {}
    return {"launcher_code": codes, "status": f"`{status}`", **ranks}


@pytest.mark.parametrize("script", OF_SRUN)
def test_a_job_that_usr1_stops_twice_is_requeued_and_equals_its_twin(
    cluster: Slurm, twin: dict[str, object], script: str
) -> None:
    job, out = submit(cluster, script)
    for number, goal in enumerate((30, 100), 1):
        cluster.wait(job, "RUNNING")
        wait_for_steps(
            out, max(goal, wait_for_start(out, number) + 5)
        )  # of this start, not of the one before
        cluster.run("scancel", "-s", "USR1", job)
        cluster.wait(job, "PENDING")
    ended = cluster.wait(job, "COMPLETED", seconds=TRAINED_S)
    assert ended["Restarts"] == "2", log(out)
    assert result(out) == twin
    assert read_status(out) == ("done", "")
    jobs = [start["job"] for start in read_run(out).info["starts"]]
    assert jobs == [{"scheduler": "slurm", "job": job, "restarts": count} for count in range(3)]
    assert log(out).count("meshwright: status: requeue") >= 2
    hold(
        SCRIPTS[script], "SIGUSR1 (`scancel -s USR1`, `--signal`)",
        "test_a_job_that_usr1_stops_twice_is_requeued_and_equals_its_twin", **seen(out, script),
    )  # fmt: skip


@pytest.mark.full  # `test_scheduler.py` has when a job's end is due, and the test above what follows
@pytest.mark.parametrize("script", SCRIPTS)
def test_a_job_saves_before_its_limit_and_goes_on_after_it(
    cluster: Slurm, twin: dict[str, object], script: str
) -> None:
    """No signal is sent: 299 seconds of five minutes are to be left after the run."""
    job, out = submit(
        cluster, script, "--time=5", "--signal=USR1@1", more=["--recovery.job_end_margin", "299"]
    )
    cluster.wait(job, "RUNNING")
    cluster.wait(job, "PENDING", seconds=TRAINED_S)
    assert "stopped by the end of the job after step" in log(out)
    cluster.run("scontrol", "update", f"JobId={job}", "TimeLimit=60")
    ended = cluster.wait(job, "COMPLETED", seconds=TRAINED_S)
    assert ended["Restarts"] == "1", log(out)
    assert result(out) == twin
    hold(
        SCRIPTS[script], "the end of the job, without a signal",
        "test_a_job_saves_before_its_limit_and_goes_on_after_it", **seen(out, script),
    )  # fmt: skip


@pytest.mark.full  # `make test` has a launched one: `test_a_run_that_fails_for_good_is_told`
def test_a_job_that_fails_for_good_is_not_requeued(cluster: Slurm) -> None:
    job, out = submit(cluster, "slurm.sbatch", more=["--train.lr", "1e38", "--train.warmup_steps", "0"])
    ended = cluster.wait(job, "FAILED", "COMPLETED", seconds=TRAINED_S)
    assert (ended["JobState"], ended["Restarts"], ended["ExitCode"]) == ("FAILED", "0", "78:0"), log(out)
    status = read_status(out)
    assert status is not None
    assert status[0] == "failed"
    assert "meshwright: status: failed" in log(out)
    hold(
        "`srun`", "a run that fails for good", "test_a_job_that_fails_for_good_is_not_requeued",
        **seen(out, "slurm.sbatch"),
    )  # fmt: skip


def kinds(out: Path) -> list[str]:
    return [event["kind"] for event in read_run(out).events]


def wait_for_event(out: Path, kind: str, seconds: float = TRAINED_S) -> None:
    limit = time.monotonic() + seconds
    while kind not in kinds(out):
        assert time.monotonic() < limit, log(out)
        time.sleep(0.1)


@pytest.mark.full  # `test_elastic.py` and `test_membership.py` have hosts that leave and come back
def test_a_job_of_a_range_of_nodes_goes_on_without_one_and_takes_it_back(
    cluster: Slurm, tmp_path: Path
) -> None:
    """Slurm has the lost node down, and takes it out of the job; when it is back, another job has it join.

    Steps are those of one process, but for rounding in float64, and so is the end, to which a third job goes.
    """
    nodes = "slurm-nodes.sbatch"
    length = [*("--precision.compute", "fp64", "--recovery.snapshot_every", "1", "--train.steps", "100000")]
    length += ["--train.batch_tokens", "2048"]
    job, out = submit(cluster, nodes, length=length)
    cluster.wait(job, "RUNNING")
    wait_for_steps(out, 20)
    assert read_run(out).info["world_size"] == 2
    cluster.kill_node("n2")  # the batch script runs on n1
    wait_for_event(out, "host_lost")
    cluster.wait_for_node("n2", "down")
    wait_for_steps(out, steps(out) + 10)
    assert read_run(out).info["world_size"] == 1
    cluster.start_node("n2")
    cluster.wait_for_node("n2", "idle")
    one = {"NODE_RANGE": "1:2"}
    second, _ = submit(cluster, nodes, "--nodes=1", "--nodelist=n2", length=length, out=out, variables=one)
    wait_for_event(out, "host_joined")
    wait_for_steps(out, steps(out) + 10)
    assert read_run(out).info["world_size"] == 2
    assert [cluster.state(each)["JobState"] for each in (job, second)] == ["RUNNING"] * 2, log(out)
    running = read_status(out)
    assert running is not None
    hold(
        "`srun meshwright train --nodes`", "a node is lost",
        "test_a_job_of_a_range_of_nodes_goes_on_without_one_and_takes_it_back", status=f"`{running[0]}`",
    )  # fmt: skip
    cluster.run("scancel", job, second)
    for each in (job, second):
        cluster.wait(each, "CANCELLED")
    end = ("--train.stop_at", str(steps(out) + 5))
    last, _ = submit(cluster, nodes, length=[*length, *end], out=out)
    ended = cluster.wait(last, "COMPLETED", "FAILED", seconds=TRAINED_S)
    assert (ended["JobState"], read_status(out)) == ("COMPLETED", ("done", "")), log(out)

    alone = tmp_path / "alone"
    command = [sys.executable, "-m", "meshwright", "train", "--out", str(alone), *WORDS, *length, *end]
    subprocess.run([*command, "--quiet"], check=True)
    rows, expected = ([row for row in read_run(each).metrics if "loss" in row] for each in (out, alone))
    assert [row["step"] for row in rows] == [row["step"] for row in expected]
    assert [row["loss"] for row in rows] == pytest.approx([row["loss"] for row in expected], rel=1e-9)
    assert result(out)["samples_sha256"] == result(alone)["samples_sha256"]
    assert "failure" not in kinds(out)


@pytest.mark.full  # `test_recovery.py` has ranks that are killed, and the first test here a job's next start
def test_a_job_whose_node_is_lost_is_requeued_and_equals_its_twin(
    cluster: Slurm, twin: dict[str, object]
) -> None:
    job, out = submit(cluster, "slurm.sbatch", more=["--checkpoint.every", "10"])
    cluster.wait(job, "RUNNING")
    wait_for_steps(out, 60)
    cluster.kill_node("n2")
    cluster.wait(job, "PENDING", seconds=TRAINED_S)
    words = "requeue", "running"  # as the other ranks see that one is gone, or are ended before by Slurm
    assert (read_status(out) or ("", ""))[0] in words
    hold(
        "`srun`", "a node is lost", "test_a_job_whose_node_is_lost_is_requeued_and_equals_its_twin",
        status=" or ".join(f"`{word}`" for word in words),
    )  # fmt: skip
    cluster.start_node("n2")
    ended = cluster.wait(job, "COMPLETED", seconds=TRAINED_S)
    assert int(ended["Restarts"]) >= 1
    assert result(out) == twin
