"""The validation split, by document and by content.

A fraction f holds out the documents with the content hashes below f * 2^64. So the split depends on neither
seed nor tokenizer, equal documents fall on the same side, and a document keeps its side when others are
added.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

from meshwright.data.permutation import U64


def content_hash(utf8: bytes) -> U64:
    """Return the 64-bit hash (1,) of a document's text that decides its side of the validation split."""
    return np.frombuffer(blake2b(utf8, digest_size=8).digest(), dtype="<u8").astype(np.uint64)


@dataclass(frozen=True)
class HeldOut:
    """The rule of a split: documents whose hash is below `limit` are held out for validation.

    `exception` is the number of one document for which the reverse holds, -1 for none.
    """

    limit: int
    exception: int = -1

    def mask(self, hashes: U64, first: int = 0) -> NDArray[np.bool_]:
        """Return True for each held-out document among those with these hashes, numbered from `first`."""
        out = hashes < np.uint64(self.limit)
        place = self.exception - first
        if self.exception >= 0 and 0 <= place < len(hashes):
            out[place] ^= True
        return out


class SplitSurvey:
    """Finds the split of a stream of documents in constant memory: `add` their hashes in order, then `rule`.

    A fraction above 0 of two documents or more holds out one at least (the one with the lowest hash), and
    leaves one at least (the one with the highest); a single document is never held out.
    """

    def __init__(self, fraction: float) -> None:
        self.limit = max(0, min(int(fraction * 2.0**64), 2**64 - 1))
        self._wanted = fraction > 0
        self._documents = self._below = 0
        self._lowest = self._highest = (0, -1)  # (hash, document)

    def add(self, hashes: U64) -> None:
        """Add the hashes of the next documents."""
        if not len(hashes):
            return
        low, high = int(np.argmin(hashes)), int(np.argmax(hashes))
        if not self._documents or hashes[low] < self._lowest[0]:
            self._lowest = (int(hashes[low]), self._documents + low)
        if not self._documents or hashes[high] > self._highest[0]:
            self._highest = (int(hashes[high]), self._documents + high)
        self._below += int(np.count_nonzero(hashes < np.uint64(self.limit)))
        self._documents += len(hashes)

    def rule(self) -> HeldOut:
        """Return the split of the documents so far."""
        if not self._wanted or self._documents < 2:
            return HeldOut(0)
        if self._below == 0:
            return HeldOut(self.limit, self._lowest[1])
        if self._below == self._documents:
            return HeldOut(self.limit, self._highest[1])
        return HeldOut(self.limit)
