"""What recomputation keeps and what it computes again, by counting operators and saved bytes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from meshwright.model.decoder import Decoder
from meshwright.model.init import init_whole_
from meshwright.parallel.recompute import apply_recompute
from meshwright.spec import load
from meshwright.spec.parts import FullRecompute, NoRecompute, RecomputeSpec, SelectiveRecompute

LAYERS, LINEARS = 3, 7


class Count(TorchDispatchMode):
    """Number of calls of each operator."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[str, int] = {}

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = operator._schema.name
        self.calls[name] = self.calls.get(name, 0) + 1
        return operator(*args, **(kwargs or {}))


def run(recompute: RecomputeSpec) -> tuple[dict[str, int], int, list[torch.Tensor]]:
    """Operators called in forward and backward, bytes kept between them, and the gradients."""
    spec = load(None, [("model.layers", str(LAYERS)), ("model.vocab_size", "64")]).model
    decoder = init_whole_(Decoder(spec), 0)
    apply_recompute(decoder.blocks, recompute)
    generator = torch.Generator().manual_seed(0)
    tokens, targets = torch.randint(0, 64, (2, 2, 32), generator=generator)
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with Count() as count:
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            loss = decoder.loss(tokens, targets)
        loss.backward()
    gradients = [p.grad for p in decoder.parameters() if p.grad is not None]
    return count.calls, sum(kept.values()), gradients


ATTENTION = "meshwright::blocked_attention"


@pytest.mark.parametrize(
    ("recompute", "matmuls", "attentions"),
    [
        (NoRecompute(), 1, 1),
        (FullRecompute(), 2, 2),
        (SelectiveRecompute(), 1, 1),
        (SelectiveRecompute(save=("attention",)), 2, 1),
        (SelectiveRecompute(save=("matmul",)), 1, 2),
    ],
    ids=["none", "full", "selective", "attention", "matmul"],
)
def test_what_runs_again(recompute: RecomputeSpec, matmuls: int, attentions: int) -> None:
    calls, _, gradients = run(recompute)
    plain, _, expected = run(NoRecompute())
    again = calls["aten::mm"] - plain["aten::mm"]
    # The last linear of a block need not run again: nothing after it needs its output.
    assert again in range((matmuls - 1) * LAYERS * (LINEARS - 1), (matmuls - 1) * LAYERS * LINEARS + 1)
    assert (again > 0) == (matmuls == 2)
    assert calls[ATTENTION] == attentions * LAYERS
    for found, wanted in zip(gradients, expected, strict=True):
        assert torch.equal(found, wanted)


def test_full_keeps_least() -> None:
    """Selective keeps operators' outputs in a cache of its own, which hooks on saved tensors do not see."""
    _, none, _ = run(NoRecompute())
    _, full, _ = run(FullRecompute())
    assert full < none / 3
