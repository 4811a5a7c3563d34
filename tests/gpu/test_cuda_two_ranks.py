"""Two ranks on one CUDA device over NCCL: layouts equal one device, where NCCL lets two ranks share a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from one_device import CASES, WAYS

TESTS = Path(__file__).resolve().parents[1]


def start(way: str, out: Path, device: str, cases: list[str], seconds: float) -> dict[str, Any]:
    """Result that rank 0 of `one_device` wrote; fails with what the program printed when it failed."""
    out.mkdir()
    paths = [str(TESTS.parent / "src"), str(TESTS), str(TESTS / "gpu")]
    command = [sys.executable, "-m", "one_device", "--way", way, "--out", str(out), "--device", device]
    ran = subprocess.run(
        [*command, "--case", *cases],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        timeout=seconds,
    )
    assert ran.returncode == 0, ran.stderr[-4000:]
    found: dict[str, Any] = json.loads((out / "0.json").read_text())
    return found


@pytest.fixture(scope="module")
def differences(tmp_path_factory: pytest.TempPathFactory) -> dict[str, float]:
    """The worst relative difference of each case, in the first way that NCCL takes; skips if it takes none.

    What a way needs is tried with one collective first.
    """
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device on this machine")
    folder = tmp_path_factory.mktemp("one_device")
    version = ".".join(str(part) for part in torch.cuda.nccl.version())
    refusals = []
    for way in WAYS:
        result = start(way, folder / f"{way}-first", "cuda", [], 40)
        if "refused" not in result:
            found: dict[str, float] = start(way, folder / way, "cuda", list(CASES), 200)["found"]
            return found
        refusals.append(f"{way}: {result['refused']}")
    pytest.skip(f"NCCL {version} takes no two ranks on one GPU: {'; '.join(refusals)}")


@pytest.mark.gpu
@pytest.mark.parametrize("case", list(CASES))
def test_two_ranks_on_one_device_equal_one(differences: dict[str, float], case: str) -> None:
    assert differences[case] <= 1e-10


@pytest.mark.full
def test_the_program_that_starts_two_ranks(tmp_path: Path) -> None:
    """On the CPU, over gloo, so that only NCCL is new where there is a GPU."""
    found = start("hosts", tmp_path / "out", "cpu", ["pp2-1f1b"], 120)
    assert found["found"]["pp2-1f1b"] <= 1e-10
