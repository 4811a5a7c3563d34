"""Merges that a BPE learns from counted words."""

from __future__ import annotations

import random

from meshwright.data.bpe_training import learn_merges


def test_merges_do_not_depend_on_how_large_ids_are() -> None:
    """Ids of up to 16 bits are sorted in another way than larger ones; of these, pairs agree in 16 bits."""
    chosen = random.Random(0)
    words = {
        "".join(chosen.choice("abcd") for _ in range(chosen.randint(1, 9))): chosen.randint(1, 9)
        for _ in range(200)
    }
    usual = learn_merges(words, ["<e>", *"abcd"], 105)
    assert len(usual[1]) == 100
    unused = 2**16 - 2
    tokens = ["<e>", "a", "b", *(f"<{number}>" for number in range(unused)), "c", "d"]
    assert (tokens.index("c") - tokens.index("a")) % 2**16 == 0
    vocabulary, merges = learn_merges(words, tokens, unused + 105)
    assert merges == usual[1] and max(vocabulary.values()) == unused + 104
