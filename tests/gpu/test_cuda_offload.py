"""Moments of a GPU's run in pinned host memory, or in a mapped file: the numbers are those on the device."""

from __future__ import annotations

from pathlib import Path

import cuda_runs
import pytest
import torch

from meshwright.spec import RunSpec
from meshwright.spec.tiling import Tiling, tiled
from meshwright.train.callbacks import Observers
from meshwright.train.guard.nonfinite import bad_state
from meshwright.train.guard.vote import Vote
from meshwright.train.loop import TrainingRun
from meshwright.train.open_run import open_run

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("world"),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine"),
]


def spec_of(**flags: object) -> RunSpec:
    return cuda_runs.spec_of(**({"train__batch_tokens": 1024, "train__steps": 4} | flags))


def run_of(spec: RunSpec, out: Path) -> TrainingRun:
    with tiled(Tiling(moment_elements=100_000)):
        return open_run(spec, cuda_runs.mesh_of(spec), out, Observers([]))


@pytest.mark.parametrize("kind", ["host", "disk"])
@pytest.mark.parametrize("optimiser", ["adamw", "lion", "muon"])
def test_offloaded_moments_change_no_bit(tmp_path: Path, kind: str, optimiser: str) -> None:
    given = {"train__optimiser": optimiser, "model__preset": "tiny", "precision__compute": "bf16"}
    whole = run_of(spec_of(**given), tmp_path / "whole")
    wanted = whole.execute(None)
    away = spec_of(**given, train__offload=kind)
    half = run_of(spec_of(**given, train__offload=kind, train__stop_at=2), tmp_path / "away")
    half.execute(None)
    run = run_of(away, tmp_path / "away")
    found = run.execute("auto")
    assert found["parameters_sha256"] == wanted["parameters_sha256"]
    for mine, other in zip(run.trainer.optimiser.tensors(), whole.trainer.optimiser.tensors(), strict=True):
        assert mine[0] == other[0] and mine[1].dtype == other[1].dtype
        moved, kept = (getattr(each, "padded", each).to_local() for each in (mine[1], other[1]))
        assert moved.device.type == "cpu" and torch.equal(moved, kept.cpu())
    assert bad_state(run.trainer) is None and Vote(run.trainer)() is None
    staging = run.trainer.optimiser.staging
    assert staging is not None and staging.nbytes() == found["memory"]["optimiser"]
    assert found["memory"]["offloaded"] == wanted["memory"]["optimiser"] > staging.nbytes()
    assert found["peak_memory_bytes"] > 0


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("policy", ["none", "selective", "full"])
def test_offloaded_activations_change_no_bit(tmp_path: Path, policy: str, compiled: bool) -> None:
    """And the device holds less of them."""
    given = {
        "model__preset": "tiny", "model__layers": 8, "data__seq_len": 1024, "train__batch_tokens": 32 * 1024,
        "precision__compute": "bf16", "recompute__policy": policy, "train__compile": str(compiled).lower(),
    }  # fmt: skip
    peaks, parameters = [], []
    for kind in ("none", "host"):
        torch.cuda.reset_peak_memory_stats()
        found = run_of(spec_of(**given, train__offload_activations=kind), tmp_path / kind).execute(None)
        parameters.append(found["parameters_sha256"])
        peaks.append(found["peak_memory_bytes"])
        assert (found["memory"].get("offloaded activations", 0) > 0) == (kind == "host")
    assert parameters[0] == parameters[1]
    assert peaks[1] < peaks[0]
