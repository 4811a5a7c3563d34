"""Requests that join, leave, give their pages back and are read in parts: no token changes."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch

from meshwright.infer import batching
from meshwright.infer.batching import Batching, Request
from meshwright.infer.generate import continue_requests
from meshwright.infer.paged_cache import PagedCache, PageTable, Run, places
from meshwright.infer.sampling import Sampling
from meshwright.spec import UserError
from small_decoders import make_decoder

PROMPTS = [list(range(5, 25)), [9, 9], [40] * 7, [1, 2, 3, 4, 5, 6, 7], list(range(60, 90))]
NEW = 40


def continued(shape: str, rows: int, cache_tokens: int | None = None) -> list[list[int]]:
    requests = [Request(number, prompt, NEW) for number, prompt in enumerate(PROMPTS)]
    sampling = Sampling(temperature=1.0, seed=5)
    continue_requests(make_decoder(shape), requests, sampling, None, rows, cache_tokens=cache_tokens)
    assert all(len(request.new) == NEW and not request.pages for request in requests)
    return [request.new for request in requests]


@pytest.mark.parametrize("shape", ["llama", "window", "latents"])
def test_requests_that_give_their_pages_back_get_the_same_tokens(shape: str) -> None:
    alone, put_back = continued(shape, 1), Batching._put_back
    with patch.object(Batching, "_put_back", autospec=True, side_effect=put_back) as spy:
        assert continued(shape, 5) == alone
        assert not spy.called
        assert continued(shape, 5, cache_tokens=96) == alone
    assert spy.call_count > 2


@pytest.mark.parametrize("shape", ["llama", "window", "latents"])
def test_prompts_that_are_read_in_parts_get_the_same_tokens(shape: str) -> None:
    alone = continued(shape, 1)
    for most in (1, 3, 7):  # of 7 tokens, one, two or all three parts end with a prompt
        with patch.object(batching, "MOST_PROMPT_TOKENS", most):
            assert continued(shape, 3) == alone


def test_pages_for_too_few_tokens_are_refused() -> None:
    with pytest.raises(UserError, match=r"cache_tokens: 79 cannot hold the longest prompt .* at least 80"):
        continued("llama", 2, cache_tokens=79)


def test_pages_come_back_and_none_is_had_twice() -> None:
    table = PageTable(4)
    first, second = list[int](), list[int]()
    assert table.grow(first, 33) and table.grow(second, 16)
    assert len({*first, *second}) == 4 and min(first + second) == 2  # two are of no sequence
    assert not table.grow(second, 17) and len(second) == 1
    table.release(first)
    assert table.grow(second, 64) and len(set(second)) == 4


def test_pages_of_rows_that_are_evenly_spaced_are_read_where_they_lie() -> None:
    """And hold the same as a copy of the same pages, for rows that are not."""
    attention = make_decoder("llama").blocks[0].get_submodule("attn")
    cache = PagedCache(attention, 9, torch.zeros(0, dtype=torch.float64))
    x = torch.randn(2, 20, 4, 16, dtype=torch.float64)
    for rows, even in (([[2, 3], [5, 6]], True), ([[5, 6], [2, 3]], False), ([[2, 4], [5, 7]], False)):
        for first, count in ((0, 18), (18, 2)):
            cache.places = places(rows, [first] * 2, count, torch.device("cpu"))
            found = cache.store(x[:, first : first + count])
        assert isinstance(cache.places.read, Run) == even
        assert torch.equal(found, x)
