"""From documents to samples of T tokens. Legend: N samples, T tokens of one, D documents.

The documents of a split, each [END, t1..tn], are joined into one stream that ends with a further END. Every
token of the stream but the first is predicted once: t1 from END, ..., the next document's END from tn.

packed      sample i is the stream's places [i*T, (i+1)*T); the last is padded
unpacked    a sample holds (a window of T tokens of) one document; each document's last is padded

Padding is END with the target `IGNORE`.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from meshwright.data.order import I64
from meshwright.data.shards import TokenSource
from meshwright.data.tokenizer import Tokenizer

IGNORE = -100


class Samples(NamedTuple):
    """Arrays (N, T), int64. Attention stays within equal `documents`; `positions` start at 0 in each."""

    tokens: I64
    targets: I64
    positions: I64
    documents: I64


class Windows:
    """The samples that some documents of one source make, read in any order."""

    def __init__(
        self,
        source: TokenSource,
        documents_D: I64,
        tokenizer: Tokenizer,
        *,
        seq_len: int,
        pack: bool,
        document_mask: bool,
    ) -> None:
        self._source = source
        self._tokenizer = tokenizer
        self._end = tokenizer.end_id
        self._seq_len = seq_len
        self._pack = pack
        self._mask = pack and document_mask
        lengths_D = source.starts[documents_D + 1] - source.starts[documents_D]
        self._starts: I64 = np.concatenate([[0], np.cumsum(lengths_D)])
        self._origin_D = source.starts[documents_D] - self._starts[:-1]
        self._bytes_D = source.bytes[documents_D]
        windows_D = -(-lengths_D // seq_len)
        self._first: I64 = np.concatenate([[0], np.cumsum(windows_D)])  # of each document, when unpacked
        self.documents = len(documents_D)
        self.target_tokens = int(self._starts[-1])
        self.count = -(-self.target_tokens // seq_len) if pack else int(self._first[-1])

    def targets_before(self, index_N: I64) -> I64:
        """Targets in all samples before each of these, in [0, count]."""
        return (
            np.minimum(index_N * self._seq_len, self.target_tokens) if self._pack else self._unpacked(index_N)
        )

    def gather(self, index_N: I64) -> Samples:
        """The samples with these numbers, in [0, count)."""
        start_N = self.targets_before(index_N)
        stop_N = self.targets_before(index_N + 1)
        place = start_N[:, None] + np.arange(self._seq_len + 1)
        inside = np.minimum(place, self.target_tokens - 1)
        document = np.searchsorted(self._starts, inside, side="right") - 1
        ids = self._source.take(inside + self._origin_D[document])
        ids[place >= self.target_tokens] = self._end
        used = place[:, :-1] < stop_N[:, None]
        tokens = np.where(used, ids[:, :-1], self._end)
        targets = np.where(used, ids[:, 1:], IGNORE)
        document, place = document[:, :-1], place[:, :-1]
        if not self._mask:
            positions = np.broadcast_to(np.arange(self._seq_len), tokens.shape).copy()
            return Samples(tokens, targets, positions, np.zeros_like(tokens))
        positions = place - np.maximum(self._starts[document], start_N[:, None])
        return Samples(tokens, targets, positions, document - document[:, :1])

    def text_bytes(self, targets: int) -> bytes:
        """The UTF-8 text that the first so many targets spell (END spells nothing), decoded from the tokens.

        Exact for byte-level tokenizers; others may have normalised the text.
        """
        place = np.arange(1, min(targets, self.target_tokens - 1) + 1)
        document = np.searchsorted(self._starts, place, side="right") - 1
        text = self._starts[document] != place
        ids = self._source.take((place + self._origin_D[document])[text])
        cuts = np.flatnonzero(np.diff(document[text])) + 1
        return b"".join(self._tokenizer.decode_bytes(part.tolist()) for part in np.split(ids, cuts))

    def byte_count(self, targets: int) -> int:
        """UTF-8 bytes of the text that the first so many targets spell.

        They were counted when the text was read, so they are exact for any tokenizer; a document that
        `targets` cuts is decoded for it.
        """
        targets = min(targets, self.target_tokens)
        whole = int(np.searchsorted(self._starts, targets, side="right")) - 1
        counted = int(self._bytes_D[:whole].sum())
        if targets == self._starts[whole]:
            return counted
        start = int(self._starts[whole])
        ids = self._source.take(np.arange(start + 1, targets + 1) + self._origin_D[whole])
        return counted + len(self._tokenizer.decode_bytes(ids.tolist()))

    def _unpacked(self, index_N: I64) -> I64:
        document = np.minimum(np.searchsorted(self._first, index_N, side="right") - 1, self.documents - 1)
        start = self._starts[document] + (index_N - self._first[document]) * self._seq_len
        return np.minimum(start, self._starts[document + 1])
