"""The memory that `fit` tells of each way of training is that of a dry run on a faked GPU."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest

from covering import some
from faked_gpu import dryrun_on
from meshwright.fake_cuda import library
from meshwright.fake_cuda.process import FakeCudaProcess
from meshwright.planner.fit.fit import FitRequest
from meshwright.planner.fit.training import TrainingFit, training_fit
from meshwright.planner.fit.ways import WAYS
from meshwright.spec import load

pytestmark = pytest.mark.skipif(
    library.torch_build().toolkit is not None, reason="a GPU is faked for torch's build for CPUs only"
)

WAY = {way.name: way for way in WAYS}
BLOCKS = [("model.layers", "2"), ("model.vocab_size", "16384"), ("data.corpus", "synthetic")]
"""Two blocks of a large model."""


def found(name: str, model: str, gpu: str, count: int, keys: list[tuple[str, str]]) -> TrainingFit:
    request = FitRequest(model, gpu, count, overrides=keys)
    return training_fit(WAY[name], request.planned(request.cluster()))


def peak(process: FakeCudaProcess, fit: TrainingFit, corpus: str = "synthetic") -> float:
    """Bytes of the fullest rank of the run that a fit has led to, by its own command."""
    assert fit.plan is not None and fit.command is not None
    words = fit.command.split()[2:]
    keys = [(key.removeprefix("--"), text) for key, text in zip(words[::2], words[1::2], strict=True)]
    compiled = str(fit.plan.spec.train.compile).lower()  # as `train` chooses on a GPU
    spec = load(None, [*keys, ("data.corpus", corpus), ("train.compile", compiled)])
    assert spec.layout.world_size == fit.plan.spec.layout.world_size
    told: dict[str, Any] = dryrun_on(process, spec, all_stages=spec.layout.pp > 1)
    return float(max(row["peak"] for row in told["ranks"]))


COUNTED = [*product(WAY, (1, 2))]
"""Ways, on one GPU and on two."""


@pytest.mark.parametrize(("name", "count"), some(COUNTED, COUNTED[::5]))
def test_each_way_takes_the_bytes_of_a_dry_run(process: FakeCudaProcess, name: str, count: int) -> None:
    batch = ("train.batch_tokens", str(4 * count * 4096))
    fit = found(name, "llama3-8b", "rtx-4090", count, [*BLOCKS, batch])
    assert fit.fits and fit.plan is not None
    assert fit.plan.memory.allocated == pytest.approx(peak(process, fit), rel=0.05)


@pytest.mark.parametrize(
    ("name", "policy", "keys"),
    [
        ("lora", "full", {}),
        ("qlora", "selective", {}),
        ("qlora", "none", {}),
        ("lora", "full", {"lora.targets": "o_proj,down_proj"}),
        ("lora", "selective", {"lora.targets": "gate_proj"}),
        ("lora", "full", {"layout.cp": "2"}),
    ],
)
def test_adapters_are_counted_to_a_thousandth(
    process: FakeCudaProcess, name: str, policy: str, keys: dict[str, str]
) -> None:
    """Sums of maps and adapters are the most, in the first forward or in the one that recomputes a block."""
    given = {"train.batch_tokens": "32768", "train.compile": "false", "recompute.policy": policy, **keys}
    fit = found(name, "llama3-8b", "rtx-4090", 2 if "layout.cp" in keys else 1, [*BLOCKS, *given.items()])
    assert fit.plan is not None
    assert fit.plan.memory.allocated == pytest.approx(peak(process, fit), rel=0.001)


@pytest.mark.parametrize("name", ["full", "qlora"])
def test_so_does_a_model_with_experts(process: FakeCudaProcess, name: str) -> None:
    fit = found(name, "moe-small", "rtx-4090", 2, [("model.layers", "2"), ("train.batch_tokens", "16384")])
    assert fit.fits and fit.plan is not None
    assert fit.plan.memory.allocated == pytest.approx(peak(process, fit), rel=0.05)


def test_so_do_long_packed_sequences(process: FakeCudaProcess) -> None:
    """A mask of all scores would take as much as the rest again; flash kernels need none."""
    keys = [("model.layers", "2"), ("data.seq_len", "32768"), ("train.batch_tokens", "65536")]
    fit = found("lora", "llama3.2-1b", "h100", 1, keys)
    assert fit.fits and fit.plan is not None and fit.plan.spec.data.document_mask
    assert fit.plan.memory.allocated == pytest.approx(peak(process, fit), rel=0.05)


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("name", "model", "gpu", "count"),
    [
        ("qlora", "llama3-8b", "rtx-3090", 1),
        ("full-offload", "llama3-8b", "rtx-4090", 8),
        ("lora", "llama3-70b", "h100", 8),
    ],
)
def test_large_models_take_the_bytes_of_a_dry_run(
    process: FakeCudaProcess, name: str, model: str, gpu: str, count: int
) -> None:
    fit = found(name, model, gpu, count, [("train.batch_tokens", str(max(4, count) * 4096))])
    assert fit.fits and fit.plan is not None
    assert fit.plan.memory.allocated == pytest.approx(peak(process, fit), rel=0.05)
