"""Microbatches by graphs give the numbers of those without, to the bit: on processors by a stand-in of graphs."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch.utils._python_dispatch import _disable_current_modes

import small
from meshwright.comm.mesh import Mesh, _Watched
from meshwright.comm.shared_memory_group import SharedMemoryGroup
from meshwright.kernels import elementwise_cpu
from meshwright.model import grouped_mm, moe
from meshwright.spec import RunSpec, UserError
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
EXPERTS = {"model__moe__experts": 4, "model__moe__top_k": 2, "model__moe__ffn": 16, "model__moe__aux_loss": 0.1,
           "precision__compute": "bf16"}  # fmt: skip
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
    """What gloo copies as it waits is part of the message, and no operator."""
    with _disable_current_modes():
        _wait(self)


def steps_of(mesh: Mesh, spec: RunSpec, graphs: bool, steps: int = STEPS) -> tuple[list[Step], list[Any], list[int]]:
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
        sent.append({key: mesh.wire.calls[key] for key in sorted(mesh.wire.calls)})
        if number == 4:  # what is computed aside changes nothing, and is not recorded
            with aside(trainer):
                trainer.gradients(batches[0])
    kept = [unit.stored.clone() for unit in trainer.states.units]
    return found, [*kept, trainer.layers_balance(), sent], [g.replays for c in captures for g in c.graphs]


@pytest.mark.parametrize("name", CASES)
def test_graphs_change_no_bit(ranks: Ranks, name: str) -> None:
    spec = spec_of(**CASES[name])
    pairs = [ranks.run(spec.layout, steps_of, spec, graphs) for graphs in (False, True)]
    for (wanted, parameters, _), (found, others, replays) in zip(*pairs, strict=True):
        assert found == wanted and len({loss for loss, _, _ in wanted}) == STEPS
        assert sum(replays) >= 2 * spec.microbatches, replays
        assert len(parameters) == len(others)
        for mine, other in zip(parameters, others, strict=True):
            assert torch.equal(mine, other) if isinstance(mine, torch.Tensor) else mine == other
