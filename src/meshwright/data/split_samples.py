"""The samples of all sources on one side of the validation split, and the first ones of each."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from meshwright.data.packing import Samples, SplitSide
from meshwright.data.permutation import I64


class Split:
    """The samples of all sources, numbered one source after the other.

    `sides` are those of the sources, `sizes` and `tokens_by_source` the samples and target tokens of each.
    """

    def __init__(self, windows: Sequence[SplitSide]) -> None:
        self.sides = tuple(windows)
        self.sizes = [part.count for part in windows]
        self.tokens_by_source = [part.target_tokens for part in windows]
        self._bounds: I64 = np.cumsum([0, *self.sizes])
        self.samples = sum(self.sizes)
        self.documents = sum(part.documents for part in windows)
        self.target_tokens = sum(self.tokens_by_source)

    def ids(self, source_N: I64, index_N: I64) -> I64:
        """Return the numbers in the split of samples that are given by source and number within it."""
        return self._bounds[source_N] + index_N

    def gather(self, id_N: I64) -> Samples:
        """Return the samples with these numbers, in [0, samples)."""
        source_N = np.searchsorted(self._bounds, id_N, side="right") - 1
        index_N = id_N - self._bounds[source_N]
        if (source_N == source_N[0]).all():
            return self.sides[int(source_N[0])].gather(index_N)
        rows = [(source_N == number).nonzero()[0] for number in range(len(self.sides))]
        parts = [w.gather(index_N[own]) for w, own in zip(self.sides, rows, strict=True) if own.size]
        back = np.argsort(np.concatenate(rows))
        return Samples(*(np.concatenate(column)[back] for column in zip(*parts, strict=True)))

    def shares(self, max_tokens: int | None = None) -> list[int]:
        """Return how many of `max_tokens` targets (default all) each source has, in proportion to its own.

        They are the first targets of each source.
        """
        if max_tokens is None or max_tokens >= self.target_tokens:
            return self.tokens_by_source
        behind = np.cumsum([0, *self.tokens_by_source]).tolist()
        cuts = [max_tokens * stop // self.target_tokens for stop in behind]
        return [stop - start for start, stop in pairwise(cuts)]

    def bytes_for(self, max_tokens: int | None = None) -> int:
        """Return the UTF-8 bytes that the first `max_tokens` targets spell (default all); END spells none."""
        return sum(self.bytes_by_source(max_tokens))

    def bytes_by_source(self, max_tokens: int | None = None) -> list[int]:
        """Return those bytes of each source."""
        shares = zip(self.sides, self.shares(max_tokens), strict=True)
        return [part.byte_count(targets) if targets else 0 for part, targets in shares]

    def text_bytes(self, max_tokens: int | None = None) -> bytes:
        """Return the text that the first `max_tokens` targets spell, decoded from the tokens."""
        return b"".join(part.text_bytes(targets) for part, targets in self._first(max_tokens))

    def _first(self, max_tokens: int | None) -> list[tuple[SplitSide, int]]:
        shares = zip(self.sides, self.shares(max_tokens), strict=True)
        return [(part, targets) for part, targets in shares if targets]

    def head(self, max_tokens: int | None = None, source: int | None = None) -> FirstSamples:
        """Return the samples that hold the first `max_tokens` targets (default all), or a source's part of
        them."""
        shares = self.shares(max_tokens)
        if source is not None:
            shares = [share if number == source else 0 for number, share in enumerate(shares)]
        return FirstSamples(self.sides, self._bounds, shares)

    def sample_text(self, max_tokens: int | None, max_bytes: int) -> bytes:
        """Return whole documents of that text, the first ones of each source, at most `max_bytes` together.

        No more than that is decoded. Empty where the tokenizer loses text: the tokens then spell another
        number of bytes than were read. A source whose first document is larger than its share gives its
        beginning if the tokenizer is byte-level, and else nothing.
        """
        first = self._first(max_tokens)
        sizes = [part.byte_count(targets) for part, targets in first]
        texts = []
        for (part, targets), size in zip(first, sizes, strict=True):
            share = max_bytes * size // sum(sizes) if sum(sizes) > max_bytes else max_bytes
            text = part.sample_text(targets, share)
            if text is None:
                return b""
            texts.append(text)
        return b"".join(texts)


class FirstSamples:
    """The first samples of each source of a split, numbered one source after the other.

    `samples` is their number. Only the first `shares[i]` targets of source i count; of pairs of answers all
    that are in these samples.
    """

    def __init__(self, windows: Sequence[SplitSide], bounds: I64, shares: Sequence[int]) -> None:
        self.sides, self._in_split, self._shares = windows, bounds, np.array(shares, dtype=np.int64)
        counts = [part.samples_for(share) for part, share in zip(windows, shares, strict=True)]
        self._bounds: I64 = np.cumsum([0, *counts])
        self.samples = int(self._bounds[-1])

    def at(self, number_N: I64) -> tuple[I64, I64]:
        """Return (number in the split, targets that count) of each sample with a number in [0, samples)."""
        source_N = np.searchsorted(self._bounds, number_N, side="right") - 1
        index_N = number_N - self._bounds[source_N]
        before_N = np.zeros_like(index_N)
        for source in np.unique(source_N).tolist():
            here = source_N == source
            before_N[here] = self.sides[source].targets_before(index_N[here])
        counted_N = self._shares[source_N] - before_N
        pairs_N = np.array([side.pairs for side in self.sides])[source_N]
        return self._in_split[source_N] + index_N, np.where(pairs_N, np.iinfo(np.int64).max, counted_N)
