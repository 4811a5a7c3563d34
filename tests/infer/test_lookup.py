"""Tokens that are read ahead: none changes, and right guesses save turns."""

from __future__ import annotations

from itertools import product
from unittest.mock import patch

import pytest

from covering import some
from meshwright.infer.batching import Request
from meshwright.infer.forward import StageForward
from meshwright.infer.generate import continue_requests
from meshwright.infer.lookup import Lookup
from meshwright.infer.packed_linears import pack_linears
from meshwright.infer.sampling import Sampling
from small_decoders import SHAPES, make_decoder

PROMPTS = [[5, 17, 3, 5, 17, 3, 5], [9, 9], [40] * 7, [1, 2, 3, 1, 2], list(range(20, 26)) * 2]


def continued(
    shape: str, rows: int, sampling: Sampling, lookup: int, packed: bool = False, cache: int | None = None
) -> tuple[list[list[int]], int]:
    """The new tokens of each prompt, and the number of turns."""
    decoder = pack_linears(make_decoder(shape)) if packed else make_decoder(shape)
    requests = [Request(number, prompt, 20 + number, stop_ids=(96,)) for number, prompt in enumerate(PROMPTS)]
    run = StageForward.__call__
    with patch.object(StageForward, "__call__", autospec=True, side_effect=run) as spy:
        continue_requests(decoder, requests, sampling, None, rows, cache_tokens=cache, lookup=lookup)
    assert all(not request.pages for request in requests)
    return [request.new for request in requests], spy.call_count


DRAWN = [*product(SHAPES, (0.0, 0.05, 1.0))]


@pytest.mark.parametrize(("shape", "temperature"), some(DRAWN, DRAWN[::4]))
def test_guesses_change_no_token(shape: str, temperature: float) -> None:
    sampling = Sampling(temperature, seed=3)
    expected, _ = continued(shape, 2, sampling, 0)
    for rows, lookup, packed, cache in ((1, 3, False, None), (2, 1, True, None), (3, 7, True, 64)):
        assert continued(shape, rows, sampling, lookup, packed, cache)[0] == expected


def test_right_guesses_save_turns() -> None:
    """All guesses about a text of one token are right: a turn with four of them gives five tokens."""
    with patch.object(Sampling, "choose", lambda self, logits, *_: logits.argmax(-1) * 0 + 7):
        plain, ahead = (continued("llama", 1, Sampling(), lookup)[1] for lookup in (0, 4))
    assert plain == sum(20 + number for number in range(len(PROMPTS)))
    assert ahead <= plain / 5 + 4 * len(PROMPTS)  # the first tokens and the last ones are without guesses


def test_what_followed_the_longest_sequence_last_is_guessed() -> None:
    lookup = Lookup()
    assert lookup.following([1, 2, 3, 4], [], 3) == []
    assert lookup.following([1, 2, 3, 4], [9, 2, 3], 3) == [4, 9, 2]
    assert lookup.following([1, 2, 3, 4], [9, 2, 3, 5, 1, 2, 3], 2) == [4, 9]  # 1 2 3 before a later 2 3
    assert lookup.following([1, 2, 3, 4], [9, 2, 3, 5, 1, 2, 3, 6, 2, 3], 2) == [6, 2]
    assert Lookup().following([5, 7, 8, 7, 8], [], 5) == [7, 8, 7, 8, 7]
