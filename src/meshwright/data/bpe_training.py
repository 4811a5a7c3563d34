"""Training of a byte-level BPE from words and their counts, with the merges of the `tokenizers` library.

The library learns from texts only, and needs most of its time to split them; this learns from counts that
several processes have made (`Words.word_counts`). The order of merges is the library's to the last detail:
the pair with the largest count, of equal ones that with the lowest ids; the count of a merged pair is never
taken back; a token that two merges spell is one token; and a pair that comes up again by that is merged where
it came up, and may be listed again.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

I64 = NDArray[np.int64]

_BETWEEN, _GONE = -1, -2  # symbols: what stands between words, and the second one of a merged pair


class _Words:
    """All words as one array of symbols, each with its neighbours and the count of its word."""

    def __init__(self, words: Mapping[str, int], symbol_of_character: I64) -> None:
        lengths = np.fromiter(map(len, words), np.int64, len(words))
        characters = np.frombuffer("".join(words).encode("utf-32-le"), np.uint32)
        places = np.arange(len(characters)) + np.repeat(np.arange(1, len(words) + 1), lengths)
        size = len(characters) + len(words) + 1
        self.symbols = np.full(size, _BETWEEN)
        self.symbols[places] = symbol_of_character[characters]
        self.counts = np.zeros(size, np.int64)
        self.counts[places] = np.repeat(np.fromiter(words.values(), np.int64, len(words)), lengths)
        self.left, self.right = np.arange(-1, size - 1), np.arange(1, size + 1)
        self.bounds = (self.symbols == _BETWEEN).nonzero()[0]

    def pairs(self) -> tuple[dict[int, int], dict[int, I64]]:
        """Return the count of every pair of neighbours, and its places, ascending."""
        at = ((self.symbols[:-1] >= 0) & (self.symbols[1:] >= 0)).nonzero()[0]
        counts: dict[int, int] = {}
        found: dict[int, I64] = {}
        for first, _, places in _grouped(self.symbols[at], self.counts[at], at):
            for second, count, around in _grouped(self.symbols[places + 1], self.counts[places], places):
                counts[pair := (first << 32) | second] = count
                found[pair] = around
        return counts, found

    def of(self, places: I64) -> I64:
        """Return the numbers of the words at these places."""
        return np.searchsorted(self.bounds, places)

    def merge(
        self, first: int, second: int, symbol: int, places: I64
    ) -> tuple[dict[int, int], dict[int, I64]]:
        """Merge a pair at those of `places`, ascending, where it is, in each word from left to right.

        Returns the changes of pairs' counts, and the places where pairs came up, ascending.
        """
        symbols, left, right = self.symbols, self.left, self.right
        at = places[(symbols[places] == first) & (symbols[right[places]] == second)]
        if first == second and len(at):  # of overlapping ones, the first, third and so on
            runs = np.flatnonzero(np.append(True, at[1:] != right[at[:-1]]))
            at = at[(np.arange(len(at)) - np.repeat(runs, np.diff(np.append(runs, len(at))))) % 2 == 0]
        gone, behind, counts = right[at], right[right[at]], self.counts[at]
        after = symbols[behind]
        symbols[at], symbols[gone] = symbol, _GONE
        before = symbols[left[at]]
        before[before == _GONE] = symbol  # the pair on the left was merged just now
        right[at] = behind
        left[behind] = at
        changes: defaultdict[int, int] = defaultdict(int)
        up: dict[int, I64] = {}
        for neighbour, count, around in _grouped(before, counts, left[at]):
            changes[(neighbour << 32) | first] -= count
            changes[pair := (neighbour << 32) | symbol] += count
            up[pair] = around
        for neighbour, count, around in _grouped(after, counts, at):
            changes[(second << 32) | neighbour] -= count
            changes[pair := (symbol << 32) | neighbour] += count
            up[pair] = np.union1d(up[pair], around) if pair in up else around
        return changes, up


def learn_merges(
    words: Mapping[str, int], tokens: Sequence[str], size: int
) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Return the vocabulary, of at most `size` tokens, and the merges that a BPE learns from counted words.

    `tokens` are the first ones: special tokens, and every character of a word.
    """
    names = list(tokens)
    vocabulary = {token: number for number, token in enumerate(names)}
    symbol_of_character = np.zeros(1 + max(ord(token) for token in names if len(token) == 1), np.int64)
    for token, number in vocabulary.items():
        if len(token) == 1:
            symbol_of_character[ord(token)] = number
    text = _Words(words, symbol_of_character)
    queue = _Queue(text)
    queue.add(*text.pairs())
    merges: dict[int, None] = {}
    while len(vocabulary) < size and (found := queue.pop()):
        pair, places = found
        first, second = pair >> 32, pair & 0xFFFFFFFF
        name = names[first] + names[second]
        symbol = vocabulary.setdefault(name, len(names))
        if symbol == len(names):
            names.append(name)
        merges.pop(pair, None)
        merges[pair] = None
        queue.add(*text.merge(first, second, symbol, places))
    return vocabulary, [(names[pair >> 32], names[pair & 0xFFFFFFFF]) for pair in merges]


class _Queue:
    """Pairs by their counts, largest first, each with the places where it came up."""

    def __init__(self, text: _Words) -> None:
        self._text = text
        self._counts: defaultdict[int, int] = defaultdict(int)
        self._heap: list[tuple[int, int, int]] = []  # (-count, pair, number of the entry)
        self._places: dict[int, dict[int, I64]] = {}  # by pair, and by number of the entry
        self._entries = 0

    def add(self, changes: Mapping[int, int], up: Mapping[int, I64]) -> None:
        """Change the counts of pairs, and queue those that came `up`, with all their places."""
        for pair, change in changes.items():
            self._counts[pair] += change
        for pair, places in up.items():
            if (count := self._counts[pair]) > 0:
                self._entries += 1
                heapq.heappush(self._heap, (-count, pair, self._entries))
                self._places.setdefault(pair, {})[self._entries] = places

    def pop(self) -> tuple[int, I64] | None:
        """Return the next pair and the places where it may be, ascending; None where no pair is left.

        If the pair is queued twice, the words are told by this entry, and all its places in them are given.
        """
        while self._heap:
            known, key, entry = heapq.heappop(self._heap)
            count = self._counts[key]
            if count != -known:
                heapq.heappush(self._heap, (-count, key, entry))
                continue
            if count < 1:
                return None
            queued = self._places[key]
            places = queued.pop(entry)
            if queued:
                every = np.unique(np.concatenate([places, *queued.values()]))
                places = every[np.isin(self._text.of(every), self._text.of(places))]
            return key, places
        return None


def _grouped(symbols: I64, counts: I64, places: I64) -> Iterator[tuple[int, int, I64]]:
    """Yield (symbol, the sum of its counts, its places in their order) of each symbol but marks (< 0)."""
    inside = (symbols >= 0).nonzero()[0]
    if len(inside) == 0:
        return
    found = symbols[inside]
    # Numpy sorts 16 bits by radix, many times as fast as it sorts 64.
    order = np.argsort(found.astype(np.uint16) if found.max() < 1 << 16 else found, kind="stable")
    found, order = found[order], inside[order]
    starts = np.flatnonzero(np.diff(found, prepend=_BETWEEN))
    bounds = pairwise([*starts.tolist(), len(order)])
    counts, places = np.add.reduceat(counts[order], starts), places[order]
    for symbol, count, (start, stop) in zip(found[starts].tolist(), counts.tolist(), bounds, strict=True):
        yield symbol, count, places[start:stop]
