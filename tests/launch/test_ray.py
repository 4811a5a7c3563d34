"""Workers of a real Ray on this machine; `make ray` installs it into an environment of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from launcher_rows import hold
from meshwright import api
from meshwright.runs.record import read_metrics, read_run
from meshwright.runs.status import read_status
from small_run_file import run_file

pytest.importorskip("ray.train", reason="Ray is not installed here: make ray")

SCRIPT = Path(__file__).parents[2] / "examples/clusters/ray_train.py"
STEPS = 200
RUN = run_file(STEPS) + "checkpoint = { every = 10 }\n"
TIMEOUT_S = 240
PROGRAMS = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0", "PATH": PROGRAMS}
ADDRESS = "http://127.0.0.1:28265"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with a run file, beside a Ray of this machine that is up as long as the tests are."""
    folder = tmp_path_factory.mktemp("ray")
    (folder / "run.toml").write_text(RUN, encoding="utf-8")
    ray = [str(Path(sys.executable).with_name("ray"))]
    subprocess.run(
        [*ray, "start", "--head", "--num-cpus", "4", "--disable-usage-stats", "--dashboard-port", "28265"],
        check=True, capture_output=True, env=ENVIRONMENT,
    )  # fmt: skip
    yield folder
    subprocess.run([*ray, "stop", "--force"], check=True, capture_output=True)


def figures(out: Path) -> dict[str, Any]:
    found = json.loads((out / "result.json").read_text())
    return {key: found[key] for key in ("parameters_sha256", "samples_sha256", "steps")}


@pytest.fixture(scope="module")
def twin(cluster: Path) -> dict[str, Any]:
    """The figures of the same run under torchrun."""
    out = cluster / "torchrun"
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "meshwright"]
    subprocess.run(
        [*command, "train", str(cluster / "run.toml"), "--out", str(out)],
        check=True, capture_output=True, timeout=TIMEOUT_S, env=ENVIRONMENT,
    )  # fmt: skip
    return figures(out)


def start(cluster: Path, out: Path) -> subprocess.Popen[str]:
    """Start the shipped script with two workers, in the Ray that is up."""
    return subprocess.Popen(
        [sys.executable, str(SCRIPT), str(cluster / "run.toml"), str(out), "--workers", "2"],
        env={**ENVIRONMENT, "RAY_ADDRESS": "auto"}, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


def first_worker(out: Path) -> int:
    """The process of rank 0, which holds the run."""
    return int(json.loads((out / "lease.json").read_text())["pid"])


def test_two_workers_are_one_world_that_equals_torchruns(cluster: Path, twin: dict[str, Any]) -> None:
    out = cluster / "two"
    script = start(cluster, out)
    told, _ = script.communicate(timeout=TIMEOUT_S)
    assert script.returncode == 0, told
    assert figures(out) == twin
    assert json.loads((out / "run.json").read_text())["world_size"] == 2


def test_a_killed_worker_is_started_again_and_the_run_equals_its_twin(
    cluster: Path, twin: dict[str, Any]
) -> None:
    out = cluster / "killed"
    script = start(cluster, out)
    limit = time.monotonic() + TIMEOUT_S
    metrics = out / "metrics.jsonl"
    while not metrics.exists() or metrics.read_bytes().count(b"\n") < 30:
        assert script.poll() is None and time.monotonic() < limit
        time.sleep(0.05)
    os.kill(first_worker(out), signal.SIGKILL)
    told, _ = script.communicate(timeout=TIMEOUT_S)
    assert script.returncode == 0, told
    assert figures(out) == twin
    assert len(json.loads((out / "run.json").read_text())["starts"]) == 2
    word, _ = read_status(out) or ("", "")
    hold(
        "Ray Train", "a worker is killed",
        "test_a_killed_worker_is_started_again_and_the_run_equals_its_twin",
        launcher_code=str(script.returncode), status=f"`{word}`",
    )  # fmt: skip


def test_the_shipped_script_runs_as_a_submitted_job(cluster: Path, twin: dict[str, Any]) -> None:
    out = cluster / "submitted"
    entry = [sys.executable, str(SCRIPT), str(cluster / "run.toml"), str(out), "--workers", "2"]
    variables = json.dumps({"env_vars": {"OMP_NUM_THREADS": "1"}})
    submit = [str(Path(sys.executable).with_name("ray")), "job", "submit", "--runtime-env-json", variables]
    done = subprocess.run(
        [*submit, "--address", ADDRESS, "--", *entry],
        check=False, capture_output=True, text=True, timeout=TIMEOUT_S, env=ENVIRONMENT,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert figures(out) == twin


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The options of `launch` for the Ray that is up, whose programs are found."""
    monkeypatch.setenv("PATH", PROGRAMS)
    env = [("OMP_NUM_THREADS", "1"), ("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))]
    return {"on": "ray", "address": ADDRESS, "cpu": True, "gpus_per_node": 2, "env": env}


def test_a_launched_run_is_followed_to_its_last_step(
    cluster: Path, twin: dict[str, Any], here: dict[str, Any]
) -> None:
    out, lines = cluster / "launched", list[str]()
    found = api.launch(cluster / "run.toml", out=out, overrides=[("train.log_every", "20")], **here)
    assert found["ids"] and api.follow(out, lines.append) == ["done"]
    assert figures(out) == twin
    assert read_run(out).info["spec"]["train"]["log_every"] == 20
    assert any(f"step {STEPS}/{STEPS}" in line for line in lines)
    assert any(f"step {STEPS}/{STEPS}" in line for line in api.logs(out))
    assert [run["state"] for run in api.status(out)["runs"]] == ["done"]


def test_a_launched_run_is_stopped(cluster: Path, here: dict[str, Any]) -> None:
    out = cluster / "stopped"
    api.launch(cluster / "run.toml", out=out, overrides=[("train.steps", "100000")], **here)
    limit = time.monotonic() + TIMEOUT_S
    while len(read_metrics(out)) < 20:
        assert time.monotonic() < limit
        time.sleep(0.2)
    assert api.stop(out)["states"] == ["running"]
    while (state := api.status(out)["runs"][0]["state"]) in ("running", "pending"):
        assert time.monotonic() < limit
        time.sleep(0.2)
    assert state == "stopped"
    word, _ = read_status(out) or ("", "")
    hold("Ray Train", "`meshwright stop`", "test_a_launched_run_is_stopped", status=f"`{word}`")


def test_runs_of_a_sweep_are_jobs_of_their_own(cluster: Path, here: dict[str, Any]) -> None:
    out = cluster / "sweep"
    values = [("train.lr", ("1e-3", "3e-3"))]
    found = api.launch(cluster / "run.toml", out=out, sweep=values, overrides=[("train.steps", "10")], **here)
    assert len({*found["ids"]}) == 2
    assert api.follow(out, lambda line: None) == ["done", "done"]
    assert [read_run(out / name).info["spec"]["train"]["lr"] for name in "01"] == [1e-3, 3e-3]
