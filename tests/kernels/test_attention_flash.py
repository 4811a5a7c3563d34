"""Sequences for flash attention hold what is seen, once; what they give is the full softmax, also in parts.

The kernel itself runs on CUDA only (tests/gpu); here an exact one stands in for it (tests/varlen.py).
"""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from attention_cases import (
    DIM,
    GROUP,
    HEADS,
    KV_HEADS,
    by_definition,
    deal,
    documents_of,
    draw,
    visible,
    whole_softmax,
)
from meshwright.kernels.attention_cpu import blocked_attention
from meshwright.kernels.attention_flash import (
    FLASH,
    FlashPart,
    Packed,
    Rows,
    _tokens,
    flash_takes,
    make_flash_part,
    pack,
    packed_attention,
    part_operators,
    varlen_attention,
    varlen_attention_backward,
)
from meshwright.kernels.attention_intervals import attention_intervals
from meshwright.kernels.partial_attention import (
    TILES,
    by_key_head,
    by_query_head,
    empty_result,
)
from meshwright.model.attention import attend, attention_mask
from meshwright.parallel.context_parallel import zigzag
from varlen import exact_kernel, in_parts, seen_by_kernel

problems = st.fixed_dictionaries(
    {
        "chunk": st.integers(1, 7),
        "ranks": st.integers(1, 5),
        "union": st.integers(1, 3),
        "batch": st.integers(1, 3),
        "window": st.one_of(st.none(), st.integers(1, 40)),
        "chance": st.sampled_from([None, 0.0, 0.02, 0.1, 0.5, 1.0]),
        "dealt": st.booleans(),
        "seed": st.integers(0, 2**31),
    }
)


def places_of(problem: dict[str, int]) -> tuple[int, list[Tensor]]:
    """The length, and the places of each part: zigzag, unions of that, or runs dealt out at random."""
    ranks, union = problem["ranks"], problem["union"]
    length = 2 * ranks * union * problem["chunk"]
    if problem["dealt"]:
        pieces = deal(length, ranks, problem["seed"])
        return length, [at for at in pieces if len(at)]
    shares = [zigzag(length, ranks * union, rank) for rank in range(ranks * union)]
    groups = [shares[first : first + union] for first in range(0, len(shares), union)]
    return length, [torch.cat(group).sort().values for group in groups]


def rows_of(at: Rows, batch: int) -> tuple[Tensor, Tensor]:
    """(row of the batch, row in it) of each place."""
    row, place = at
    if isinstance(row, Tensor) and isinstance(place, Tensor):
        return row, place
    assert isinstance(place, slice) and row == slice(None)
    within = torch.arange(place.start, place.stop)
    return torch.arange(batch).repeat_interleave(len(within)), within.repeat(batch)


def pairs(part: FlashPart, queries: int, keys: int) -> Tensor:
    """(B, T, S): how often the runs of a part compute each pair."""
    count = torch.zeros(part.batch, queries, keys, dtype=torch.int64)
    for run in part.runs:
        query_ends, key_ends, most_queries, most_keys, causal, window = run.bounds
        assert len(query_ends) == len(key_ends) and query_ends.dtype == key_ends.dtype == torch.int32
        of_queries, of_keys = rows_of(run.queries, part.batch), rows_of(run.keys, part.batch)
        for (first, last), (left, right) in zip(pairwise(query_ends), pairwise(key_ends), strict=True):
            assert 0 < last - first <= most_queries and 0 < right - left <= most_keys
            seen = seen_by_kernel(int(last - first), int(right - left), most_keys, causal, window)
            assert bool(seen.any(1).all())
            row, query = (x[first:last] for x in of_queries)
            other, key = (x[left:right] for x in of_keys)
            assert bool((row == row[0]).all()) and bool((other == row[0]).all())
            count[row[0], query.unsqueeze(1), key] += seen.long()
    return count


@given(problems)
@settings(max_examples=200)
def test_runs_hold_each_visible_pair_once(problem: dict[str, int]) -> None:
    length, pieces = places_of(problem)
    documents = documents_of(length, problem["batch"], problem["chance"], problem["seed"])
    for at in pieces:
        seen = attention_intervals(documents, length, problem["window"], at, problem["batch"], "cpu")
        for keys_at in pieces:
            part = make_flash_part(seen, keys_at, KV_HEADS, GROUP)
            assert torch.equal(pairs(part, len(at), len(keys_at)), visible(seen, keys_at).long())
            places = (rows_of(run.queries, part.batch) for run in part.runs)
            rows = [row * len(at) + query for row, query in places]
            taken = torch.cat([torch.zeros(0, dtype=torch.int64), *rows])
            assert len(taken.unique()) == len(taken)
            assert problem["window"] is not None or len(part.runs) <= 2


