"""Latent attention against the paper's equations, head by head; its cache; values narrower than keys."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from meshwright.infer.paged_cache import PagedCache, places
from meshwright.kernels.attention_cpu import blocked_attention
from meshwright.kernels.attention_flash import pack
from meshwright.model.attention import attend, attention_mask, with_wide_values
from meshwright.model.attention_mla import LatentAttention
from meshwright.model.hooks import AttentionHooks
from meshwright.model.rope import Rope, rope_table
from meshwright.spec import ModelSpec
from varlen import exact_kernel

HEADS, DIM, V, RANK, TURNING = 3, 10, 5, 7, 4
PLAIN = DIM - TURNING


def spec_of(q_rank: int | None) -> ModelSpec:
    return ModelSpec.model_validate({
        "preset": None, "layers": 1, "hidden": 24, "ffn": 8, "heads": HEADS, "head_dim": DIM, "vocab_size": 9,
        "mla": {"q_rank": q_rank, "kv_rank": RANK, "rope_dim": TURNING, "v_dim": V},
    })  # fmt: skip


def rope_of(positions: Tensor, dtype: torch.dtype) -> Rope:
    rope = spec_of(None).kinds[0].rope
    assert rope is not None
    return rope_table(rope, positions, dtype)


def make(q_rank: int | None) -> LatentAttention:
    spec = spec_of(q_rank)
    attention = LatentAttention(spec, spec.kinds[0], AttentionHooks()).double()
    draw = torch.Generator().manual_seed(q_rank or 0)
    for parameter in attention.parameters():
        parameter.data.normal_(generator=draw).mul_(0.5).add_(0.1)
    return attention


def tokens(length: int, batch: int = 2) -> Tensor:
    return torch.randn(batch, length, 24, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def normed(x: Tensor, weight: Tensor) -> Tensor:
    return weight * x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()


def turned(x_Tr: Tensor, positions: Tensor) -> Tensor:
    """Pairs (i, i + r/2) as complex numbers, times e^(i position / 10000^(2i/r))."""
    half = TURNING // 2
    angles = positions[:, None].double() * 10000.0 ** (-2 * torch.arange(half, dtype=torch.float64) / TURNING)
    found = torch.complex(x_Tr[:, :half], x_Tr[:, half:]) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat([found.real, found.imag], 1)


def by_definition(attention: LatentAttention, x_BTD: Tensor, positions: Tensor, seen_TT: Tensor) -> Tensor:
    """DeepSeek-V2, §2.1, equations 37 to 47, one sequence and one head after another."""
    weights = dict(attention.named_parameters())
    rows = []
    for x in x_BTD:
        made = x @ weights["kv_a.weight"].T
        latent = normed(made[:, :RANK], weights["kv_a_norm.weight"])
        shared = turned(made[:, RANK:], positions)
        of_queries = x
        if "q_a.weight" in weights:
            of_queries = normed(x @ weights["q_a.weight"].T, weights["q_a_norm.weight"])
        heads = []
        for head in range(HEADS):
            q = of_queries @ weights["q.weight"][head * DIM : (head + 1) * DIM].T
            q = torch.cat([q[:, :PLAIN], turned(q[:, PLAIN:], positions)], 1)
            of_head = weights["kv.weight"][head * (PLAIN + V) : (head + 1) * (PLAIN + V)]
            k = torch.cat([latent @ of_head[:PLAIN].T, shared], 1)
            scores = (q @ k.T / math.sqrt(DIM)).masked_fill(~seen_TT, float("-inf"))
            heads.append(scores.softmax(-1) @ (latent @ of_head[PLAIN:].T))
        rows.append(torch.cat(heads, 1) @ weights["o.weight"].T)
    return torch.stack(rows)


@pytest.mark.parametrize("packed", [False, True], ids=["one document", "packed"])
@pytest.mark.parametrize("q_rank", [6, None])
def test_it_is_the_papers_equations(q_rank: int | None, packed: bool) -> None:
    attention, x = make(q_rank), tokens(37).requires_grad_()
    places = torch.arange(37)
    documents = (places >= 11).long() if packed else torch.zeros(37, dtype=torch.int64)
    positions = places - 11 * documents
    seen = (documents[:, None] == documents) & (places[:, None] >= places)
    expected = by_definition(attention, x, positions, seen)
    names, wanted = zip(*attention.named_parameters(), strict=True)
    weights = torch.randn(expected.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    expected_grads = torch.autograd.grad((expected * weights).sum(), [x, *wanted])
    mask = attention_mask(37, 37, None, documents.expand(2, -1), x)
    found = attention(x, rope_of(positions, x.dtype), mask)
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-11)
    grads = torch.autograd.grad((found * weights).sum(), [x, *wanted])
    for name, grad, exact in zip(["x", *names], grads, expected_grads, strict=True):
        torch.testing.assert_close(grad, exact, rtol=1e-10, atol=1e-10, msg=name)


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("q_rank", [6, None])
def test_the_cache_changes_nothing(q_rank: int | None, window: int | None) -> None:
    """A prompt, several tokens at once, and one by one."""
    attention, x = make(q_rank), tokens(20)
    table = rope_of(torch.arange(20), x.dtype)
    expected = attention(x, table, attention_mask(20, 20, window, None, x))
    cache = PagedCache(attention, 6, x)
    found = []
    for first, last in ((0, 9), (9, 13), *((at, at + 1) for at in range(13, 20))):
        rope = table[0][first:last], table[1][first:last]
        cache.places = places([[2, 3], [5, 4]], [first, first], last - first, x.device)
        mask = attention_mask(last - first, last, window, None, x)
        found.append(attention(x[:, first:last], rope, mask, cache))
    torch.testing.assert_close(torch.cat(found, 1), expected, rtol=1e-11, atol=1e-11)


def test_the_cache_holds_latents_only() -> None:
    attention, x = make(6), tokens(4)
    cache = PagedCache(attention, 6, x)
    for first in range(4):
        cache.places = places([[2], [5]], [first, first], 1, x.device)
        attention(x[:, :1], rope_of(torch.tensor([first]), x.dtype), None, cache)
    (stored,) = cache.append(x.new_empty(2, 1, RANK + TURNING))
    assert stored.shape == (2, 4, RANK + TURNING)


def test_values_without_their_own_width_get_zeros() -> None:
    draw = torch.Generator().manual_seed(0)
    shapes = [(2, 40, 4, 16), (2, 40, 2, 16), (2, 40, 2, 6)]
    q, k, v = (torch.randn(s, generator=draw, dtype=torch.float64) for s in shapes)
    expected = blocked_attention(q, k, v, None)
    widths = []

    def wide_only(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, _changes: object) -> Tensor:
        widths.append(v.shape[-1])
        return blocked_attention(q, k, v, mask)

    torch.testing.assert_close(with_wide_values(wide_only)(q, k, v, None), expected, rtol=1e-12, atol=1e-12)
    assert widths == [16]


def test_packed_documents_where_flash_attention_takes_them() -> None:
    draw = torch.Generator().manual_seed(0)
    shapes = [(2, 24, 4, 16), (2, 24, 4, 16), (2, 24, 4, 8)]
    inputs = [torch.randn(s, generator=draw, dtype=torch.float64).requires_grad_() for s in shapes]
    documents = torch.tensor([[0] * 5 + [1] * 19, [2] * 24])
    dense = attend(*inputs, attention_mask(24, 24, None, documents, inputs[0]))
    wanted = torch.autograd.grad(dense.square().sum(), inputs)
    with exact_kernel():
        found = attend(*inputs, pack(documents, 2, 24, None, torch.device("cpu")))
        grads = torch.autograd.grad(found.square().sum(), inputs)
    torch.testing.assert_close(found, dense, rtol=1e-5, atol=1e-6)
    for grad, exact in zip(grads, wanted, strict=True):
        torch.testing.assert_close(grad, exact, rtol=1e-4, atol=1e-5)
