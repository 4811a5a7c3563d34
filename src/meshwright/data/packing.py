"""From documents to samples of T tokens. Suffixes of names: N samples, T tokens of one.

The documents of a split, each [END, t1..tn], are joined into one stream that ends with a further END. Every
token of the stream but the first is predicted once: t1 from END, ..., the next document's END from tn. Where
a tokenizer puts another token before a text, that token stands in END's place as it is read, so that t1 is
predicted from it, while END is still what follows tn.

packed      sample i is the stream's places [i*T, (i+1)*T); the last is padded
unpacked    a sample is a window of T tokens of one document; each document's last is padded

Padding is END with the target `IGNORE`. The number of a token's document goes with it: attention sees
tokens of the same document only, by the mask of `kernels/attention_intervals.py`.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple, Protocol

import numpy as np

from meshwright.data.document_index import BLOCK, DocumentIndex, Side, TokenSource
from meshwright.data.permutation import I64
from meshwright.data.tokenizer import Tokenizer
from meshwright.spec.sections import DataSpec

IGNORE = -100


class Samples(NamedTuple):
    """Arrays (N, T), int64. Attention stays within equal `documents`; `positions` start at 0 in each."""

    tokens: I64
    targets: I64
    positions: I64
    documents: I64


class SplitSide(Protocol):
    """The samples of one side of a source's split, read in any order.

    A target here is a place that predicts, and of chats any place that is read.
    """

    documents: int
    pairs: bool
    """True for samples of pairs of answers, whose targets count together."""
    count: int
    """Samples."""
    target_tokens: int

    def targets_before(self, index_N: I64) -> I64:
        """Return the targets in all samples before each of these, in [0, count]."""
        ...

    def samples_for(self, targets: int) -> int:
        """Return how many samples hold the first so many targets."""
        ...

    def gather(self, index_N: I64) -> Samples:
        """Return the samples with these numbers, in [0, count)."""
        ...

    def byte_count(self, targets: int) -> int:
        """Return the UTF-8 bytes of the text that the first so many targets spell."""
        ...

    def text_bytes(self, targets: int) -> bytes:
        """Return that text."""
        ...

    def sample_text(self, targets: int, max_bytes: int) -> bytes | None:
        """Return whole documents of that text within `max_bytes`; None where it cannot be told."""
        ...


class _Documents(NamedTuple):
    """Some documents of a side of the split, in order; all arrays (documents,)."""

    start: I64
    """Their places in the stream of the side."""
    stop: I64
    origin: I64
    """Offset from a place in that stream to one in the source's stream."""
    bytes: I64
    windows: I64
    """Windows of the side before each document, when unpacked."""


