"""The planned peak of a step without a pipeline is that of a dry run.

The step is the second one, which would hold whatever the first one left. Sizes are such that a step holds
megabytes: what is counted nowhere, a router's small tensors or ids of tokens, are kilobytes. Of context ranks
the first sees most keys, and holds most.
"""

from __future__ import annotations

from dataclasses import replace
from hashlib import sha256
from itertools import product
from typing import Any

import pytest
import torch

from gpu_loss import rehearsed
from layouts import draw
from meshwright.comm.mesh import Mesh
from meshwright.data.loader import Batch
from meshwright.dryrun import rank_step as dryrun
from meshwright.dryrun.memory_tracker import FakeMemory
from meshwright.fake_cuda import library
from meshwright.fake_cuda.process import FakeCudaProcess
from meshwright.hardware.find import cluster
from meshwright.optim.offload import MomentMemory
from meshwright.parallel.fsdp_unit import UnitObserver
from meshwright.planner.cost.model import CostModel
from meshwright.planner.memory.exact import memory_model
from meshwright.planner.memory.generic import Memory
from meshwright.planner.memory.in_flight import host_activations
from meshwright.spec import RunSpec, load
from meshwright.train.step import Trainer
from meshwright.train.step_result import StepResult

CPU = torch.device("cpu")
LARGER = {"layout__pp": 1, "model__hidden": 128, "model__ffn": 384}
BY_HASH = sorted(range(128), key=lambda seed: sha256(f"peak of a dry run {seed}".encode()).digest())
QUICK = {*BY_HASH[:3], 95, 111}
SEEDS = [
    pytest.param(seed, marks=() if seed in QUICK else pytest.mark.full)
    for seed in sorted({*BY_HASH[:10], 95, 111})
]
"""In 95 and 111 a microbatch between the first and the last holds most, and experts whose gradients no
other rank holds are done before reductions that began earlier."""
LLAMA: dict[str, object] = {
    "model.preset": "llama3-8b", "model.layers": 4, "data.corpus": "synthetic", "data.seq_len": 8192,
    "layout.dp": 64, "layout.micro_batch": 1, "precision.compute": "bf16",
}  # fmt: skip


class SecondStep(Trainer):
    """Takes a step before the one whose peak counts."""

    def __init__(self, spec: RunSpec, mesh: Mesh, observer: UnitObserver, memory: MomentMemory) -> None:
        super().__init__(spec, mesh, observer, memory)
        assert isinstance(observer, dryrun._BufferAccount)
        self._memory: FakeMemory = observer._memory

    def step(
        self, batch: Batch, number: int, following: Batch | None = None, *_: Any, **__: Any
    ) -> StepResult:
        super().step(batch, number, following)
        self._memory.restart()
        return super().step(following or batch, number + 1)


def planned(spec: RunSpec) -> Memory:
    (found,) = memory_model(CostModel(cluster("h100", spec.layout.world_size))).ranks(spec)
    return found


def llama(**flags: object) -> RunSpec:
    given = LLAMA | {key.replace("__", "."): value for key, value in flags.items()}
    return load(None, [(key, str(value)) for key, value in given.items()])


@pytest.mark.parametrize("seed", SEEDS)
def test_a_plan_has_the_peak_of_a_dry_run(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dryrun, "Trainer", SecondStep)
    spec, rank = draw(seed, 256, **LARGER)
    layout = spec.layout
    first = rank - rank // layout.tp % layout.cp * layout.tp
    found = rehearsed(spec, first)
    assert planned(spec).allocated == pytest.approx(found.peak, rel=0.04)


@pytest.mark.parametrize("seed", [2, 7, pytest.param(14, marks=pytest.mark.full)])
def test_a_plan_of_further_tokens_has_the_peak_of_a_dry_run(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dryrun, "Trainer", SecondStep)
    spec, rank = draw(seed, 256, **LARGER, model__mtp_num_layers=1)
    assert spec.layout.cp == 1
    assert planned(spec).allocated == pytest.approx(rehearsed(spec, rank).peak, rel=0.04)


def test_gradients_of_a_step_take_no_room_in_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """While its head holds most, there are none yet: states are whole, and a microbatch is the whole step."""
    spec = llama(layout__dp=2, layout__zero=0, train__batch_tokens=2 * 8192, model__layers=2)
    first = rehearsed(spec)
    monkeypatch.setattr(dryrun, "Trainer", SecondStep)
    second = rehearsed(spec)
    assert second.by_component["gradients"] == first.by_component["gradients"]
    assert second.peak == pytest.approx(first.peak, rel=1e-3)


STREAM: dict[str, object] = {"outer__fragments": 2, "outer__delay": 2}
EXCHANGES: list[tuple[int, dict[str, object]]] = [
    *product((0, 1, 3), ({}, STREAM)),
    (1, {"outer__format": "fp4"}),
    (3, {"outer__format": "int8", "outer__error_decay": 0.9, "outer__delay": 2}),
    (3, {"outer__top_k": 0.05, "outer__format": "int4"}),
]
"""ZeRO stages, and exchanges."""
QUICK_EXCHANGES = [(0, STREAM), (3, {}), *EXCHANGES[-3:]]


