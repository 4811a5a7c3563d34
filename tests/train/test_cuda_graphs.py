"""Microbatches by graphs give the numbers of those without, to the bit: here by a stand-in of graphs."""

from __future__ import annotations

import re
import warnings
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
from torch.utils._python_dispatch import _disable_current_modes

import small
from meshwright.api.engine_spec import check_runnable
from meshwright.comm.mesh import Mesh
from meshwright.comm.shared_memory_group import SharedMemoryGroup
from meshwright.comm.traffic_counter import _Watched
from meshwright.kernels import elementwise_cpu
from meshwright.model import grouped_mm, moe
from meshwright.spec import RunSpec, UserError
from meshwright.train import cuda_graphs
from meshwright.train.callbacks import Observers
from meshwright.train.cuda_graphs import GraphsOfMicrobatches
from meshwright.train.guard.aside import aside
from meshwright.train.open_run import open_run
from meshwright.train.step import Trainer
from ranks import Ranks
from taped_graphs import TapedCapture

BASE = {
    "model.layers": 3, "model.vocab_size": 61, "data.corpus": "synthetic", "data.seq_len": 16,
    "data.document_mask": "false", "train.batch_tokens": 8 * 16, "layout.micro_batch": 2, "train.lr": 0.01,
    "train.warmup_steps": 1, "train.steps": 8,
}  # fmt: skip
EXPERTS = {"model__moe__experts": 4, "model__moe__top_k": 2, "model__moe__ffn": 16,
           "model__moe__aux_loss": 0.1, "precision__compute": "bf16"}  # fmt: skip
STEPS = 6
spec_of = partial(small.spec_of, BASE)
CASES: dict[str, dict[str, object]] = {
    "one device": {},
    "one microbatch": {"layout__micro_batch": 8},
    "two microbatches": {"layout__micro_batch": 4},
    "bf16": {"precision__compute": "bf16"},
    "fp16": {"precision__compute": "fp16", "precision__loss_scale_window": 2},
    "tied": {"model__tied": "true", "train__clip": 0.1},
    "experts": EXPERTS,
    "bounded experts": EXPERTS | {"layout__dp": 2, "layout__ep": 2, "layout__expert_buffer_factor": 4,
                                  "layout__zero": 1, "layout__micro_batch": 1},
    "adapters": {"lora__rank": 4},
    "growing batch": {"train__batch_warmup": f"{4 * 16}:{8 * 16}"},
    "recomputed": {"recompute__policy": "full"},
    "fp8": {"precision__compute": "fp8", "model__hidden": 32, "model__ffn": 64, "model__head_dim": 16},
    "ZeRO-0": {"layout__dp": 2, "layout__micro_batch": 1},
    "ZeRO-1": {"layout__dp": 2, "layout__zero": 1, "layout__micro_batch": 1, "precision__compute": "bf16"},
    "ZeRO-2": {"layout__dp": 2, "layout__zero": 2, "layout__micro_batch": 1, "precision__compute": "bf16"},
    "hybrid": {"layout__dp": 2, "layout__replicate": 2, "layout__zero": 2, "layout__micro_batch": 1},
    "tensor": {"layout__tp": 2},
    "tensor and data": {"layout__tp": 2, "layout__dp": 2, "layout__zero": 1},
}  # fmt: skip

Step = tuple[float, float, float]


def _wait(self: _Watched, _wait: Any = _Watched.wait) -> None:
    """Wait for a message; what gloo copies meanwhile is part of it, and no operator."""
    with _disable_current_modes():
        _wait(self)


def steps_of(
    mesh: Mesh, spec: RunSpec, graphs: bool, steps: int = STEPS
) -> tuple[list[Step], list[Any], list[int]]:
    """(loss, norm, loss scale) of each step, this rank's parameters after the last, with routers' statistics,
    and the replays of each graph."""
    # What is not called through torch's dispatcher is no operator: kernels in C++, and shared memory. Experts
    # are computed by one operator, as on a GPU.
    with ExitStack() as stack:
        stack.enter_context(patch.object(elementwise_cpu, "takes", lambda *_: False))
        stack.enter_context(patch.object(SharedMemoryGroup, "joined", lambda _: False))
        stack.enter_context(patch.object(_Watched, "wait", _wait))
        for module in (grouped_mm, moe):
            stack.enter_context(patch.object(module, "one_kernel", lambda _: True))
        return _steps_of(mesh, spec, graphs, steps)


