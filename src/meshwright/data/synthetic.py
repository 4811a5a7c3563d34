"""A corpus without text: every token is a hash of (seed, document, position), so it costs no disk."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from meshwright.data.document_index import DocumentIndex, Documents, index_in_memory
from meshwright.data.manifest import digest_of
from meshwright.data.permutation import I64, U64, hash64

DOCUMENTS = 4096
SHORTEST, LONGEST = 16, 1024
_LENGTH, _CONTENT, _TOKEN = 1, 2, 3  # streams of the seed


class SyntheticTokens:
    """About a million tokens in `DOCUMENTS` documents of lengths log-uniform from `SHORTEST` to `LONGEST`.

    END is the last id of the vocabulary. The others follow a skewed law (id = floor(v * u^3), u uniform), so
    that a model has something to learn: the skew, and nothing else.
    """

    def __init__(self, seed: int, vocab_size: int) -> None:
        self._seed = seed
        self._vocab_size = vocab_size
        self.documents = DOCUMENTS
        document = np.arange(DOCUMENTS)
        span = np.log(LONGEST / SHORTEST)
        lengths = (SHORTEST * np.exp(span * _uniform(hash64(seed, _LENGTH, document)))).astype(np.int64)
        self._starts: I64 = np.concatenate([[0], np.cumsum(lengths + 1)])
        self._hashes: U64 = hash64(seed, _CONTENT, document)
        self._bytes: I64 = self._count_bytes()
        self.digest = digest_of([], synthetic=1, seed=seed, vocab_size=vocab_size)

    def take(self, place: I64) -> I64:
        """Return the token ids at these places of the stream, in the shape of `place`."""
        document = np.searchsorted(self._starts, place, side="right") - 1
        position = place - self._starts[document]
        uniform = _uniform(hash64(self._seed, _TOKEN, document, position))
        ids = ((self._vocab_size - 1) * uniform**3).astype(np.int64)
        return np.where(position == 0, self._vocab_size - 1, ids)

    def rows(self, first: int, last: int) -> Documents:
        """Return the documents from number `first` up to `last`."""
        return Documents(self._starts[first : last + 1], self._bytes[first:last], self._hashes[first:last])

    def index(self, val_fraction: float, window: int) -> DocumentIndex:
        """Return its documents split in two."""
        return index_in_memory(self, val_fraction, window)

    def _count_bytes(self) -> I64:
        """Return the bytes of each document spelt in decimal numbers with one space between."""
        ids = self.take(np.arange(self._starts[-1]))
        ids[self._starts[:-1]] = 0
        digits = 1 + (np.arange(self._vocab_size)[:, None] >= 10 ** np.arange(1, 10)).sum(axis=1)
        sums = np.concatenate([[0], np.cumsum(digits[ids] + 1)])
        # END counts as one digit and a space, and so does the space after the last number.
        return sums[self._starts[1:]] - sums[self._starts[:-1]] - 3


@lru_cache(maxsize=4)
def synthetic_tokens(seed: int, vocab_size: int) -> SyntheticTokens:
    """Return the corpus of a seed and a vocabulary; a process makes it once, since its bytes take long."""
    return SyntheticTokens(seed, vocab_size)


def _uniform(word: U64) -> np.ndarray:
    """Return numbers uniform in [0, 1) from the top 53 bits of hashes."""
    return (word >> np.uint64(11)).astype(np.float64) * 2.0**-53
