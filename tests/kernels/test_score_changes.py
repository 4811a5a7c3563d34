"""Soft caps and attention sinks: every kernel equals the definition, gradients included."""

from __future__ import annotations

from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from attention_cases import DIM, HEADS, KV_HEADS, draw, visible
from attention_kernel_cases import ROUNDED
from meshwright.kernels import attention_cpu_kernel
from meshwright.kernels.attention_cpu import blocked_attention
from meshwright.kernels.attention_flash import FLASH, flash_takes, pack, packed_attention, part_operators
from meshwright.kernels.attention_intervals import attention_intervals
from meshwright.kernels.partial_attention import (
    TILES,
    by_key_head,
    by_query_head,
    empty_result,
    from_key_head,
    from_query_head,
    make_part,
    row_products,
    tiles,
)
from meshwright.kernels.score_changes import ScoreChanges
from meshwright.model import attention
from meshwright.model.attention import attend, attention_mask
from varlen import exact_kernel

CHANGES = {"softcap": (1.5, False), "sinks": (None, True), "both": (0.7, True)}


def changes_of(name: str, dtype: torch.dtype = torch.float64) -> ScoreChanges:
    softcap, has_sinks = CHANGES[name]
    sinks = torch.linspace(-3, 4, HEADS, dtype=torch.float64).to(dtype)
    return ScoreChanges(softcap, sinks.requires_grad_() if has_sinks else None)


def inputs_of(length: int, dtype: torch.dtype, queries: int | None = None) -> list[Tensor]:
    q, k, v, _ = (x.to(dtype) for x in draw(2, length, 0))
    return [x.detach().requires_grad_() for x in (q[:, length - (queries or length) :], k, v)]


def eager(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, changes: ScoreChanges) -> Tensor:
    """Scores, caps and a column of sinks, written out."""
    group = q.shape[2] // k.shape[2]
    k, v = (x.repeat_interleave(group, 2) for x in (k, v))
    scores = torch.einsum("bthd,bshd->bhts", q, k) * q.shape[-1] ** -0.5
    if changes.softcap is not None:
        scores = changes.softcap * torch.tanh(scores / changes.softcap)
    if mask is None:
        hidden = torch.ones(scores.shape[2:], dtype=torch.bool).triu(1 + scores.shape[3] - scores.shape[2])
        scores = scores.masked_fill(hidden, float("-inf"))
    else:
        scores = scores + mask
    if changes.sinks is not None:
        column = changes.sinks.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, column], -1)
    chances = scores.softmax(-1)[..., : k.shape[1]]
    return torch.einsum("bhts,bshd->bthd", chances, v)


def with_gradients(out: Tensor, inputs: list[Tensor], changes: ScoreChanges) -> list[Tensor]:
    leaves = [*inputs, changes.sinks] if changes.sinks is not None else inputs
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return [out.detach(), *torch.autograd.grad(out, leaves, weights.to(out.dtype))]