@pytest.mark.parametrize(
    ("zero", "outer"),
    [
        pytest.param(*each, id=str(each), marks=() if each in QUICK_EXCHANGES else pytest.mark.full)
        for each in EXCHANGES
    ],
)
def test_a_plan_of_islands_has_the_peak_of_a_dry_run(
    zero: int, outer: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a delay, of the step after the one that begins an exchange; without, of that step."""
    if "outer__delay" in outer:
        monkeypatch.setattr(dryrun, "Trainer", SecondStep)
    tokens = 64 * 8192 * 2
    spec = llama(
        layout__replicate=2,
        layout__dp=32,
        layout__zero=zero,
        outer__every=8,
        train__batch_tokens=tokens,
        model__layers=2,
        **outer,
    )
    found = rehearsed(spec)
    held = planned(spec)
    assert held.optimiser > 2.4 * planned(spec.of_step_group()).optimiser / 2
    assert held.allocated == pytest.approx(found.peak, rel=0.01)


@pytest.mark.parametrize(
    ("zero", "microbatches", "policy"),
    [
        (3, 1, "none"),
        (3, 1, "selective"),
        (3, 1, "full"),
        (3, 2, "full"),
        (2, 1, "selective"),
        (1, 2, "none"),
    ],
)
def test_a_plan_of_a_large_model_does(zero: int, microbatches: int, policy: str) -> None:
    """So do the other policies of each, and ZeRO-0 in its second step."""
    tokens = 64 * 8192 * microbatches
    spec = llama(layout__zero=zero, recompute__policy=policy, train__batch_tokens=tokens)
    found = rehearsed(spec)
    assert planned(spec).allocated == pytest.approx(found.peak, rel=0.01)


@pytest.mark.parametrize(
    ("zero", "microbatches", "policy"), [(3, 1, "none"), (2, 2, "selective"), (1, 1, "full")]
)
def test_a_plan_with_offloaded_activations_does(zero: int, microbatches: int, policy: str) -> None:
    """On the device, and in the host's memory."""
    given = {
        "layout__zero": zero,
        "recompute__policy": policy,
        "train__batch_tokens": 64 * 8192 * microbatches,
    }
    spec = llama(**given, train__offload_activations="host")
    found = rehearsed(spec)
    held = planned(spec)
    assert held.allocated == pytest.approx(found.peak, rel=0.01)
    assert host_activations(spec) == pytest.approx(found.offloaded, rel=0.01)
    assert held.allocated < planned(llama(**given)).allocated


def test_the_terms_are_those_of_one_moment() -> None:
    """At the last block's backward: nothing is reduced yet, so gradients are none."""
    spec = llama(layout__zero=3, recompute__policy="full", train__batch_tokens=64 * 8192)
    found, held = planned(spec), rehearsed(spec).by_component
    assert found.gradients == held["gradients"] == 0
    assert found.buffers == pytest.approx(held["buffers"], rel=1e-3)
    assert found.activations + found.logits == pytest.approx(
        held["activations"] + held["temporaries"], rel=1e-3
    )


def test_adding_formats_takes_a_copy_on_a_cpu() -> None:
    spec = llama(layout__zero=3, recompute__policy="full", train__batch_tokens=64 * 8192)
    on = cluster("h100", 64)
    cpu = replace(on, device=replace(on.device, kind="cpu"))
    (there,) = memory_model(CostModel(cpu)).ranks(spec)
    assert there.allocated > planned(spec).allocated


def peak_on_gpu(spec: RunSpec) -> int:
    """The peak of a dry run, where a GPU is faked."""
    return dryrun.rehearse(spec, 0, torch.device("cuda")).peak


@pytest.mark.skipif(library.torch_build().toolkit is not None, reason="torch is built for GPUs")
def test_a_plan_has_the_peak_of_a_dry_run_on_a_faked_gpu(process: FakeCudaProcess) -> None:
    """Runs with one chunk of logits, several, a part of the vocabulary, wider and capped logits, and answers'
    log-probabilities."""
    long = {"data__seq_len": 32768, "model__max_seq_len": 32768, "layout__dp": 2, "layout__zero": 3}
    runs: list[dict[str, object]] = [
        {"layout__zero": 3},
        {"layout__zero": 1, "train__batch_tokens": 2 * 64 * 8192, "recompute__policy": "none"},
        long | {"train__batch_tokens": 2 * 32768},
        {"layout__dp": 1, "layout__tp": 8, "layout__zero": 0, "train__batch_tokens": 2 * 8192},
        {"layout__zero": 3, "precision__compute": "fp32", "model__kv_heads": 32},
        {"layout__zero": 3, "model__logit_softcap": 30.0},
        {"layout__zero": 3, "preference__loss": "dpo", "lora__rank": 4},
    ]
    for flags in runs:
        masked = "preference__loss" in flags
        given = {"train__batch_tokens": 64 * 8192} | flags
        spec = llama(**given, data__document_mask=str(masked).lower())
        found = process.call(peak_on_gpu, spec)
        assert planned(spec).allocated == pytest.approx(found, rel=0.01), flags