class Windows:
    """The samples of one side of a source's split, read in any order; with `held` the held-out side."""

    pairs = False

    def __init__(
        self,
        source: TokenSource,
        index: DocumentIndex,
        tokenizer: Tokenizer,
        data: DataSpec,
        held: bool,
    ) -> None:
        self._source = source
        self._index, self._held_out, self._held = index, index.held_out, held
        self._tokenizer = tokenizer
        self._end, self._begin = tokenizer.end_id, tokenizer.begin_id
        self._seq_len = data.seq_len
        self._pack = data.pack
        self._mask = data.pack and data.document_mask
        self.documents = int(self._sums.documents[-1])
        self.target_tokens = int(self._sums.targets[-1])
        self.utf8_bytes = int(self._sums.bytes[-1])
        self.count = -(-self.target_tokens // self._seq_len) if self._pack else int(self._sums.windows[-1])

    @property
    def _sums(self) -> Side:
        """The sums of this side of the split. Raises `DataError` if their file was cut."""
        return self._index.side(self._held)

    def targets_before(self, index_N: I64) -> I64:
        """Return the targets in all samples before each of these, in [0, count]."""
        if self._pack:
            return np.minimum(index_N * self._seq_len, self.target_tokens)
        inside = np.minimum(index_N, self.count - 1)
        documents = self._of_blocks(np.unique(np.searchsorted(self._sums.windows, inside, side="right") - 1))
        number = np.searchsorted(documents.windows, inside, side="right") - 1
        start = documents.start[number] + (index_N - documents.windows[number]) * self._seq_len
        return np.minimum(start, documents.stop[number])

    def samples_for(self, targets: int) -> int:
        """Return how many samples hold the first so many targets."""
        if self._pack or not targets:
            return -(-targets // self._seq_len)
        _, documents = self._block_at(self._sums.targets, targets - 1)
        last = int(np.searchsorted(documents.start, targets - 1, side="right")) - 1
        return int(documents.windows[last] + (targets - 1 - documents.start[last]) // self._seq_len) + 1

    def gather(self, index_N: I64) -> Samples:
        """Return the samples with these numbers, in [0, count)."""
        start_N = self.targets_before(index_N)
        stop_N = self.targets_before(index_N + 1)
        place = start_N[:, None] + np.arange(self._seq_len + 1)
        inside = np.minimum(place, self.target_tokens - 1)
        documents = self._between(inside[:, 0], inside[:, -1])
        number = np.searchsorted(documents.start, inside, side="right") - 1
        ids = self._source.take(inside + documents.origin[number])
        ids[place >= self.target_tokens] = self._end
        used = place[:, :-1] < stop_N[:, None]
        read = ids
        if self._begin != self._end:
            read = np.where(place == documents.start[number], self._begin, ids)
        tokens = np.where(used, read[:, :-1], self._end)
        targets = np.where(used, ids[:, 1:], IGNORE)
        number, place = number[:, :-1], place[:, :-1]
        if not self._mask:
            positions = np.broadcast_to(np.arange(self._seq_len), tokens.shape).copy()
            return Samples(tokens, targets, positions, np.zeros_like(tokens))
        positions = place - np.maximum(documents.start[number], start_N[:, None])
        return Samples(tokens, targets, positions, number - number[:, :1])

    def text_bytes(self, targets: int) -> bytes:
        """Return the UTF-8 text that the first so many targets spell, decoded; END spells nothing.

        Exact for byte-level tokenizers; others may have normalised the text.
        """
        last = min(targets, self.target_tokens - 1)
        if last < 1:
            return b""
        documents = self._between(np.array([0]), np.array([last]))
        place = np.arange(1, last + 1)
        number = np.searchsorted(documents.start, place, side="right") - 1
        text = documents.start[number] != place
        ids = self._source.take((place + documents.origin[number])[text])
        cuts = np.flatnonzero(np.diff(number[text])) + 1
        return b"".join(self._tokenizer.decode_bytes(part.tolist()) for part in np.split(ids, cuts))

    def byte_count(self, targets: int) -> int:
        """Return the UTF-8 bytes of the text that the first so many targets spell.

        They were counted when the text was read, so they are exact for any tokenizer; a document that
        `targets` cuts is decoded for it.
        """
        if targets >= self.target_tokens:
            return self.utf8_bytes
        block, documents = self._block_at(self._sums.targets, targets)
        whole = int(np.searchsorted(documents.start, targets, side="right")) - 1
        counted = int(self._sums.bytes[block]) + int(documents.bytes[:whole].sum())
        start = int(documents.start[whole])
        if targets == start:
            return counted
        ids = self._source.take(np.arange(start + 1, targets + 1) + documents.origin[whole])
        return counted + len(self._tokenizer.decode_bytes(ids.tolist()))

    def whole_documents(self, max_bytes: int) -> int:
        """Return the targets of the first documents that have at most so many UTF-8 bytes together."""
        if max_bytes >= self.utf8_bytes:
            return self.target_tokens
        block, documents = self._block_at(self._sums.bytes, max_bytes)
        behind = int(self._sums.bytes[block]) + np.cumsum(documents.bytes)
        return int(documents.start[np.searchsorted(behind, max_bytes, side="right")])

    def sample_text(self, targets: int, max_bytes: int) -> bytes | None:
        """Return the text of the first whole documents of these targets within `max_bytes` together, or the
        beginning of a first one that is larger; None where the tokens spell another text than was read."""
        count = min(targets, self.whole_documents(max_bytes))
        if count or not targets:
            text = self.text_bytes(count)
            return text if len(text) == self.byte_count(count) else None
        if not self._tokenizer.is_byte_level:
            return None
        return self.text_bytes(min(targets, max_bytes))[:max_bytes]

    def _block_at(self, sums: I64, value: int) -> tuple[int, _Documents]:
        """Return the block in which a column of sums goes beyond a value, and its documents."""
        block = int(np.searchsorted(sums, value, side="right")) - 1
        return block, self._of_blocks(np.array([block]))

    def _between(self, first_N: I64, last_N: I64) -> _Documents:
        """Return all documents of the blocks that hold the places from `first_N` to `last_N`."""
        sums = self._sums.targets
        begin = np.searchsorted(sums, first_N, side="right") - 1
        end = np.searchsorted(sums, last_N, side="right")
        parts = [a + np.flatnonzero(np.diff(sums[a : b + 1])) for a, b in zip(begin, end, strict=True)]
        return self._of_blocks(np.unique(np.concatenate(parts)))

    def _of_blocks(self, blocks: I64) -> _Documents:
        """Return the side's documents in these blocks, which ascend."""
        cuts = [0, *(np.flatnonzero(np.diff(blocks) > 1) + 1).tolist(), len(blocks)]
        parts = [self._of_run(int(blocks[a]), int(blocks[b - 1]) + 1) for a, b in pairwise(cuts)]
        return _Documents(*(np.concatenate(column) for column in zip(*parts, strict=True)))

    def _of_run(self, first: int, last: int) -> _Documents:
        """Return the side's documents from block `first` up to block `last`."""
        rows = self._source.rows(first * BLOCK, min(last * BLOCK, self._source.documents))
        here = self._held_out.mask(rows.hashes, first * BLOCK) == self._held
        lengths = np.diff(rows.starts)[here]
        sums = self._sums
        stop = sums.targets[first] + np.cumsum(lengths)
        windows = np.zeros_like(lengths) if self._pack else -(-lengths // self._seq_len)
        return _Documents(
            start=stop - lengths,
            stop=stop,
            origin=rows.starts[:-1][here] - (stop - lengths),
            bytes=rows.bytes[here],
            windows=sums.windows[first] + np.cumsum(windows) - windows,
        )
