"""Compiled blocks on a faked GPU: the compiler's own program is run, and its kernels are counted."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch._dynamo.utils import counters

from faked_gpu import large, tiny
from meshwright import api
from meshwright.data.loader import Batch
from meshwright.dryrun import rank_step
from meshwright.dryrun.trace import Trace
from meshwright.fake_cuda import library
from meshwright.fake_cuda.process import FakeCudaProcess
from meshwright.hardware.find import cluster
from meshwright.planner.cost.model import CostModel
from meshwright.planner.cost.tensor_overlap import fused_passes
from meshwright.spec import RunSpec
from meshwright.train.step import Trainer
from meshwright.train.step_result import StepResult

pytestmark = [
    pytest.mark.skipif(
        library.torch_build().toolkit is not None, reason="a GPU is faked for torch's build for CPUs only"
    ),
    pytest.mark.skipif(find_spec("triton") is None, reason="Triton has no package for this platform"),
]
LAYOUTS: dict[str, dict[str, object]] = {
    "dp2": {"layout__micro_batch": 1},
    "tp2": {"layout__tp": 2, "layout__dp": 1, "layout__zero": 0},
    "tp2-alone": {"layout__tp": 2, "layout__dp": 1, "layout__zero": 1, "layout__sequence_parallel": "false"},
    "cp2": {"layout__cp": 2, "layout__dp": 1, "layout__zero": 0},
    "pp2": {"layout__pp": 2, "layout__schedule": "1f1b", "layout__dp": 1, "layout__zero": 0},
    "full": {"recompute__policy": "full"},
    "lora": {"lora__rank": 4},
    "whole": {"data__document_mask": "false", "model__head_dim": 64},
}

QUICK = ("tp2",)


def row_of(process: FakeCudaProcess, spec: RunSpec, **options: Any) -> dict[str, Any]:
    (row,) = process.call(api.dryrun, spec, device="cuda", **options)["ranks"]
    return dict(row)


def compiled(row: dict[str, Any]) -> int:
    """The number of launches by compiled code."""
    kernels = row["device_work"]["kernels"]
    return sum(each["count"] for each in kernels if each["name"].startswith("compiled::"))


def flops(row: dict[str, Any], attention: bool) -> int:
    kernels = row["device_work"]["kernels"]
    return sum(each["flops"] for each in kernels if ("attention" in each["name"]) == attention)


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=() if case in QUICK else pytest.mark.full) for case in LAYOUTS]
)
def test_compiled_blocks_compute_and_send_what_others_do(process: FakeCudaProcess, case: str) -> None:
    """States, messages and attention are equal; what is launched and moved beside products is less."""
    flags = {"layout__schedule": "1f1b", **LAYOUTS[case]}
    eager = row_of(process, tiny(**flags))
    found = row_of(process, tiny(**flags, train__compile="true"))
    for key in ("states", "wire", "units"):
        assert found[key] == eager[key]
    assert found["device_work"]["races"] == []
    for row in (eager, found):
        waits = {each["name"]: each["count"] for each in row["device_work"]["host_waits"]}
        assert waits == {"event": 1}
    assert flops(found, attention=True) == flops(eager, attention=True) > 0
    assert 0 < flops(found, attention=False) <= flops(eager, attention=False)
    assert compiled(found) > compiled(eager) == 0
    moved = [row["device_work"]["elementwise_a_block"] for row in (eager, found)]
    assert 0 < moved[1] < moved[0]


def test_twelve_blocks_are_one_graph(process: FakeCudaProcess) -> None:
    spec = tiny(model__layers=12, train__compile="true")
    assert row_of(process, spec)["counts"]["step"]["graphs"] == 1


def graphs_of_a_run(spec: RunSpec) -> list[float]:
    """Graphs after the warm-up of a run, and after steps and validations with 1 to 9 documents in samples."""
    found: list[float] = []
    step = Trainer.step

    def noted(trainer: Trainer, batch: Batch, number: int, **more: Any) -> StepResult:
        trainer.compile_stages(evaluate=True)
        found.append(counters["stats"]["unique_graphs"])
        places = torch.arange(spec.data.seq_len)
        for count in (1, 2, 3, 9):
            documents = (places * count // len(places)).expand(batch.documents.shape)
            other = replace(batch, documents=documents)
            step(trainer, other, number)
            trainer.nll(other.rows(0, spec.micro_batch))
        found.append(counters["stats"]["unique_graphs"])
        return step(trainer, batch, number, **more)

    device = torch.device("cuda", 0)
    with patch.object(Trainer, "step", noted):
        rank_step.rehearse(spec, 0, device, Trace(device))
    return found


@pytest.mark.full  # `test_compiled_blocks_take_packed_documents` has a block that is not compiled again
def test_nothing_is_compiled_after_the_first_step(process: FakeCudaProcess) -> None:
    """Steps and validations have graphs for one document, for two, and for any number of them."""
    before, after = process.call(graphs_of_a_run, tiny(train__compile="true"))
    assert before == after == 6


@pytest.mark.full  # others here have code for the default capability
def test_each_capability_has_its_own_code(process: FakeCudaProcess) -> None:
    for capability in ("8.0", "10.0"):
        spec = tiny(train__compile="true", model__layers=1)
        assert compiled(row_of(process, spec, capability=capability)) > 0


def test_bytes_are_those_of_the_kernels(process: FakeCudaProcess) -> None:
    """SwiGLU reads two tensors and writes one; its backward reads three and writes two."""
    spec = tiny(train__compile="true", model__ffn=512, layout__micro_batch=1)
    kernels = row_of(process, spec)["device_work"]["kernels"]
    inner = 2 * spec.data.seq_len * spec.model.ffn
    (forward,) = [each for each in kernels if each["name"].endswith("mul_silu_4")]
    (backward,) = [each for each in kernels if "silu_backward" in each["name"]]
    assert forward["bytes"] == 3 * inner * forward["count"]
    assert backward["bytes"] == 5 * inner * backward["count"]


def without_triton(spec: RunSpec) -> list[str]:
    """Assumptions of a dry run on a machine without Triton."""
    with patch.object(rank_step, "has_triton", lambda: False):
        assumed: list[str] = api.dryrun(spec, device="cuda")["assumed"]
    return assumed


def test_without_triton_it_is_told(process: FakeCudaProcess) -> None:
    assumed = process.call(without_triton, tiny(train__compile="true", model__layers=1))
    assert any("not compiled, since Triton is not installed" in each for each in assumed)


# A large block ------------------------------------------------------------------------------------------


def planned(spec: RunSpec) -> float:
    """Bytes of memory-bound operators of a block and microbatch by the planner, but for those that products
    of tensor ranks make themselves."""
    costs = CostModel(cluster("h100", spec.layout.world_size))
    (kind,) = set(spec.model.kinds)
    blocks = costs.blocks(spec)
    own = sum(fused_passes(blocks.shape, len(blocks._maps(kind)))) if blocks._fused(kind) else 0.0
    return sum(blocks._bytes(kind)) - own


TP8: dict[str, object] = {"layout__tp": 8, "layout__dp": 1, "layout__zero": 0, "train__batch_tokens": 8192}


@pytest.mark.parametrize(("flags", "most"), [({}, 3.58e9), (TP8, 0.47e9)])
def test_a_compiled_block_moves_what_the_planner_counts(
    process: FakeCudaProcess, flags: dict[str, object], most: float
) -> None:
    """A block of llama3-8b moves 6.7 GB for 8,192 tokens if it is not compiled, on one of 8 ranks 0.78."""
    spec = large(**flags, train__compile="true")
    kernels = row_of(process, spec)["device_work"]["kernels"]
    moved = sum(each["bytes"] for each in kernels if each["name"].startswith("compiled::"))
    found = moved / spec.model.layers / spec.microbatches
    assert found < most and planned(spec) == pytest.approx(found, rel=0.1)


# Tensor parallelism -------------------------------------------------------------------------------------


def exposed(row: dict[str, Any]) -> float:
    """Seconds in which the compute stream waits for messages of the tensor axis."""
    return sum(each["seconds"] for each in row["timeline"]["exposed"] if each["axis"] == "tensor")


@pytest.mark.full  # `test_products_that_overlap_with_their_own_messages` has ranks
def test_products_hide_their_own_messages(process: FakeCudaProcess) -> None:
    """Within a host the messages of compiled blocks come and go while their products are computed."""
    eager, found = (
        row_of(process, large(**TP8, model__layers=4, train__compile=compiled), cluster="h100")
        for compiled in ("false", "true")
    )
    assert exposed(found) < 0.4 * exposed(eager)
    assert found["timeline"]["step_seconds"] < 0.98 * eager["timeline"]["step_seconds"]
    assert found["wire"] == eager["wire"] and not found["device_work"]["races"]
    apart = large(**TP8 | {"layout__tp": 16, "model__kv_heads": 16, "train__compile": "true"})
    sent = {row["name"] for row in row_of(process, apart)["device_work"]["messages"]}
    assert "shift" not in sent  # over two hosts there are products, and there are messages
