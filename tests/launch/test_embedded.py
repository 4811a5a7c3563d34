"""Ranks that something else has started: mpirun, and scripts that have made a process group themselves."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

WORDS = [
    *("--model.preset", "tiny", "--model.layers", "1", "--model.hidden", "64", "--model.ffn", "64"),
    *("--model.vocab_size", "300", "--data.tokenizer", "byte", "--data.corpus", "synthetic"),
    *("--data.seq_len", "64", "--train.batch_tokens", "512", "--train.eval_tokens", "512"),
    *("--train.steps", "4", "--layout.dp", "2"),
]
TIMEOUT_S = 280

HOWS = ("train", "main", "doctor", "another world")
"""Ways to run in a group that is there. The last has variables of another world, of one rank, as where a
script under a torchrun of one rank has started processes itself."""
SCRIPT = """
import os
import sys
from pathlib import Path
import torch
import torch.distributed as dist
from meshwright import api
from meshwright.cli.main import main
from meshwright.spec import load

rank, port, folder, hows, words = int(sys.argv[1]), sys.argv[2], Path(sys.argv[3]), sys.argv[4], sys.argv[5:]
dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
spec = load(None, [(key[2:], value) for key, value in zip(words[::2], words[1::2])])
for how in hows.split(","):
    out = folder / how
    if how == "main":
        assert main(["train", *words, "--out", str(out)]) == 0
    else:
        if how == "another world":
            os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
        api.train(spec, out=out, quiet=True, doctor=how == "doctor")
    numbers = torch.ones(1)
    dist.all_reduce(numbers)  # the group is still there, and works
    assert numbers.item() == 2
    print("ended:", how, flush=True)
dist.destroy_process_group()
"""


def figures(out: Path) -> dict[str, Any]:
    found = json.loads((out / "result.json").read_text())
    return {key: found[key] for key in ("parameters_sha256", "samples_sha256", "final_loss")}


@pytest.fixture(scope="module")
def twin(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The figures of the run that this command has started itself."""
    out = tmp_path_factory.mktemp("twin") / "run"
    command = [sys.executable, "-m", "meshwright", "train", *WORDS, "--out", str(out)]
    subprocess.run(command, check=True, timeout=TIMEOUT_S, capture_output=True)
    return figures(out)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


@pytest.fixture(scope="module")
def embedded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """The folder of the runs of two ranks in one group, one after the other, and what each rank has told."""
    folder, port = tmp_path_factory.mktemp("embedded"), str(free_port())
    script = folder / "script.py"
    script.write_text(SCRIPT, encoding="utf-8")
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script), str(rank), port, str(folder), ",".join(HOWS), *WORDS],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port},
        )
        for rank in range(2)
    ]  # fmt: skip
    told = [rank.communicate(timeout=TIMEOUT_S)[0] for rank in ranks]
    return folder, [f"{text}\nexit code {rank.returncode}" for text, rank in zip(told, ranks, strict=True)]


@pytest.mark.parametrize("how", HOWS)
def test_a_run_uses_the_process_group_that_is_there_and_leaves_it(
    embedded: tuple[Path, list[str]], twin: dict[str, Any], how: str
) -> None:
    folder, told = embedded
    assert all(f"ended: {how}\n" in text for text in told), "\n".join(told)
    assert figures(folder / how) == twin


def test_ranks_of_a_group_end_well_after_their_runs(embedded: tuple[Path, list[str]]) -> None:
    _, told = embedded
    assert all(text.endswith("exit code 0") for text in told), "\n".join(told)


@pytest.mark.skipif(shutil.which("mpirun") is None, reason="Open MPI (openmpi-bin) is not installed")
def test_tasks_of_mpirun_are_one_world(tmp_path: Path, twin: dict[str, Any]) -> None:
    mpirun = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-n", "2"]
    words = [*WORDS, "--out", str(tmp_path / "run"), "--doctor"]
    command = [*mpirun, sys.executable, "-m", "meshwright", "train", *words]
    done = subprocess.run(
        command, env={**os.environ, "OMP_NUM_THREADS": "1"}, timeout=TIMEOUT_S, text=True,
        capture_output=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert figures(tmp_path / "run") == twin
    assert done.stdout.count("step 4/4") >= 1
    assert "doctor: nothing found: 2 ranks on 1 host" in done.stdout


@pytest.mark.skipif(shutil.which("mpirun") is None, reason="Open MPI (openmpi-bin) is not installed")
def test_a_layout_of_other_ranks_than_mpirun_has_started_is_a_sentence(tmp_path: Path) -> None:
    mpirun = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-n", "2"]
    words = [*WORDS[:-1], "4"]
    done = subprocess.run(
        [*mpirun, sys.executable, "-m", "meshwright", "train", *words, "--out", str(tmp_path / "run")],
        timeout=TIMEOUT_S, text=True, capture_output=True, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert "is 4 ranks, but 2 were asked for; try mpirun -n 4" in done.stderr
