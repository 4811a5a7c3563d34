"""Training on a CUDA device: equal to one device in float64, and training in bf16 and fp16."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
from cuda_runs import mesh_of, spec_of
from torch._dynamo.utils import counters

from meshwright.data.corpus import open_corpus
from meshwright.data.loader import Loader
from meshwright.train.callbacks import Observers
from meshwright.train.open_run import open_run
from meshwright.train.step import Trainer
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


def test_compiled_blocks_are_one_graph_and_give_the_same_gradients(world: dist.ProcessGroup) -> None:
    """Twelve blocks share what is compiled before the first step, for any number of documents."""
    torch.compiler.reset()
    counters.clear()
    losses = {}
    for compiled in ("false", "true"):
        spec = spec_of(precision__compute="fp32", train__compile=compiled, model__layers=12)
        mesh = mesh_of(spec)
        trainer = Trainer(spec, mesh)
        trainer.initialise()
        trainer.compile_stages(evaluate=True)
        graphs = counters["stats"]["unique_graphs"]
        loader = Loader(open_corpus(spec), spec, mesh.data_rank, spec.layout.data_ranks)
        steps = []
        for number in (1, 2, 3):
            batch = loader.step(number - 1)
            steps.append(trainer.step(batch, number))
            trainer.nll(batch.rows(0, spec.micro_batch))
        loader.close()
        losses[compiled] = [(step.loss, step.grad_norm) for step in steps]
        assert counters["stats"]["unique_graphs"] == graphs <= (6 if compiled == "true" else 0)
    for found, expected in zip(losses["true"], losses["false"], strict=True):
        assert found == pytest.approx(expected, rel=1e-4)


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