@pytest.mark.parametrize("window", [None, 9])
@pytest.mark.parametrize("queries", [70, 7], ids=["whole", "cached"])
@pytest.mark.parametrize("name", CHANGES)
def test_operators_of_torch_equal_the_definition(name: str, queries: int, window: int | None) -> None:
    inputs, changes = inputs_of(70, torch.float64, queries), changes_of(name)
    mask = attention_mask(queries, 70, window, None, inputs[0])
    wanted = with_gradients(eager(*inputs, mask, changes), inputs, changes)
    found = with_gradients(blocked_attention(*inputs, mask, changes), inputs, changes)
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", CHANGES)
def test_the_kernel_in_cpp_equals_the_definition(name: str, dtype: torch.dtype, documents: bool) -> None:
    inputs, changes = inputs_of(150, dtype), changes_of(name, dtype)
    ids = (torch.arange(150) >= 60).long().expand(2, -1) if documents else None
    mask = attention_mask(150, 150, None, ids, inputs[0])
    if not attention_cpu_kernel.takes(*inputs, mask):
        pytest.skip("this processor has no kernel for it")
    exact = [x.detach().double().requires_grad_() for x in inputs]
    sinks = None if changes.sinks is None else changes.sinks.detach().double().requires_grad_()
    as_given = ScoreChanges(changes.softcap, sinks)
    wide = None if mask is None else mask.double()
    wanted = with_gradients(eager(*exact, wide, as_given), exact, as_given)
    found = with_gradients(blocked_attention(*inputs, mask, changes), inputs, changes)
    for ours, theirs in zip(found, wanted, strict=True):
        assert float((ours.double() - theirs).norm() / theirs.norm()) < 2 * ROUNDED[dtype]


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("queries", [1, 3])
def test_few_queries_on_cached_keys_equal_the_definition(name: str, queries: int) -> None:
    inputs, changes = inputs_of(40, torch.float64, queries), changes_of(name)
    mask = attention_mask(queries, 40, 11, None, inputs[0])
    with torch.no_grad(), patch.object(attention, "blocked_attention", side_effect=AssertionError):
        found = attend(*inputs, mask, changes)
    torch.testing.assert_close(found, eager(*inputs, mask, changes), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("softcap", [1.5, 100.0])
def test_parts_with_a_cap_add_up_to_the_whole(softcap: float, dtype: torch.dtype) -> None:
    """Also a cap beyond what exponentials in fp32 can have without a maximum subtracted, of loud scores."""
    q, k, v = (x.detach() for x in inputs_of(37, dtype))
    q = q * 300
    everything, operators = torch.arange(37), tiles(softcap)
    seen = attention_intervals(None, 37, 20, everything, 2, "cpu")
    queries, grads = by_query_head(q, KV_HEADS), by_query_head(torch.ones_like(q), KV_HEADS)
    pieces = [everything[::2].contiguous(), everything[1::2].contiguous()]
    parts = [operators.plan(seen, at, KV_HEADS, HEADS // KV_HEADS) for at in pieces]
    keys = [by_key_head(k[:, at], v[:, at]) for at in pieces]
    out, lse = empty_result(queries)
    for kv, part in zip(keys, parts, strict=True):
        operators.forward(queries, kv[0], kv[1], part, out, lse)
    delta, grad_q, grad_k = row_products(grads, out), torch.zeros_like(out), torch.zeros_like(k)
    for kv, part, at in zip(keys, parts, pieces, strict=True):
        of_k, _ = operators.backward(grads, delta, lse, queries, kv[0], kv[1], part, grad_q)
        grad_k[:, at] = from_key_head(of_k, k[:, at])
    exact = [x.double().requires_grad_() for x in (q, k, v)]
    bias = torch.zeros(2, 1, 37, 37, dtype=torch.float64)
    bias.masked_fill_(~visible(seen, everything).unsqueeze(1), float("-inf"))
    whole = eager(*exact, bias, ScoreChanges(softcap))
    of_q, of_k, _ = torch.autograd.grad(whole.sum(), exact)
    bound = 1e-10 if dtype == torch.float64 else 2e-3
    for found, wanted in (
        (from_query_head(out, q), whole),
        (from_query_head(grad_q, q), of_q),
        (grad_k, of_k),
    ):
        assert float((found.double() - wanted.detach()).norm() / wanted.detach().norm()) < bound


def test_flash_attention_is_not_chosen_for_a_cap() -> None:
    """torch's kernel has none; sinks need only its log-sum-exp."""
    on_cuda = SimpleNamespace(is_cuda=True, dtype=torch.bfloat16, shape=(1, 8, 2, 64))
    assert flash_takes(on_cuda, 64)
    assert part_operators(on_cuda) is FLASH
    assert part_operators(on_cuda, 50.0) is tiles(50.0) and tiles(None) is TILES
    assert tiles(50.0).plan is make_part


@pytest.mark.parametrize("window", [None, 5])
def test_flash_attention_with_sinks_equals_the_definition(window: int | None) -> None:
    changes = changes_of("sinks")
    inputs = inputs_of(24, torch.float64)
    ids = (torch.arange(24) >= 10).long().expand(2, -1)
    mask = attention_mask(24, 24, window, ids, inputs[0])
    wanted = with_gradients(eager(*inputs, mask, changes), inputs, changes)
    packed = pack(ids, 2, 24, window, torch.device("cpu"))
    with exact_kernel():
        found = with_gradients(packed_attention(*inputs, packed, changes.sinks), inputs, changes)
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)


def test_sinks_are_those_of_transformers_gpt_oss() -> None:
    theirs = pytest.importorskip("transformers.models.gpt_oss.modeling_gpt_oss")
    inputs, changes = inputs_of(30, torch.float64), changes_of("sinks")
    mask = attention_mask(30, 30, 8, None, inputs[0])
    module = SimpleNamespace(sinks=changes.sinks, num_key_value_groups=HEADS // KV_HEADS, training=False)
    out, _ = theirs.eager_attention_forward(module, *(x.transpose(1, 2) for x in inputs), mask, DIM**-0.5)
    found = with_gradients(attend(*inputs, mask, changes), inputs, changes)
    for ours, wanted in zip(found, with_gradients(out, inputs, changes), strict=True):
        torch.testing.assert_close(ours, wanted, rtol=1e-12, atol=1e-12)
