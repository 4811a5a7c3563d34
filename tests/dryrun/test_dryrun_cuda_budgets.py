"""Launches, copies and waits of steps on a faked GPU, whose numbers may only fall."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
import torch

from covering import some
from faked_gpu import dryrun_on
from meshwright.dryrun.rank_step import rehearse
from meshwright.dryrun.trace import Trace
from meshwright.dryrun.trace_counts import LAUNCHED
from meshwright.fake_cuda import library
from meshwright.fake_cuda.process import FakeCudaProcess
from meshwright.spec import RunSpec, load

pytestmark = pytest.mark.skipif(
    library.torch_build().toolkit is not None, reason="a GPU is faked for torch's build for CPUs only"
)
RECORDED = tomllib.loads((Path(__file__).parent / "cuda_counts.toml").read_text())


LARGE: dict[str, object] = {
    "model.layers": 4, "data.corpus": "synthetic", "data.seq_len": 4096, "train.batch_tokens": 65536,
    "layout.micro_batch": 1, "precision.compute": "bf16",
}  # fmt: skip
BUDGETS: dict[str, dict[str, object]] = {
    "llama3-8b, dp 8, ZeRO-3": {"model.preset": "llama3-8b", "layout.dp": 8, "layout.zero": 3},
    "llama3-8b in fp8-blockwise, dp 8, ZeRO-3": {
        "model.preset": "llama3-8b", "layout.dp": 8, "layout.zero": 3, "precision.compute": "fp8-blockwise",
    },
    "mixtral-8x7b in fp8-rowwise, ep 8": {
        "model.preset": "mixtral-8x7b", "layout.dp": 8, "layout.ep": 8, "layout.zero": 3,
        "recompute.policy": "full", "precision.compute": "fp8-rowwise",
    },
    "llama3-8b, dp 8, ZeRO-3, compiled": {
        "model.preset": "llama3-8b", "layout.dp": 8, "layout.zero": 3, "train.compile": "true",
    },
    "llama3-8b, tp 8": {"model.preset": "llama3-8b", "layout.tp": 8, "train.batch_tokens": 8192},
    "llama3-70b, tp 8, pp 4": {
        "model.preset": "llama3-70b", "layout.tp": 8, "layout.pp": 4, "train.batch_tokens": 16384,
    },
    "mixtral-8x7b, ep 8": {
        "model.preset": "mixtral-8x7b", "layout.dp": 8, "layout.ep": 8, "layout.zero": 3,
        "recompute.policy": "full",
    },
    "mixtral-8x7b, ep 8, bounded messages": {
        "model.preset": "mixtral-8x7b", "layout.dp": 8, "layout.ep": 8, "layout.zero": 3,
        "layout.expert_buffer_factor": 1.25, "recompute.policy": "full",
    },
}  # fmt: skip


QUICK = ("llama3-8b, dp 8, ZeRO-3", "mixtral-8x7b in fp8-rowwise, ep 8")


@pytest.mark.parametrize("name", some(BUDGETS, QUICK))
def test_what_a_step_launches_only_falls(process: FakeCudaProcess, name: str) -> None:
    spec = load(None, [(key, str(value)) for key, value in (LARGE | BUDGETS[name]).items()])
    (row,) = dryrun_on(process, spec)["ranks"]
    work, step = row["device_work"], row["counts"]["step"]
    copied = {each["direction"]: each for each in work["copies"]}
    found = {
        "operators_a_block": step["kernels_a_block"],
        "launches": work["launches"],
        "host_waits": sum(each["count"] for each in work["host_waits"]),
        "collectives": step["collectives"],
        "copied_bytes": copied["device to device"]["bytes"],
        "copies": copied["device to device"]["count"],
        "host_copies": sum(copied[each]["count"] for each in ("host to device", "device to host")),
        "empty_zero": sum(each["count"] for each in work["empty"] if each["name"] == "aten::zero_"),
    }
    if spec.train.compile:
        found |= {"graphs": step["graphs"], "elementwise_a_block": work["elementwise_a_block"]}
    recorded = RECORDED.get(name, {})
    grown = {key: value for key, value in found.items() if value > recorded.get(key, -1)}
    assert not grown, f"more than cuda_counts.toml has for '{name}': {grown}"
    assert found == recorded, f"less than cuda_counts.toml has for '{name}': write the new numbers there"


HEAD: dict[str, object] = LARGE | {
    "model.preset": "llama3-8b", "model.layers": 1, "data.seq_len": 8192, "train.batch_tokens": 131072,
    "layout.dp": 8, "layout.zero": 3,
}  # fmt: skip
"""The head of llama3-8b, with two microbatches of 8,192 tokens."""


def work_of_head(spec: RunSpec) -> tuple[int, float, set[str]]:
    """Launches of a step in its head, but for products; bytes of those that compute; and their names."""
    trace = Trace(torch.device("cuda", 0))
    rehearse(spec, 0, torch.device("cuda"), trace)
    found = [e for e in trace.events if e.module == "head" and e.kind in LAUNCHED and e.work is None]
    computing = [e for e in found if not e.direction]  # others copy parameters and gradients of ZeRO
    return len(found), sum(e.bytes for e in computing), {e.name.partition("::")[2] for e in computing}


def test_a_head_reads_and_writes_its_logits_once(process: FakeCudaProcess) -> None:
    """With torch's operators, piece by piece: 1,294 launches, 91 GB."""
    spec = load(None, [(key, str(value)) for key, value in HEAD.items()])
    launches, moved, names = process.call(work_of_head, spec)
    logits = 2 * 2 * 8192 * spec.model.vocab_size
    assert launches < 60 and 2 * logits <= moved < 12e9 and "cross_entropy_" in names


PARTS = {"softmax_statistics", "softmax_gradient_"}


@pytest.mark.parametrize(
    ("flags", "launched", "times", "kernels"),
    [
        ({"layout.dp": 1, "layout.tp": 8, "train.batch_tokens": 16384}, 60, 3, PARTS),
        ({"model.logit_softcap": 30.0}, 60, 2, {"cross_entropy_"}),
        ({"precision.compute": "fp32"}, 60, 2, {"cross_entropy_"}),
        ({"preference.loss": "dpo", "lora.rank": 4}, 300, 4, PARTS),
    ],
    ids=("tensor ranks", "soft cap", "fp32", "answers"),
)
def test_other_heads_take_the_kernels(
    process: FakeCudaProcess, flags: dict[str, object], launched: int, times: int, kernels: set[str]
) -> None:
    """Parts of a vocabulary read their logits twice; so do answers, whose reference's are read once more."""
    spec = load(None, [(key, str(value)) for key, value in (HEAD | flags).items()])
    launches, moved, names = process.call(work_of_head, spec)
    width = 4 if spec.precision.compute == "fp32" else 2
    logits = width * 2 * 8192 * spec.model.vocab_size / spec.layout.tp
    norms = 24 * width * 2 * 8192 * spec.model.hidden
    assert launches < launched and kernels <= names
    assert times * logits <= moved <= times * logits + norms
