"""Saved and recomputed operators under each policy, by counting operators and saved bytes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters
from torch.utils._python_dispatch import TorchDispatchMode

from meshwright.kernels.attention_flash import Packed, pack
from meshwright.model.decoder import Decoder
from meshwright.model.hooks import Hooks
from meshwright.model.init import init_whole_
from meshwright.parallel.recompute import apply_recompute
from meshwright.spec import load
from meshwright.spec.sections import FullRecompute, NoRecompute, RecomputeSpec, SelectiveRecompute
from varlen import exact_kernel

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


def as_on_cuda(
    queries: int,
    _keys: int,
    window: int | None,
    documents_BT: torch.Tensor | None,
    like: torch.Tensor,
    _head_dim: int,
) -> Packed:
    """Attention intervals of a batch that flash attention takes."""
    return pack(documents_BT, like.shape[0], queries, window, like.device)


def make(recompute: RecomputeSpec, packed: bool) -> Decoder:
    sizes = {"layers": LAYERS, "hidden": 64, "ffn": 96, "heads": 4, "kv_heads": 2, "vocab_size": 64}
    spec = load(None, [(f"model.{key}", str(value)) for key, value in sizes.items()]).model
    decoder = init_whole_(Decoder(spec, Hooks(mask=as_on_cuda) if packed else None), 0)
    apply_recompute(decoder.blocks, recompute)
    return decoder


def run(recompute: RecomputeSpec, packed: bool = False) -> tuple[dict[str, int], int, list[torch.Tensor]]:
    """Operators called in forward and backward, bytes kept between them, and the gradients."""
    decoder = make(recompute, packed)
    generator = torch.Generator().manual_seed(0)
    tokens, targets = torch.randint(0, 64, (2, 2, 32), generator=generator)
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with Count() as count, exact_kernel():
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            loss = decoder.loss(tokens, targets)
        loss.backward()
    gradients = [p.grad for p in decoder.parameters() if p.grad is not None]
    return count.calls, sum(kept.values()), gradients


ATTENTION = {False: "meshwright::blocked_attention", True: "meshwright::varlen_attention"}


@pytest.mark.parametrize("packed", [False, True], ids=["blocked", "packed"])
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
def test_what_runs_again(recompute: RecomputeSpec, matmuls: int, attentions: int, packed: bool) -> None:
    calls, _, gradients = run(recompute, packed)
    plain, _, expected = run(NoRecompute(), packed)
    again = calls["aten::mm"] - plain["aten::mm"]
    # The last linear of a block need not run again: nothing after it needs its output.
    assert again in range((matmuls - 1) * LAYERS * (LINEARS - 1), (matmuls - 1) * LAYERS * LINEARS + 1)
    assert (again > 0) == (matmuls == 2)
    assert calls[ATTENTION[packed]] == attentions * LAYERS
    for found, wanted in zip(gradients, expected, strict=True):
        assert torch.equal(found, wanted)


@pytest.mark.parametrize(
    ("recompute", "attentions"),
    [
        pytest.param(NoRecompute(), 1, marks=pytest.mark.full),
        pytest.param(FullRecompute(), 2, marks=pytest.mark.full),
        (SelectiveRecompute(), 1),
    ],
    ids=["none", "full", "selective"],
)
def test_compiled_blocks_take_packed_documents(recompute: RecomputeSpec, attentions: int) -> None:
    """Each block is one graph, other documents make no new ones after the second, and the policy holds."""
    torch.compiler.reset()
    counters.clear()
    decoders = [make(recompute, packed=True) for _ in range(2)]
    for block in decoders[1].blocks:
        block.forward = torch.compile(block.forward, backend="aot_eager", fullgraph=True)
    draw = torch.Generator().manual_seed(0)
    for chance in (0.05, 0.2, 0.4, 0.7):
        tokens, targets = torch.randint(0, 64, (2, 2, 32), generator=draw)
        documents = (torch.rand(2, 32, generator=draw) < chance).cumsum(1)
        found = []
        for decoder in decoders:
            with exact_kernel() as calls:
                loss = decoder.loss(tokens, targets, None, documents)
                found.append(torch.autograd.grad(loss, list(decoder.parameters())))
            assert calls == {"forward": attentions * LAYERS, "backward": LAYERS}
        for eager, compiled in zip(*found, strict=True):
            torch.testing.assert_close(eager, compiled, rtol=1e-4, atol=1e-4)
    assert counters["stats"]["unique_graphs"] <= 2


def test_full_keeps_least() -> None:
    """Selective keeps operators' outputs in a cache of its own, which hooks on saved tensors do not see."""
    _, none, _ = run(NoRecompute())
    _, full, _ = run(FullRecompute())
    assert full < none / 3