def test_sequences_are_few() -> None:
    """One for each document and run of queries at most: not one for each chunk that documents cross."""
    length, ranks = 4096, 4
    documents = (torch.arange(length) // 1000).expand(2, length)
    places = [zigzag(length, ranks, rank) for rank in range(ranks)]
    for documents_BS, most in ((None, 2), (documents, 4)):
        for at in places:
            seen = attention_intervals(documents_BS, length, None, at, 2, "cpu")
            for keys_at in places:
                runs = make_flash_part(seen, keys_at, KV_HEADS, GROUP).runs
                assert sum(len(run.bounds[0]) - 1 for run in runs) <= 2 * most


def test_causal_attention_and_documents_take_no_index() -> None:
    """Queries and keys of a part are ranges of the rows: nothing is gathered, and one row is not copied."""
    length, ranks = 4096, 4
    documents = (torch.arange(length) // 1000).expand(2, length)
    places = [zigzag(length, ranks, rank) for rank in range(ranks)]
    indexed = Counter[str]()
    for name, ids in (("causal", None), ("documents", documents)):
        for at in places:
            seen = attention_intervals(ids, length, None, at, 2, "cpu")
            for keys_at in places:
                runs = make_flash_part(seen, keys_at, KV_HEADS, GROUP).runs
                places_of_runs = [each for run in runs for each in (run.queries, run.keys)]
                indexed[name] += sum(isinstance(row, Tensor) for row, _ in places_of_runs)
    assert indexed["causal"] == 0 and indexed["documents"] <= 4, indexed
    q = by_query_head(draw(1, 8, 0)[0], KV_HEADS)
    assert _tokens(q, 1, (slice(None), slice(2, 6))).data_ptr() == q[:, :, 2:].data_ptr()


@pytest.mark.parametrize("window", [1, 100, 512, 700, 4000])
def test_a_window_is_few_calls(window: int) -> None:
    """One for each width, of which a part has as many as pairs of chunks that a window crosses."""
    length, ranks = 4096, 4
    documents = (torch.arange(length) // 1000).expand(2, length)
    places = [zigzag(length, ranks, rank) for rank in range(ranks)]
    for ids in (None, documents):
        for at in places:
            seen = attention_intervals(ids, length, window, at, 2, "cpu")
            for keys_at in places:
                assert len(make_flash_part(seen, keys_at, KV_HEADS, GROUP).runs) <= 4


@pytest.mark.parametrize("loud", [1.0, 200.0])
def test_parts_add_up_to_the_whole(loud: float) -> None:
    @given(problems)
    @settings(max_examples=40)
    def check(problem: dict[str, int]) -> None:
        length, pieces = places_of(problem)
        batch, window = problem["batch"], problem["window"]
        documents = documents_of(length, batch, problem["chance"], problem["seed"])
        seen = attention_intervals(documents, length, window, torch.arange(length), batch, "cpu")
        *qkv, grad = draw(batch, length, problem["seed"], loud)
        leaves = [x.clone().requires_grad_() for x in qkv]
        out, lse = whole_softmax(*leaves, seen)
        out.backward(grad)
        of_q, of_k, of_v = (x.grad for x in leaves)
        sums = [torch.zeros_like(x) for x in qkv[1:]]
        with exact_kernel():
            for at in pieces:
                found, found_lse, found_q, *of_kv = in_parts(FLASH, *qkv, grad, seen.at(at), pieces)
                torch.testing.assert_close(found, out[:, at], rtol=1e-12 * loud, atol=1e-12 * loud)
                torch.testing.assert_close(found_lse, lse[:, at], rtol=1e-12, atol=1e-12)
                torch.testing.assert_close(found_q, of_q[:, at], rtol=1e-12 * loud, atol=1e-12 * loud)
                for total, share in zip(sums, of_kv, strict=True):
                    total += share
        for total, expected in zip(sums, (of_k, of_v), strict=True):
            torch.testing.assert_close(total, expected, rtol=1e-12 * loud, atol=1e-12 * loud**2)

    check()


def test_what_has_no_keys_has_no_runs() -> None:
    early, late = torch.arange(8), torch.arange(8, 16)
    seen = attention_intervals(None, 16, None, early, 2, "cpu")
    for keys_at in (late, late[:0]):
        part = make_flash_part(seen, keys_at, KV_HEADS, GROUP)
        assert part.runs == ()
        q, k, v, _ = draw(2, 8, 0)
        queries, kv = by_query_head(q, KV_HEADS), by_key_head(k[:, : len(keys_at)], v[:, : len(keys_at)])
        out, lse = empty_result(queries)
        FLASH.forward(queries, kv[0], kv[1], part, out, lse)
        assert bool((out == 0).all()) and bool((lse == -torch.inf).all())
        grads = FLASH.backward(queries, out, lse, queries, kv[0], kv[1], part, torch.zeros_like(out))
        assert grads.shape == kv.shape and bool((grads == 0).all())


def test_what_the_kernel_does_not_take_stays_with_tiles() -> None:
    with torch.device("meta"):
        q = torch.empty(1, 32, HEADS, 64, dtype=torch.bfloat16)
    assert part_operators(q) is TILES and not flash_takes(q, 64)


def packed_of(documents: Tensor | None, length: int, window: int | None) -> Packed:
    return pack(documents, 2, length, window, torch.device("cpu"))


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("window", [None, 1, 9, 69])
@pytest.mark.parametrize("chance", [None, 0.02, 0.3, 1.0])
def test_packed_attention_is_the_mask(kv_heads: int, window: int | None, chance: float | None) -> None:
    """Out and gradients equal those of the dense mask, which the CPU adds to its scores."""
    length = 70
    documents = documents_of(length, 2, chance, 3)
    make = torch.Generator().manual_seed(7)
    inputs = [
        torch.randn(2, length, heads, DIM, generator=make, dtype=torch.float64).requires_grad_()
        for heads in (4, kv_heads, kv_heads)
    ]
    mask = attention_mask(length, length, window, documents, like=inputs[0])
    dense = torch.ones(length, length, dtype=torch.bool).tril() if mask is None else mask[:, 0] == 0
    expected = by_definition(*inputs, dense.expand(2, length, length))
    weights = torch.randn(expected.shape, generator=make, dtype=torch.float64)
    expected_grads = torch.autograd.grad((expected * weights).sum(), inputs)
    with exact_kernel():
        found = attend(*inputs, packed_of(documents, length, window))
        grads = torch.autograd.grad((found * weights).sum(), inputs)
    for a, b in zip((found, *grads), (expected, *expected_grads), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_packed_documents_end_where_ids_change() -> None:
    documents = torch.tensor([[4, 4, 4, 4, 4, 9], [1, 2, 2, 2, 3, 3]])
    ends, longest, window = pack(documents, 2, 6, 5, torch.device("cpu"))
    assert ends.tolist() == [0, 5, 6, 7, 10, 12] and ends.dtype == torch.int32
    assert longest == 8 and window == 5
    assert packed_of(None, 6, 3).ends.tolist() == [0, 6, 12]
    assert packed_of(torch.arange(2).expand(2, 2), 2, None).longest == 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_operators_are_as_their_fakes_say(dtype: torch.dtype) -> None:
    q, k, v, grad = (x.flatten(0, 1).to(dtype) for x in draw(2, 6, 0))
    ends = torch.tensor([0, 4, 12], dtype=torch.int32)
    bounds = (ends, ends, 8, 8, True, 3)
    with exact_kernel():
        torch.library.opcheck(varlen_attention, (q, k, v, *bounds))
        torch.library.opcheck(varlen_attention, (*(x.clone().requires_grad_() for x in (q, k, v)), *bounds))
        out, lse = varlen_attention(q, k, v, *bounds)
        torch.library.opcheck(varlen_attention_backward, (grad, out, lse, q, k, v, *bounds))


class Operators(TorchDispatchMode):
    """Names of the operators that are called within."""

    def __init__(self) -> None:
        super().__init__()
        self.called: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.called.append(func.name())
        return func(*args, **kwargs or {})


@pytest.mark.parametrize("kind", ["varlen", "blocked"])
def test_no_gradient_is_made_for_the_log_sum_exp(kind: str) -> None:
    """Autograd makes zeros for results that nothing used unless it is told not to: one kernel a layer."""
    inputs = [x.requires_grad_() for x in draw(2, 8, 0)[:3]]
    with exact_kernel(), Operators() as operators:
        if kind == "varlen":
            out = packed_attention(*inputs, packed_of(None, 8, None))
        else:
            out = blocked_attention(*inputs, None)
        operators.called.clear()
        torch.autograd.grad(out, inputs, torch.ones_like(out))
    assert f"meshwright::{kind}_attention_backward" in operators.called
    assert not any("zeros" in name for name in operators.called)


def test_operator_counts_its_flops() -> None:
    inputs = [x.requires_grad_() for x in draw(1, 8, 0)[:3]]
    with exact_kernel(), FlopCounterMode(display=False) as counter:
        packed_attention(*inputs, packed_of(None, 4, None)).sum().backward()
    assert counter.get_total_flops() == (4 + 10) * 8 * 4 * HEADS * DIM


@pytest.mark.parametrize(("causal", "window"), [(False, None), (True, None), (True, 3)])
def test_the_kernel_is_called_as_this_torch_declares_it(causal: bool, window: int | None) -> None:
    """torch's own meta functions take the arguments and give what our fakes say."""
    q, k, v, grad = (x.flatten(0, 1).bfloat16().to("meta") for x in draw(2, 6, 0))
    ends = torch.empty(3, dtype=torch.int32, device="meta")
    bounds = (ends, ends, 8, 8, causal, window)
    found = varlen_attention._init_fn(q, k, v, *bounds)
    grads = varlen_attention_backward._init_fn(grad, *found, q, k, v, *bounds)
    said = varlen_attention(q, k, v, *bounds)
    said += varlen_attention_backward(grad, *said, q, k, v, *bounds)
    for a, b in zip((*found, *grads), said, strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype and a.stride() == b.stride()
