"""Ranks that would not run the same refuse to start, and say which key differs and where."""

from __future__ import annotations

import json
import os
import shutil
import socket
from contextlib import ExitStack
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.multiprocessing as mp

import meshwright
from meshwright.rank.world import code_version, mesh_of
from meshwright.spec import UserError
from ranks import forks
from small import spec_of

BASE = {"data.corpus": "synthetic", "data.seq_len": 16, "layout.dp": 2, "train.batch_tokens": 64}
CASES: dict[str, dict[str, object]] = {
    "equal": {},
    "train.lr": {"train__lr": 0.125},
    "train.seed": {"train__seed": 7},
    "train.weight_decay": {"train__weight_decay": 0.5},
    "train.eval_every": {"train__eval_every": 3},
    "checkpoint.every": {"checkpoint__every": 5},
    "model.norm_eps": {"model__norm_eps": 0.125},
    "model.hidden": {"model__hidden": 64},
    "precision.compute": {"precision__compute": "bf16"},
    "layout.zero": {"layout__zero": 3},
    "meshwright": {},
    "torch": {},
    "more than five": {
        f"train__{key}": 0.5 for key in ("lr", "weight_decay", "beta1", "beta2", "eps", "clip")
    },
}
"""Flags of rank 1 alone, by the key that the sentence must name."""


def rank_of(rank: int, ports: list[int], folder: Path) -> None:
    place = {"RANK": rank, "WORLD_SIZE": 2, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": 2}
    os.environ.update({key: str(value) for key, value in (place | {"MASTER_ADDR": "127.0.0.1"}).items()})
    told = {}
    for (name, flags), port in zip(CASES.items(), ports, strict=True):
        os.environ["MASTER_PORT"] = str(port)
        with ExitStack() as stack:
            if rank == 1 and name == "meshwright":
                stack.enter_context(patch.object(meshwright, "__version__", "0.0.1"))
            if rank == 1 and name == "torch":
                stack.enter_context(patch.object(torch, "__version__", "1.0"))
            try:
                with mesh_of(spec_of(BASE, **(flags if rank == 1 else {}))):
                    told[name] = ""
            except UserError as error:
                told[name] = str(error)
    (folder / f"{rank}.json").write_text(json.dumps(told))


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    """The error of each of two ranks in each case, empty where it starts."""
    folder = tmp_path_factory.mktemp("told")
    servers = [socket.create_server(("127.0.0.1", 0)) for _ in CASES]
    ports = [server.getsockname()[1] for server in servers]
    for server in servers:
        server.close()
    forks()
    mp.start_processes(rank_of, (ports, folder), nprocs=2, start_method="forkserver")
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("name", CASES)
def test_ranks_that_differ_do_not_start(told: list[dict[str, str]], name: str) -> None:
    first, second = (each[name] for each in told)
    assert first == second
    if name == "equal":
        assert first == ""
        return
    here, there = (f"rank {rank} on {socket.gethostname()}" for rank in range(2))
    assert here in first and there in first and "start all ranks with the same run file" in first
    if name == "more than five":
        assert "and 1 more" in first and first.count(" is ") == 5
    else:
        assert first.startswith("the ranks would not run the same: ") and f" {name} is " in first


def test_an_error_gives_both_values(told: list[dict[str, str]]) -> None:
    assert "train.lr is 0.0003 on rank 0" in told[0]["train.lr"]
    assert "and 0.125 on rank 1" in told[0]["train.lr"]


def test_another_source_file_is_another_version(tmp_path: Path) -> None:
    copy = tmp_path / "meshwright"
    shutil.copytree(Path(meshwright.__file__).parent, copy, ignore=shutil.ignore_patterns("__pycache__"))
    with patch.object(meshwright, "__file__", str(copy / "__init__.py")):
        assert code_version() == code_version()
        same = code_version()
        (copy / "train" / "optimiser.py").write_text("LR_FACTOR = 3\n")
        assert code_version() != same
    assert code_version() == same