def _steps_of(mesh: Mesh, spec: RunSpec, graphs: bool, steps: int) -> tuple[list[Step], list[Any], list[int]]:
    trainer = Trainer(spec, mesh)
    captures: list[TapedCapture] = []

    def new_capture() -> TapedCapture:
        captures.append(TapedCapture())
        return captures[-1]

    if graphs:
        trainer.microbatches = GraphsOfMicrobatches(mesh, trainer.pipeline, trainer.states, new_capture)
    trainer.initialise()
    for part in trainer.parts:
        part.begin()
    batches, found, sent = small.first_batches(spec, mesh, steps), [], []
    for number, batch in enumerate(batches, 1):
        mesh.wire.clear()
        following = batches[number] if number < steps else None
        result = trainer.step(batch, number, following)
        found.append((result.loss, result.grad_norm, result.loss_scale))
        if number not in (2, 4):  # then what a validation has gathered is gathered again
            sent.append({key: mesh.wire.calls[key] for key in sorted(mesh.wire.calls)})
        if number in (1, 3):  # a validation leaves parameters gathered
            trainer.nll(batches[0])
        if number == 4:  # what is computed aside changes nothing, and is not recorded
            seen = Mock(return_value=None)
            hook = trainer.decoder.embed.register_forward_hook(seen)
            with aside(trainer):
                trainer.gradients(batches[0])
            hook.remove()
            assert seen.called
    kept = [unit.stored.clone() for unit in trainer.states.units]
    return found, [*kept, trainer.layers_balance(), sent], [g.replays for c in captures for g in c.graphs]


