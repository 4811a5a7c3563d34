"""Attention in parts equals softmax over all keys; tiles hold all that is seen, once, and little else."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from attention_cases import GROUP, HEADS, KV_HEADS, deal, documents_of, draw, visible, whole_softmax
from meshwright.kernels import attention_cpu_kernel
from meshwright.kernels.attention_cpu import blocked_attention
from meshwright.kernels.attention_intervals import AttentionIntervals, attention_intervals
from meshwright.kernels.partial_attention import (
    TiledPart,
    by_key_head,
    by_query_head,
    empty_result,
    from_key_head,
    from_query_head,
    make_part,
    part_backward,
    part_forward,
)
from meshwright.model.attention import attention_mask
from meshwright.spec.tiling import Tiling, tiled

problems = st.fixed_dictionaries(
    {
        "length": st.integers(1, 70),
        "batch": st.integers(1, 3),
        "window": st.one_of(st.none(), st.integers(1, 80)),
        "chance": st.sampled_from([None, 0.0, 0.02, 0.1, 0.5, 1.0]),
        "pieces": st.integers(1, 4),
        "seed": st.integers(0, 2**31),
    }
)


@pytest.fixture
def small_tiles() -> Iterator[None]:
    """Tiles so small that a small problem has many, of every kind."""
    sizes = Tiling(part_queries=8, least_part_queries=2, part_keys=16, part_scores=3 * GROUP * 8 * 16)
    with tiled(sizes):
        yield


@given(problems)
@settings(max_examples=60)
def test_sight_equals_the_mask(problem: dict[str, int]) -> None:
    length, batch, window = problem["length"], problem["batch"], problem["window"]
    documents = documents_of(length, batch, problem["chance"], problem["seed"])
    whole = torch.arange(length)
    mask = attention_mask(length, length, window, documents, like=torch.zeros(()))
    expected = whole <= whole.unsqueeze(1) if mask is None else mask[:, 0] == 0
    seen = attention_intervals(documents, length, window, whole, batch, "cpu")
    assert torch.equal(visible(seen, whole), expected.expand(batch, length, length))
    some = whole[problem["seed"] % 2 :: 2]
    for own in (attention_intervals(documents, length, window, some, batch, "cpu"), seen.at(some)):
        assert torch.equal(visible(own, whole), expected.expand(batch, length, length)[:, some])


def test_sight_refuses_another_shape() -> None:
    with pytest.raises(ValueError, match="documents"):
        attention_intervals(torch.zeros(1, 8, dtype=torch.int64), 9, None, torch.arange(9), 1, "cpu")


@pytest.mark.usefixtures("small_tiles")
def test_tiles_hold_each_visible_pair_once() -> None:
    @given(problems)
    @settings(max_examples=80)
    def check(problem: dict[str, int]) -> None:
        length, batch = problem["length"], problem["batch"]
        documents = documents_of(length, batch, problem["chance"], problem["seed"])
        pieces = deal(length, problem["pieces"], problem["seed"])
        for at in pieces:
            if len(at) == 0:
                continue
            seen = attention_intervals(documents, length, problem["window"], at, batch, "cpu")
            for keys_at in pieces:
                part = make_part(seen, keys_at, KV_HEADS, GROUP)
                count = torch.zeros(batch, KV_HEADS, len(at), len(keys_at), dtype=torch.int64)
                hidden = count.clone()
                for tile in part.tiles:
                    flat, unseen = count.flatten(0, 1), hidden.flatten(0, 1)
                    flat[tile.groups, tile.rows, tile.columns] += 1
                    for border in tile.borders:
                        unseen[tile.groups, tile.rows, border] += 1
                    heads = range(tile.groups.start, tile.groups.stop)
                    assert {h // KV_HEADS for h in heads} == set(range(tile.batch.start, tile.batch.stop))
                expected = visible(seen, keys_at).unsqueeze(1).expand(count.shape)
                assert int(count.max() if count.numel() else 0) <= 1
                assert bool((count[expected] == 1).all())
                assert bool((hidden[(count == 1) & ~expected] == 1).all())  # masked where it must be
                assert part.work == int(count.sum()) * GROUP

    check()


def in_parts(
    q: Tensor, k: Tensor, v: Tensor, grad: Tensor, seen: AttentionIntervals, pieces: list[Tensor]
) -> tuple[list[Tensor], Tensor]:
    """[out and the gradients of q, k, v], log-sum-exp, with the keys part by part."""
    queries, grads = by_query_head(q, KV_HEADS), by_query_head(grad, KV_HEADS)
    parts = [make_part(seen, keys_at, KV_HEADS, GROUP) for keys_at in pieces]
    keys = [by_key_head(k[:, keys_at], v[:, keys_at]) for keys_at in pieces]
    out, lse = empty_result(queries)
    for kv, part in zip(keys, parts, strict=True):
        part_forward(queries, kv[0], kv[1], part, out, lse)
    grad_q, grad_k, grad_v = torch.zeros_like(out), torch.zeros_like(k), torch.zeros_like(v)
    delta = (grads.to(out.dtype) * out).sum(-1)
    for kv, part, keys_at in zip(keys, parts, pieces, strict=True):
        found = part_backward(grads, delta, lse, queries, kv[0], kv[1], part, grad_q)
        grad_k[:, keys_at], grad_v[:, keys_at] = (from_key_head(x, k[:, keys_at]) for x in found)
    results = [from_query_head(out, q), from_query_head(grad_q, q), grad_k, grad_v]
    return results, from_query_head(lse.unsqueeze(-1), q[..., :1].to(lse.dtype)).squeeze(-1)


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize(
    "loud", [1.0, 2000.0]
)  # scores that exp can take as they are, and some that it cannot
def test_parts_add_up_to_the_whole(loud: float) -> None:
    @given(problems)
    @settings(max_examples=50)
    def check(problem: dict[str, int]) -> None:
        length, batch = problem["length"], problem["batch"]
        documents = documents_of(length, batch, problem["chance"], problem["seed"])
        seen = attention_intervals(documents, length, problem["window"], torch.arange(length), batch, "cpu")
        *qkv, grad = draw(batch, length, problem["seed"], loud)
        leaves = [x.clone().requires_grad_() for x in qkv]
        out, lse = whole_softmax(*leaves, seen)
        out.backward(grad)
        pieces = deal(length, problem["pieces"], problem["seed"])
        found, found_lse = in_parts(*qkv, grad, seen, pieces)
        torch.testing.assert_close(found_lse, lse, rtol=1e-12, atol=1e-12)
        for a, b in zip(found, [out, *(x.grad for x in leaves)], strict=True):
            assert b is not None
            # A score is rounded by 1e-16 of itself, and a gradient of keys is those times loud queries.
            torch.testing.assert_close(a, b, rtol=1e-12 * loud, atol=1e-13 + 2e-14 * loud**2)

    check()


def test_a_query_that_sees_no_key_of_a_part_keeps_what_it_has() -> None:
    length = 12
    documents = torch.tensor([[0] * 6 + [1] * 6])
    seen = attention_intervals(documents, length, None, torch.arange(length), 1, "cpu")
    *qkv, _ = draw(1, length, 0)
    queries = by_query_head(qkv[0], KV_HEADS)
    out, lse = empty_result(queries)
    for keys_at in (torch.tensor([], dtype=torch.int64), torch.arange(4)):  # nothing; half of one document
        kv = by_key_head(*(x[:, keys_at] for x in qkv[1:]))
        part_forward(queries, kv[0], kv[1], make_part(seen, keys_at, KV_HEADS, GROUP), out, lse)
    assert bool((out[:, :, 6:] == 0).all()) and bool((lse[:, :, 6:] == -math.inf).all())
    assert bool(torch.isfinite(out).all()) and bool(torch.isfinite(lse[:, :, :6]).all())


def part_of(seen: AttentionIntervals, first: int, last: int) -> TiledPart:
    return make_part(seen, torch.arange(first, last), KV_HEADS, GROUP)


def test_what_nothing_sees_is_skipped() -> None:
    length = 4096
    early, late = torch.arange(length // 2), torch.arange(length // 2, length)
    assert part_of(attention_intervals(None, length, None, early, 1, "cpu"), length // 2, length).work == 0
    apart = (torch.arange(length) // (length // 2)).unsqueeze(0)
    assert part_of(attention_intervals(apart, length, None, late, 1, "cpu"), 0, length // 2).work == 0
    window = part_of(attention_intervals(None, length, 128, torch.arange(length), 1, "cpu"), 0, length)
    assert window.work <= HEADS * length * (128 + Tiling().part_queries)
    # Rows of the batch whose documents differ are computed apart, each at its own cost.
    other = (torch.arange(length) // 256).unsqueeze(0)
    single = [
        part_of(attention_intervals(x, length, None, late, 1, "cpu"), 0, length).work for x in (apart, other)
    ]
    both = part_of(
        attention_intervals(torch.cat([apart, other]), length, None, late, 2, "cpu"), 0, length
    ).work
    assert both <= 1.1 * sum(single)


@pytest.mark.parametrize("loud", [1.0, 60.0])
def test_bf16_is_as_close_as_one_softmax(loud: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """One softmax by torch's operators, which round scores as tiles do; the kernel in C++ does not."""
    monkeypatch.setattr(attention_cpu_kernel, "takes", lambda *_: False)
    length = 600
    *qkv, grad = (x.bfloat16() for x in draw(1, length, 5, loud))
    seen = attention_intervals(None, length, None, torch.arange(length), 1, "cpu")
    exact = [x.double().requires_grad_() for x in qkv]
    out, lse = whole_softmax(*exact, seen)
    out.backward(grad.double())
    plain = [x.clone().requires_grad_() for x in qkv]
    plain_out = blocked_attention(*plain, None)
    plain_out.backward(grad)
    found, found_lse = in_parts(*qkv, grad, seen, [torch.arange(0, 300), torch.arange(300, length)])
    assert float((found_lse - lse.detach()).abs().max()) <= 2**-8 * float(lse.detach().abs().max())
    others = [plain_out, *(x.grad for x in plain)]
    for a, b, c in zip(found, [out, *(x.grad for x in exact)], others, strict=True):
        assert b is not None and c is not None
        assert (a.double() - b).norm() <= 1.2 * (c.double() - b).norm()
