"""A corpus without text: every token is a hash of (seed, document, position), so it costs no disk."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from meshwright.data.document_index import DocumentIndex, Documents, index_in_memory
from meshwright.data.manifest import digest_of
from meshwright.data.permutation import I64, U64, hash64

DOCUMENTS = 4096
SHORTEST, LONGEST = 16, 1024
TURN = 4
"""Tokens of a turn of a chat."""
_LENGTH, _CONTENT, _TOKEN, _TRAINED, _PROMPT = 1, 2, 3, 4, 5  # streams of the seed


class SyntheticTokens:
    """About a million tokens in `DOCUMENTS` documents of lengths log-uniform from `SHORTEST` to `LONGEST`.

    END is the last id of the vocabulary. The others follow a skewed law (id = floor(v * u^3), u uniform), so
    that a model has something to learn: the skew, and nothing else.
    """

    marked = pairs = judged = False

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
        sums = np.concatenate([[0], np.cumsum(self._digits()[ids] + 1)])
        # END counts as one digit and a space, and so does the space after the last number.
        return sums[self._starts[1:]] - sums[self._starts[:-1]] - 3

    def _digits(self) -> I64:
        """Return the decimal digits of each id."""
        return 1 + (np.arange(self._vocab_size)[:, None] >= 10 ** np.arange(1, 10)).sum(axis=1)


class SyntheticChats(SyntheticTokens):
    """`DOCUMENTS` chats [END, t2..tn], n log-uniform from an eighth of `seq_len` to five quarters of it.

    Each turn of `TURN` tokens is trained on or not, by a hash; END never is.
    """

    marked = True
    home = None

    def __init__(self, seed: int, vocab_size: int, seq_len: int) -> None:
        super().__init__(seed, vocab_size)
        shortest, longest = max(2, seq_len // 8), 5 * seq_len // 4 + 1
        uniform = _uniform(hash64(seed, _LENGTH, np.arange(DOCUMENTS)))
        lengths = (shortest * np.exp(np.log(longest / shortest) * uniform)).astype(np.int64)
        self._starts = np.concatenate([[0], np.cumsum(lengths)])
        self._bytes = self._count_trained_bytes()
        self.digest = digest_of([], synthetic_chats=1, seed=seed, vocab_size=vocab_size, seq_len=seq_len)

    def trained(self, place: I64) -> NDArray[np.bool_]:
        """Return True for the tokens at these places of the stream that are trained on."""
        document = np.searchsorted(self._starts, place, side="right") - 1
        position = place - self._starts[document]
        drawn = hash64(self._seed, _TRAINED, document, position // TURN) >> np.uint64(63)
        return (drawn == 1) & (position > 0)

    def _count_trained_bytes(self) -> I64:
        """Return the bytes of each chat's trained tokens, spelt as `SyntheticTokens` are."""
        place = np.arange(self._starts[-1])
        trained = self.trained(place)
        digits = self._digits()[self.take(place)]
        sums = np.concatenate([[0], np.cumsum(np.where(trained, digits + 1, 0))])
        of_chats = sums[self._starts[1:]] - sums[self._starts[:-1]]
        return np.maximum(of_chats - 1, 0)


class SyntheticPairs(SyntheticChats):
    """`DOCUMENTS` answers in pairs, each [END, t2..tn] of as many tokens as half a chat of `SyntheticChats`.

    Both of a pair begin with the tokens of its first, which are their prompt, of a length that is uniform
    below that of the shorter one. What follows is trained on.
    """

    pairs = True

    def __init__(self, seed: int, vocab_size: int, seq_len: int) -> None:
        document = np.arange(DOCUMENTS)
        shortest, longest = max(2, seq_len // 16), 5 * seq_len // 8 + 1
        uniform = _uniform(hash64(seed, _LENGTH, document))
        lengths = (shortest * np.exp(np.log(longest / shortest) * uniform)).astype(np.int64)
        room = lengths.reshape(-1, 2).min(1) - 1
        drawn = _uniform(hash64(seed, _PROMPT, document[::2]))
        self._prompts = np.repeat(1 + (drawn * room).astype(np.int64), 2)
        super().__init__(seed, vocab_size, seq_len)
        self._starts = np.concatenate([[0], np.cumsum(lengths)])
        self._hashes = np.repeat(self._hashes[::2], 2)
        self._bytes = self._count_trained_bytes()
        self.digest = digest_of([], synthetic_pairs=1, seed=seed, vocab_size=vocab_size, seq_len=seq_len)

    def take(self, place: I64) -> I64:
        """Return the token ids at these places of the stream, in the shape of `place`."""
        document, position = self._document(place)
        inside = position < self._prompts[document]
        first = self._starts[document - document % 2] + position
        return super().take(np.where(inside, first, place))

    def trained(self, place: I64) -> NDArray[np.bool_]:
        """Return True for the tokens at these places of the stream that are trained on."""
        document, position = self._document(place)
        return position >= self._prompts[document]

    def _document(self, place: I64) -> tuple[I64, I64]:
        """The documents of places of the stream, and the positions in them."""
        document = np.searchsorted(self._starts, place, side="right") - 1
        return document, place - self._starts[document]


@lru_cache(maxsize=4)
def synthetic_tokens(seed: int, vocab_size: int) -> SyntheticTokens:
    """Return the corpus of a seed and a vocabulary; a process makes it once, since its bytes take long."""
    return SyntheticTokens(seed, vocab_size)


@lru_cache(maxsize=4)
def synthetic_chats(seed: int, vocab_size: int, seq_len: int) -> SyntheticChats:
    """Return the chats of a seed and a vocabulary for samples of `seq_len`, made once in a process, too."""
    return SyntheticChats(seed, vocab_size, seq_len)


@lru_cache(maxsize=4)
def synthetic_pairs(seed: int, vocab_size: int, seq_len: int) -> SyntheticPairs:
    """Return the pairs of a seed and a vocabulary for samples of `seq_len`, made once in a process, too."""
    return SyntheticPairs(seed, vocab_size, seq_len)


def _uniform(word: U64) -> np.ndarray:
    """Return numbers uniform in [0, 1) from the top 53 bits of hashes."""
    return (word >> np.uint64(11)).astype(np.float64) * 2.0**-53