LEFT_OUT = (
    *("one microbatch", "two microbatches", "bf16", "tied", "experts", "recomputed", "ZeRO-0", "hybrid"),
    *("tensor", "one device", "ZeRO-1", "growing batch"),
)
"""Those whose choices others make too, or that change nothing of a graph."""
"""Cases whose choices others make, too: four microbatches or one, and tensor ranks beside data ranks."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.full if name in LEFT_OUT else ()) for name in CASES]
)
def test_graphs_change_no_bit(ranks: Ranks, name: str) -> None:
    spec = spec_of(**CASES[name])
    pairs = [ranks.run(spec.layout, steps_of, spec, graphs) for graphs in (False, True)]
    for (wanted, parameters, _), (found, others, replays) in zip(*pairs, strict=True):
        assert found == wanted and len({loss for loss, _, _ in wanted}) == STEPS
        assert sum(replays) >= 2 * spec.microbatches, replays
        assert len(parameters) == len(others)
        for mine, other in zip(parameters, others, strict=True):
            assert torch.equal(mine, other) if isinstance(mine, torch.Tensor) else mine == other


def replays_by_step(mesh: Mesh, spec: RunSpec, changes: dict[int, float]) -> tuple[list[int], list[str]]:
    """The replays of each step, before some of which the loss scale changes, and the warnings of all."""
    trainer, capture = Trainer(spec, mesh), TapedCapture()
    trainer.microbatches = GraphsOfMicrobatches(mesh, trainer.pipeline, trainer.states, lambda: capture)
    trainer.initialise()
    (batch,) = small.first_batches(spec, mesh, 1)
    found, replays = [], 0
    with warnings.catch_warnings(record=True) as warned:
        for number in range(1, STEPS + 1):
            trainer.loss_scale.value = changes.get(number, trainer.loss_scale.value)
            trainer.gradients(batch)
            trainer.states.end_step()
            before, replays = replays, sum(graph.replays for graph in capture.graphs)
            found.append(replays - before)
    return found, [str(each.message) for each in warned]


def test_a_step_with_other_numbers_is_run_without_graphs(ranks: Ranks) -> None:
    spec = spec_of(precision__compute="fp64")
    cases: list[tuple[dict[int, float], list[int]]] = [
        ({}, [0, 4, 4, 4, 4, 4]),
        ({4: 2.0}, [0, 4, 4, 0, 4, 4]),
        ({3: 2.0, 4: 4.0}, [0, 4, 0, 0, 4, 4]),
    ]
    for changes, wanted in cases:
        assert ranks.run(spec.layout, replays_by_step, spec, changes) == [(wanted, [])]


def changing(mesh: Mesh, spec: RunSpec) -> list[str]:
    with patch.object(cuda_graphs, "MOST_CHANGES", 4):
        return replays_by_step(mesh, spec, {number: 2.0**number for number in range(STEPS + 1)})[1]


def test_a_run_that_never_replays_is_told(ranks: Ranks) -> None:
    spec = spec_of(precision__compute="fp64")
    (told,) = ranks.run(spec.layout, changing, spec)
    assert len(told) == 1 and told[0].startswith("train.cuda_graphs: true, but each of 4 steps in a row")


def refused(mesh: Mesh, spec: RunSpec, out: Path) -> str:
    with pytest.raises(UserError) as raised:
        open_run(spec, mesh, out, Observers([]))
    return str(raised.value)


def test_a_cpu_has_no_graphs(ranks: Ranks, tmp_path: Path) -> None:
    spec = spec_of(train__cuda_graphs="true")
    (words,) = ranks.run(spec.layout, refused, spec, tmp_path)
    assert words.startswith("train.cuda_graphs: true has no effect on a CPU") and "false" in words


def test_what_cannot_be_captured_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    class Refusing:
        def __init__(self, *_: object, **__: object) -> None:
            pass

        def __enter__(self) -> None:
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing\nmore")

        def __exit__(self, *_: object) -> None:
            pass

    for name in ("graph_pool_handle", "Stream", "CUDAGraph"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    monkeypatch.setattr(torch.cuda, "graph", Refusing)
    with pytest.raises(
        UserError, match="not permitted when stream is capturing; `meshwright dryrun"
    ) as raised:
        cuda_graphs.CudaCapture()(lambda: None)
    assert "\n" not in str(raised.value)


def test_an_engine_takes_no_graphs() -> None:
    with pytest.raises(UserError, match=r"train\.cuda_graphs: true does not go with an engine"):
        check_runnable(spec_of(train__cuda_graphs="true"))


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ({"layout__pp": 2}, "layout.pp = 2"),
        ({"layout__cp": 2}, "layout.cp = 2"),
        ({"layout__dp": 2, "layout__zero": 3}, "layout.zero = 3"),
        (EXPERTS | {"layout__dp": 2, "layout__ep": 2}, "layout.ep = 2"),
        (EXPERTS | {"model__moe__capacity_factor": 1.5}, "model.moe.capacity_factor = 1.5"),
        (EXPERTS | {"precision__compute": "fp32"}, "experts in fp32"),
        ({"data__document_mask": "true"}, "data.document_mask = true"),
        ({"model__sliding_window": 8}, "windows of 8 tokens"),
        ({"model__mtp_num_layers": 1}, "model.mtp_num_layers = 1"),
        ({"train__offload_activations": "host"}, "train.offload_activations = 'host'"),
        ({"lora__rank": 4, "lora__dropout": 0.1}, "lora.dropout = 0.1"),
        ({"lora__rank": 4, "lora__quantise": "int8", "model__hidden": 64, "model__ffn": 64}, "lora.quantise"),
        ({"lora__rank": 4, "preference__loss": "dpo", "data__document_mask": "true"}, "[preference]"),
        ({"layout__replicate": 2, "outer__every": 2}, "[outer]"),
    ],
)  # fmt: skip
def test_what_graphs_cannot_hold_is_refused(flags: dict[str, object], told: str) -> None:
    spec_of(**flags)
    with pytest.raises(
        UserError, match=re.escape(f"train.cuda_graphs: true does not go with {told}")
    ) as raised:
        spec_of(**flags, train__cuda_graphs="true")
    assert "; give" in str(raised.value) and "train.cuda_graphs = false" in str(raised.value)
