"""Samples by the index against a plain implementation that holds every document in memory."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import numpy as np
import pytest

from meshwright.data import document_index, packing
from meshwright.data.document_index import index_on_disk
from meshwright.data.packing import IGNORE, Samples, Windows
from meshwright.data.permutation import I64, hash64
from meshwright.data.shard_writer import ShardWriter
from meshwright.data.shards import TokenShards
from meshwright.data.tokenizer import byte_tokenizer
from meshwright.spec.sections import DataSpec

END = 256


class InMemory:
    """Arrays over all documents of one side, as the first version of the format was read."""

    def __init__(self, source: TokenShards, fraction: float, held: bool, seq_len: int, pack: bool) -> None:
        rows = source.rows(0, source.documents)
        out = np.zeros(source.documents, dtype=np.bool_)
        if fraction > 0 and source.documents >= 2:
            out = rows.hashes < np.uint64(min(int(fraction * 2.0**64), 2**64 - 1))
            if not out.any():
                out[np.argmin(rows.hashes)] = True
            elif out.all():
                out[np.argmax(rows.hashes)] = False
        chosen = np.flatnonzero(out == held)
        lengths = rows.starts[chosen + 1] - rows.starts[chosen]
        self.source, self.seq_len, self.pack = source, seq_len, pack
        self.starts = np.concatenate([[0], np.cumsum(lengths)])
        self.origin = rows.starts[chosen] - self.starts[:-1]
        self.bytes = rows.bytes[chosen]
        self.first = np.concatenate([[0], np.cumsum(-(-lengths // seq_len))])
        self.documents, self.targets = len(chosen), int(self.starts[-1])
        self.count = -(-self.targets // seq_len) if pack else int(self.first[-1])

    def targets_before(self, index: I64) -> I64:
        if self.pack:
            return np.minimum(index * self.seq_len, self.targets)
        document = np.minimum(np.searchsorted(self.first, index, side="right") - 1, self.documents - 1)
        start = self.starts[document] + (index - self.first[document]) * self.seq_len
        return np.minimum(start, self.starts[document + 1])

    def gather(self, index: I64) -> Samples:
        start, stop = self.targets_before(index), self.targets_before(index + 1)
        place = start[:, None] + np.arange(self.seq_len + 1)
        inside = np.minimum(place, self.targets - 1)
        document = np.searchsorted(self.starts, inside, side="right") - 1
        ids = self.source.take(inside + self.origin[document])
        ids[place >= self.targets] = END
        used = place[:, :-1] < stop[:, None]
        tokens, targets = np.where(used, ids[:, :-1], END), np.where(used, ids[:, 1:], IGNORE)
        document, place = document[:, :-1], place[:, :-1]
        if not self.pack:
            positions = np.broadcast_to(np.arange(self.seq_len), tokens.shape)
            return Samples(tokens, targets, positions, np.zeros_like(tokens))
        positions = place - np.maximum(self.starts[document], start[:, None])
        return Samples(tokens, targets, positions, document - document[:, :1])


def write(folder: Path, count: int) -> TokenShards:
    """`count` documents of 0 to 40 letters in shards of 300 tokens, hashes spread evenly."""
    rng = np.random.default_rng(count)
    with ShardWriter(folder, byte_tokenizer(), tokens_per_shard=300) as writer:
        for number in range(count):
            ids = rng.integers(97, 123, rng.integers(0, 40)).astype(np.uint32)
            writer.add(ids, len(ids), int(hash64(7, number)[0]))
        writer.finish()
    return TokenShards(folder)


COUNTS = {(1, 0.5): 256, (2, 1e-9): 1, (60, 0.05): 4, (60, 0.5): 1, (60, 0.999): 256}
"""Numbers of documents and fractions held out, with the size of a block that `make test` takes for both."""


@pytest.mark.parametrize(
    ("count", "fraction", "block"),
    [
        pytest.param(*each, block, marks=() if block == COUNTS[each] else pytest.mark.full)
        for each, block in product(COUNTS, (1, 4, 256))
    ],
)
@pytest.mark.parametrize("pack", [True, False])
def test_samples_are_those_of_the_plain_implementation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: int, pack: bool, count: int, fraction: float
) -> None:
    for module in (document_index, packing):
        monkeypatch.setattr(module, "BLOCK", block)
    monkeypatch.setattr(document_index, "_CHUNK", 3 * block)
    source, tokenizer = write(tmp_path / "tokens", count), byte_tokenizer()
    for seq_len in (1, 7, 64):
        where = tmp_path / f"index-{seq_len}"
        index = index_on_disk(where, source, fraction, 0 if pack else seq_len, check=True)
        for held in (False, True):
            plain = InMemory(source, fraction, held, seq_len, pack)
            found = Windows(source, index, tokenizer, DataSpec(seq_len=seq_len, pack=pack), held)
            sizes = found.documents, found.target_tokens, found.count, found.utf8_bytes
            assert sizes == (plain.documents, plain.targets, plain.count, plain.bytes.sum())
            if not plain.count:
                continue
            order = np.random.default_rng(1).permutation(plain.count)
            for one, other in zip(found.gather(order), plain.gather(order), strict=True):
                assert np.array_equal(one, other)
            before = plain.targets_before(np.arange(plain.count + 1))
            assert np.array_equal(found.targets_before(np.arange(plain.count + 1)), before)
            for targets in range(plain.targets + 1):
                assert found.samples_for(targets) == np.searchsorted(before, targets)
            held_bytes = np.concatenate([[0], np.cumsum(plain.bytes)])
            for size in range(int(plain.bytes.sum()) + 2):
                whole = np.searchsorted(held_bytes, size, side="right") - 1
                assert found.whole_documents(size) == plain.starts[whole]
