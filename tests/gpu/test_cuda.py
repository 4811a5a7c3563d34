"""Training on a CUDA device: equal to one device in float64, and training in bf16 and fp16."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
from cuda_runs import mesh_of, spec_of

from meshwright.train.callbacks import Observers
from meshwright.train.open_run import open_run
from meshwright.verify.verify import verify

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine"),
]


@pytest.mark.parametrize("recompute", ["none", "full", "selective"])
@pytest.mark.parametrize("preset", ["tiny", "qwen3-8b", "gpt3-175b", "moe-tiny", "deepseek-v3"])
def test_equals_one_device(world: dist.ProcessGroup, preset: str, recompute: str) -> None:
    spec = spec_of(model__preset=preset, recompute__policy=recompute, layout__micro_batch=2)
    found = verify(spec, mesh_of(spec), 3)
    assert found is not None and found["worst_relative"] <= 1e-10, found["worst_name"]


@pytest.mark.parametrize("compiled", ["false", "true"])
@pytest.mark.parametrize("compute", ["fp32", "bf16", "fp16"])
def test_trains(world: dist.ProcessGroup, tmp_path, compute: str, compiled: str) -> None:  # type: ignore[no-untyped-def]
    spec = spec_of(precision__compute=compute, train__compile=compiled, train__lr=1e-3)
    run = open_run(spec, mesh_of(spec), tmp_path, Observers([]))
    result = run.execute(None)
    assert math.isfinite(result["final_loss"]) and result["final_loss"] < math.log(2048)
    assert result["peak_memory_bytes"] > 4 * spec.model.parameters
    again = open_run(spec, mesh_of(spec), tmp_path, Observers([])).execute("auto")
    assert again["parameters_sha256"] == result["parameters_sha256"]
