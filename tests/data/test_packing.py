from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.data import document_index, packing
from meshwright.data.document_index import DocumentIndex, Documents, TokenSource, index_in_memory
from meshwright.data.packing import IGNORE, Samples, Windows
from meshwright.data.shard_writer import ShardWriter
from meshwright.data.shards import TokenShards
from meshwright.data.tokenizer import byte_tokenizer
from meshwright.spec.sections import DataSpec

END = 256


class Memory:
    """A token source over lists; ids of document d are 100 * d + 1, 100 * d + 2, ... so each is unique."""

    def __init__(self, lengths: list[int]) -> None:
        self.docs = [[END, *(1000 * (d + 1) + i for i in range(n))] for d, n in enumerate(lengths)]
        self.documents = len(lengths)
        self.starts = np.cumsum([0, *(len(doc) for doc in self.docs)])
        self.stream = np.array([t for doc in self.docs for t in doc], dtype=np.int64)
        self.bytes = np.array(lengths, dtype=np.int64)
        self.hashes = np.arange(len(lengths), dtype=np.uint64)
        self.digest = ""

    def take(self, place: np.ndarray) -> np.ndarray:
        return self.stream[place]

    def rows(self, first: int, last: int) -> Documents:
        return Documents(self.starts[first : last + 1], self.bytes[first:last], self.hashes[first:last])

    def index(self, val_fraction: float, window: int) -> DocumentIndex:
        return index_in_memory(self, val_fraction, window)


@pytest.fixture(autouse=True, scope="module", params=[1, 3, 256])
def small_blocks(request: pytest.FixtureRequest) -> Iterator[None]:
    """Look-ups that cross blocks, empty ones too, and indices that are built in several chunks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(document_index, "BLOCK", request.param)
        patch.setattr(packing, "BLOCK", request.param)
        patch.setattr(document_index, "_CHUNK", 2 * request.param)
        yield


def side(source: TokenSource, share: float, seq_len: int, pack: bool, held: bool, mask: bool) -> Windows:
    index = source.index(share, 0 if pack else seq_len)
    data = DataSpec(seq_len=seq_len, pack=pack, document_mask=mask)
    return Windows(source, index, byte_tokenizer(), data, held)


def windows(source: Memory, documents: list[int], seq_len: int, pack: bool, mask: bool = True) -> Windows:
    """The samples of just these documents, which are given the high hashes."""
    number = np.arange(source.documents, dtype=np.uint64)
    source.hashes = number + np.where(np.isin(number, documents), np.uint64(2**63), np.uint64(0))
    share = 0.5 if len(documents) < source.documents else 0.0
    return side(source, share, seq_len, pack, held=False, mask=mask)


def expected_targets(source: Memory, documents: list[int]) -> list[int]:
    """Each chosen document's tokens and the END after it, in order."""
    return [t for d in documents for t in (*source.docs[d][1:], END)]


lengths_ = st.lists(st.integers(0, 40), min_size=1, max_size=12)


@settings(max_examples=150)
@given(lengths=lengths_, seq_len=st.integers(1, 30), pack=st.booleans(), mask=st.booleans(), data=st.data())
def test_every_token_is_predicted_once_from_the_token_before(lengths, seq_len, pack, mask, data) -> None:  # type: ignore[no-untyped-def]
    source = Memory(lengths)
    chosen = sorted(data.draw(st.sets(st.integers(0, len(lengths) - 1), min_size=1)))
    split = windows(source, chosen, seq_len, pack, mask)
    samples = split.gather(np.arange(split.count))
    real = samples.targets != IGNORE
    assert samples.targets[real].tolist() == expected_targets(source, chosen)
    assert samples.tokens[real].tolist() == [t for d in chosen for t in source.docs[d]]
    assert split.target_tokens == real.sum()
    assert (samples.tokens[~real] == END).all()
    # Within a sample, targets are the tokens shifted by one.
    follows = real[:, 1:]
    assert (samples.tokens[:, 1:][follows] == samples.targets[:, :-1][follows]).all()
    # Padding comes last in a sample, and packed samples but the last have none.
    assert (real[:, 1:] <= real[:, :-1]).all()
    if pack:
        assert real[:-1].all()
    assert split.targets_before(np.arange(split.count + 1)).tolist() == [0, *np.cumsum(real.sum(axis=1))]


@settings(max_examples=100)
@given(lengths=lengths_, seq_len=st.integers(1, 30))
def test_positions_and_documents_restart_at_each_end(lengths: list[int], seq_len: int) -> None:
    source = Memory(lengths)
    split = windows(source, list(range(len(lengths))), seq_len, pack=True)
    samples = split.gather(np.arange(split.count))
    for tokens, targets, positions, documents in zip(*samples, strict=True):
        position, document = -1, 0
        for t in range(seq_len):
            if targets[t] == IGNORE:
                break
            starts = tokens[t] == END
            position = 0 if starts else position + 1
            document += bool(starts and t > 0)
            assert (positions[t], documents[t]) == (position, document)
    assert samples.positions.max() < seq_len


@pytest.mark.parametrize("pack", [True, False])
def test_without_a_mask_a_sample_is_one_document(pack: bool) -> None:
    split = windows(Memory([3, 9, 1, 30]), [0, 1, 2, 3], 8, pack, mask=False)
    samples = split.gather(np.arange(split.count))
    assert (samples.documents == 0).all()
    assert (samples.positions == np.arange(8)).all()


def test_unpacked_samples_hold_one_document_each() -> None:
    source = Memory([0, 3, 7, 8, 20])
    split = windows(source, [0, 1, 2, 3, 4], 8, pack=False)
    assert split.count == 1 + 1 + 1 + 2 + 3
    samples = split.gather(np.arange(split.count))
    owner = np.where(samples.tokens == END, 0, samples.tokens // 1000)
    for row in owner:
        assert len(set(row[row > 0].tolist())) <= 1
    assert (samples.documents == 0).all()


def test_samples_are_read_in_any_order() -> None:
    split = windows(Memory([3, 9, 1, 30]), [0, 2, 3], 5, pack=True)
    whole = split.gather(np.arange(split.count))
    index = np.array([4, 0, 4, 6])
    some = split.gather(index)
    for one, other in zip(some, Samples(*(array[index] for array in whole)), strict=True):
        assert np.array_equal(one, other)


def test_bytes_of_a_prefix_are_the_bytes_that_its_targets_spell(tmp_path: Path) -> None:
    words = ["naïve ☃", "", "plain", "漢字" * 5]
    tokenizer = byte_tokenizer()
    with ShardWriter(tmp_path, tokenizer) as writer:
        for ids, word in zip(tokenizer.encode_batch(words), words, strict=True):
            writer.add(ids, len(word.encode()), 0 if word == "plain" else 2**63)
        writer.finish()
    chosen = [0, 1, 3]
    split = side(TokenShards(tmp_path), 0.5, 4, pack=True, held=False, mask=True)
    samples = split.gather(np.arange(split.count))
    targets = samples.targets[samples.targets != IGNORE]
    for limit in range(split.target_tokens + 1):
        spelt = bytes(t for t in targets[:limit].tolist() if t != END)
        assert split.byte_count(limit) == len(spelt)
        assert split.text_bytes(limit) == spelt
    assert split.text_bytes(10**9) == "".join(words[i] for i in chosen).encode()
    assert split.byte_count(10**9) == len(spelt)
