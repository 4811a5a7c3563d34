"""Attention on a CUDA device: flash attention over sequences gives what tiles and the dense mask give."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from meshwright.hardware.attention_backend import AttentionBackends
from meshwright.kernels.attention_backend import attention_backend
from meshwright.kernels.attention_flash import FLASH, Packed, part_operators
from meshwright.kernels.attention_intervals import attention_intervals
from meshwright.kernels.partial_attention import TILES
from meshwright.kernels.score_changes import ScoreChanges
from meshwright.model.attention import attend, attention_mask
from meshwright.model.decoder import Decoder
from meshwright.model.init import init_whole_
from meshwright.parallel.context_parallel import zigzag
from meshwright.parallel.recompute import apply_recompute
from meshwright.spec import UserError, load
from meshwright.spec.sections import FullRecompute, NoRecompute, RecomputeSpec, SelectiveRecompute
from varlen import in_parts

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine"),
]

HEADS, LENGTH = 4, 640


@pytest.fixture(autouse=True, params=["auto", "cudnn", "FA2", "FA3", "FA4"])
def backends(request: pytest.FixtureRequest) -> Iterator[AttentionBackends]:
    """Kernels of torch, and of each package that is there for this GPU."""
    keys = [("train.attention_backend", request.param), ("precision.compute", "bf16")]
    with ExitStack() as stack:
        try:
            found = attention_backend(load(None, keys), torch.device("cuda"))
            chosen = stack.enter_context(found)
        except UserError as error:
            pytest.skip(str(error))
        yield chosen


class Operators(TorchDispatchMode):
    """Names of the operators that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.name())
        return func(*args, **(kwargs or {}))


def draw(kv_heads: int, dim: int, seed: int = 0, length: int = LENGTH) -> list[Tensor]:
    """q, k, v and the output's gradient in bf16."""
    make = torch.Generator().manual_seed(seed)
    shapes = [(2, length, heads, dim) for heads in (HEADS, kv_heads, kv_heads, HEADS)]
    return [torch.randn(s, generator=make).to("cuda", torch.bfloat16) for s in shapes]


def documents_of(chance: float | None) -> Tensor | None:
    make = torch.Generator().manual_seed(1)
    return None if chance is None else (torch.rand(2, LENGTH, generator=make) < chance).cumsum(1)


def differentiated(inputs: list[Tensor], grad: Tensor, mask: Tensor | Packed | None) -> list[Tensor]:
    """out and the gradients of q, k, v, in float64."""
    leaves = [x.clone().requires_grad_() for x in inputs]
    out = attend(*leaves, mask)
    return [x.double() for x in (out.detach(), *torch.autograd.grad(out, leaves, grad))]


def errors(found: list[Tensor], exact: list[Tensor]) -> list[float]:
    """Errors of tensors, relative to the norm (or to 1: a query that sees one key has a gradient of 0)."""
    pairs = [(a.double(), b.double()) for a, b in zip(found, exact, strict=True)]
    return [float((a - b).norm() / b.norm().clamp(min=1)) for a, b in pairs]


@pytest.mark.parametrize("dim", [64, 80, 128])
@pytest.mark.parametrize("kv_heads", [1, 4])
@pytest.mark.parametrize("length", [1, 77, 128, 641, 1024])
def test_whole_sequences_are_those_of_float64(
    length: int, kv_heads: int, dim: int, backends: AttentionBackends
) -> None:
    """By the kernel that was chosen, also for lengths that 128 does not divide."""
    *inputs, grad = draw(kv_heads, dim, length=length)
    with Operators() as called:
        found = differentiated(inputs, grad, None)
    exact = differentiated([x.double() for x in inputs], grad.double(), None)
    assert max(errors(found, exact)) <= 0.02, errors(found, exact)
    kernel = "cudnn" if backends.plain == "cudnn" else "flash"
    if length > 1:
        assert any(f"_{kernel}_attention" in name for name in called.names), called.names


