"""CUDA graphs of microbatches on a CUDA device: losses and parameters are those without, to the bit."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from cuda_runs import mesh_of, spec_of

import small
from meshwright.spec import RunSpec
from meshwright.train.cuda_graphs import GraphsOfMicrobatches
from meshwright.train.step import Trainer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine"),
]
STEPS = 5
CASES: dict[str, dict[str, object]] = {
    "fp32": {"precision__compute": "fp32"},
    "bf16": {"precision__compute": "bf16"},
    "fp16": {"precision__compute": "fp16", "precision__loss_scale": 256, "precision__loss_scale_window": 3},
    "compiled": {"precision__compute": "bf16", "train__compile": "true"},
    "one microbatch": {"precision__compute": "bf16", "layout__micro_batch": 16},
    "recomputed": {"precision__compute": "bf16", "recompute__policy": "full"},
    "experts": {"precision__compute": "bf16", "model__preset": "moe-tiny"},
    "adapters": {"precision__compute": "bf16", "lora__rank": 4},
}


def steps_of(spec: RunSpec) -> tuple[list[tuple[float, float]], list[torch.Tensor]]:
    """(loss, norm) of each step, and the parameters after the last."""
    mesh = mesh_of(spec)
    trainer = Trainer(spec, mesh)
    trainer.initialise()
    trainer.compile_stages(evaluate=False)
    batches, found = small.first_batches(spec, mesh, STEPS), []
    for number, batch in enumerate(batches, 1):
        result = trainer.step(batch, number, batches[number] if number < STEPS else None)
        found.append((result.loss, result.grad_norm))
    if spec.train.cuda_graphs:
        assert isinstance(trainer.microbatches, GraphsOfMicrobatches) and trainer.microbatches._graphs
    kept = [unit.stored.clone() for unit in trainer.states.units]
    trainer.microbatches.forget()
    return found, kept


@pytest.mark.parametrize("name", CASES)
def test_graphs_change_no_bit(world: dist.ProcessGroup, name: str) -> None:
    given = {"data__document_mask": "false", "layout__micro_batch": 4} | CASES[name]
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        plain, graphs = (steps_of(spec_of(**given, train__cuda_graphs=on)) for on in ("false", "true"))
    finally:
        torch.use_deterministic_algorithms(False)
    assert plain[0] == graphs[0] and len({loss for loss, _ in plain[0]}) == STEPS
    assert all(map(torch.equal, plain[1], graphs[1]))
