"""Jobs of a real Slurm with two nodes: stopped by a signal or their limit, requeued, and equal to a twin."""

from __future__ import annotations

import json
import os
import shlex
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from meshwright.runs.record import read_run
from meshwright.runs.status import read_status
from slurm import Slurm, missing, slurm

REASON = missing()
pytestmark = pytest.mark.skipif(REASON is not None, reason=REASON or "")

STEPS = 240
WORDS = [
    *("--model.preset", "tiny", "--model.layers", "1", "--model.hidden", "64", "--model.ffn", "64"),
    *("--model.vocab_size", "300", "--data.tokenizer", "byte", "--data.corpus", "synthetic"),
    *("--data.seq_len", "64", "--train.batch_tokens", "512", "--train.eval_tokens", "512"),
    *("--train.log_every", "1", "--train.steps", str(STEPS), "--layout.dp", "2"),
]
TORCHRUN = (
    "-m torch.distributed.run --nnodes 2 --nproc-per-node 1 --rdzv-backend c10d --rdzv-endpoint n1:29400 "
    "--rdzv-id $SLURM_JOB_ID --signals-to-handle SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"
)
WAYS = {
    "ranks of srun": "srun $PYTHON -m meshwright train $WORDS",
    "torchrun": f"srun --ntasks-per-node 1 $PYTHON {TORCHRUN} -m meshwright train $WORDS",
    "--nodes": "srun --ntasks-per-node 1 $PYTHON -m meshwright train $WORDS --nodes 2:2 --nproc 1",
}
SCRIPT = """\
#!/bin/bash
export PYTHONPATH={path} OMP_NUM_THREADS=1 PYTHON={python}
WORDS={words}
{command} --out "$OUT" --resume auto
code=$?
if [ $code -ne 0 ] && [ "$(head -n 1 "$OUT/status")" = requeue ] && [ "${{SLURM_RESTART_COUNT:-0}}" -lt 3 ]
then scontrol requeue "$SLURM_JOB_ID"
fi
exit $code
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    with slurm(tmp_path_factory.mktemp("slurm") / "cluster") as made:
        yield made


@pytest.fixture(scope="module")
def twin(cluster: Slurm) -> dict[str, object]:
    """The result of the run that nothing disturbs."""
    job, out = submit(cluster, "ranks of srun")
    cluster.wait(job, "COMPLETED", seconds=120)
    assert read_status(out) == ("done", "")
    return result(out)


def submit(cluster: Slurm, way: str, *options: str, more: str = "") -> tuple[str, Path]:
    """Submit a job that trains in one of the `WAYS` on two nodes; return its number and the run's folder."""
    out = cluster.folder / f"run-{time.monotonic_ns()}"
    text = SCRIPT.format(
        path=shlex.quote(os.pathsep.join(filter(None, sys.path))), python=sys.executable,
        words=shlex.quote(f"{' '.join(WORDS)} {more}"), command=WAYS[way],
    )  # fmt: skip
    text = text.replace('"$OUT', f'"{out}').replace("$OUT", str(out))
    log = f"--output={out}.log"
    return cluster.submit(text, "-N2", "--ntasks-per-node=1", "--open-mode=append", log, *options), out


def result(out: Path) -> dict[str, object]:
    found = json.loads((out / "result.json").read_text())
    return {name: found[name] for name in ("parameters_sha256", "samples_sha256", "steps")}


def steps(out: Path) -> int:
    """The number of steps whose rows are on disk."""
    file = out / "metrics.jsonl"
    return file.read_bytes().count(b"\n") if file.exists() else 0


def wait_for_steps(out: Path, count: int, seconds: float = 90.0) -> None:
    limit = time.monotonic() + seconds
    while steps(out) < count:
        assert time.monotonic() < limit, Path(f"{out}.log").read_text()
        time.sleep(0.1)


def log(out: Path) -> str:
    return Path(f"{out}.log").read_text()


@pytest.mark.parametrize("way", WAYS)
def test_a_job_that_usr1_stops_twice_is_requeued_and_equals_its_twin(
    cluster: Slurm, twin: dict[str, object], way: str
) -> None:
    job, out = submit(cluster, way)
    for goal in (30, 100):
        cluster.wait(job, "RUNNING")
        wait_for_steps(out, goal)
        cluster.run("scancel", "-s", "USR1", job)
        cluster.wait(job, "PENDING")
    ended = cluster.wait(job, "COMPLETED", seconds=120)
    assert ended["Restarts"] == "2", log(out)
    assert result(out) == twin
    assert read_status(out) == ("done", "")
    jobs = [start["job"] for start in read_run(out).info["starts"]]
    assert jobs == [{"scheduler": "slurm", "job": job, "restarts": count} for count in range(3)]
    assert log(out).count("meshwright: status: requeue") >= 2


@pytest.mark.parametrize("way", WAYS)
def test_a_job_saves_before_its_limit_and_goes_on_after_it(
    cluster: Slurm, twin: dict[str, object], way: str
) -> None:
    """The limit is a minute, of which 58 seconds are to be left: no signal is sent."""
    job, out = submit(cluster, way, "--time=1", more="--recovery.job_end_margin 58")
    cluster.wait(job, "RUNNING")
    cluster.wait(job, "PENDING", seconds=58)
    assert "stopped by the end of the job after step" in log(out)
    cluster.run("scontrol", "update", f"JobId={job}", "TimeLimit=10")
    ended = cluster.wait(job, "COMPLETED", seconds=120)
    assert ended["Restarts"] == "1", log(out)
    assert result(out) == twin


def test_a_job_that_fails_for_good_is_not_requeued(cluster: Slurm) -> None:
    job, out = submit(cluster, "ranks of srun", more="--train.lr 1e38 --train.warmup_steps 0")
    ended = cluster.wait(job, "FAILED", "COMPLETED", seconds=60)
    assert (ended["JobState"], ended["Restarts"], ended["ExitCode"]) == ("FAILED", "0", "78:0"), log(out)
    status = read_status(out)
    assert status is not None
    assert status[0] == "failed"
    assert "meshwright: status: failed" in log(out)


def test_a_job_whose_node_is_lost_is_requeued_and_equals_its_twin(
    cluster: Slurm, twin: dict[str, object]
) -> None:
    job, out = submit(cluster, "ranks of srun", "--requeue", more="--checkpoint.every 10")
    cluster.wait(job, "RUNNING")
    wait_for_steps(out, 60)
    cluster.kill_node("n2")
    cluster.wait(job, "PENDING", seconds=60)
    cluster.start_node("n2")
    ended = cluster.wait(job, "COMPLETED", seconds=120)
    assert int(ended["Restarts"]) >= 1
    assert result(out) == twin