@pytest.mark.parametrize("dim", [32, 64, 80, 128])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize(
    ("chance", "window"), [(0.01, None), (0.3, None), (1.0, None), (None, 1), (None, 100), (0.01, 33)]
)
def test_packed_is_as_close_as_the_mask(
    chance: float | None, window: int | None, kv_heads: int, dim: int
) -> None:
    *inputs, grad = draw(kv_heads, dim)
    documents = documents_of(chance)
    packed = attention_mask(LENGTH, LENGTH, window, documents, inputs[0], dim)
    assert isinstance(packed, Packed)
    dense, wide = (
        attention_mask(LENGTH, LENGTH, window, documents, like) for like in (inputs[0], inputs[0].double())
    )
    exact = differentiated([x.double() for x in inputs], grad.double(), wide)
    found = errors(differentiated(inputs, grad, packed), exact)
    alike = errors(differentiated(inputs, grad, dense), exact)
    assert all(a <= 1.5 * b + 1e-3 for a, b in zip(found, alike, strict=True)), (found, alike)


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("window", [None, 1, 70, 300])
@pytest.mark.parametrize("chance", [None, 0.01, 0.3, 1.0])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_parts_are_those_of_tiles(
    ranks: int, chance: float | None, window: int | None, kv_heads: int
) -> None:
    """Flash attention in bf16 against tiles in fp32, on every rank's queries."""
    inputs = draw(kv_heads, 64)
    places = [zigzag(LENGTH, ranks, rank) for rank in range(ranks)]
    for at in places:
        seen = attention_intervals(documents_of(chance), LENGTH, window, at, 2, "cuda")
        assert part_operators(inputs[0]) is FLASH
        assert part_operators(inputs[0].float()) is TILES
        found = in_parts(FLASH, *inputs, seen, places)
        exact = in_parts(TILES, *(x.float() for x in inputs), seen, places)
        assert max(errors(found, exact)) <= 0.02, errors(found, exact)
        assert float((found[1] - exact[1]).abs().max()) <= 1e-3


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("recompute", [NoRecompute(), FullRecompute(), SelectiveRecompute()])
def test_packed_documents_under_every_policy(recompute: RecomputeSpec, compiled: bool) -> None:
    spec = load(None, [("model.layers", "2"), ("model.vocab_size", "64")]).model
    decoders = [init_whole_(Decoder(spec), 0).to("cuda", dtype) for dtype in (torch.float32, torch.bfloat16)]
    apply_recompute(decoders[1].blocks, recompute)
    for block in decoders[1].blocks if compiled else ():
        block.forward = torch.compile(block.forward)
    tokens, targets = torch.randint(0, 64, (2, 2, LENGTH), generator=torch.Generator().manual_seed(0)).cuda()
    exact, found = [], []
    for decoder, grads in zip(decoders, (exact, found), strict=True):
        loss = decoder.loss(tokens, targets, None, documents_of(0.02))
        grads += torch.autograd.grad(loss, list(decoder.parameters()))
    assert max(errors(found, exact)) <= 0.05, errors(found, exact)


@pytest.mark.parametrize("windowed", [False, True])
@pytest.mark.parametrize("softcap", [None, 1.5])
def test_caps_and_sinks_are_those_of_a_processor(softcap: float | None, windowed: bool) -> None:
    """Sinks with flash attention, caps by operators; against float64 on the same numbers."""
    *inputs, grad = draw(2, 64)
    sinks = torch.linspace(-2, 3, HEADS).to("cuda", torch.bfloat16)
    window, channels = 100 if windowed else None, 64 if softcap is None else None
    mask = attention_mask(LENGTH, LENGTH, window, None, inputs[0], channels)
    assert isinstance(mask, Packed) == (windowed and softcap is None)
    leaves = [x.clone().requires_grad_() for x in (*inputs, sinks)]
    out = attend(*leaves[:3], mask, ScoreChanges(softcap, leaves[3]))
    found = [out, *torch.autograd.grad(out, leaves, grad)]
    exact = [x.detach().cpu().double().requires_grad_() for x in (*inputs, sinks)]
    wide = attention_mask(LENGTH, LENGTH, window, None, exact[0])
    whole = attend(*exact[:3], wide, ScoreChanges(softcap, exact[3]))
    wanted = [whole, *torch.autograd.grad(whole, exact, grad.cpu().double())]
    for ours, theirs in zip(found, wanted, strict=True):
        difference = ours.detach().cpu().double() - theirs.detach()
        assert float(difference.norm() / theirs.detach().norm()) < 2e-2
