"""Chats on disk and as samples: marks, targets, bytes, and what a cut takes."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest

from meshwright.data.packing import IGNORE
from meshwright.data.shard_writer import ShardWriter
from meshwright.data.shards import TokenShards
from meshwright.data.split import content_hash
from meshwright.data.tokenizer import byte_tokenizer
from meshwright.data.whole_documents import WholeDocuments
from meshwright.spec.errors import DataError, UserError
from meshwright.spec.sections import DataSpec

Chat = tuple[list[int], list[bool]]


def chats(number: int, longest: int, count: int = 40) -> list[Chat]:
    """Chats of random bytes and marks; the first token is never trained on."""
    draw = random.Random(number)
    lengths = [draw.randint(1, longest) for _ in range(count)]
    return [
        (
            [draw.randrange(97, 123) for _ in range(length)],
            [False, *(draw.random() < 0.5 for _ in range(length - 1))],
        )
        for length in lengths
    ]


def written(folder: Path, rows: list[Chat], tokens_per_shard: int = 2**28) -> TokenShards:
    with ShardWriter(folder, byte_tokenizer(), tokens_per_shard, targets="marked") as writer:
        for number, (ids, trained) in enumerate(rows):
            content = int(content_hash(bytes([number, *ids]))[0])
            writer.add_marked(np.array(ids, dtype=np.uint32), np.array(trained), sum(trained), content)
        writer.finish()
    return TokenShards(folder)


def side(shards: TokenShards, held: bool = False, **data: object) -> WholeDocuments:
    spec = DataSpec.model_validate({"seq_len": 16, "val_fraction": 0.0} | data)
    return WholeDocuments(shards, shards.tokenizer, spec, held)


@pytest.mark.parametrize("tokens_per_shard", [2**28, 50])
def test_tokens_and_marks_are_those_that_were_written(tmp_path: Path, tokens_per_shard: int) -> None:
    rows = chats(0, 40)
    shards = written(tmp_path / "tokens", rows, tokens_per_shard)
    place = np.arange(shards.tokens)
    assert shards.take(place).tolist() == [token for ids, _ in rows for token in ids]
    assert shards.trained(place).tolist() == [mark for _, marks in rows for mark in marks]
    assert shards.rows(0, shards.documents).bytes.tolist() == [sum(marks) for _, marks in rows]


@pytest.mark.parametrize("pack", [True, False])
@pytest.mark.parametrize("longest", [16, 24])
def test_samples_have_each_chat_once_and_its_own_targets(tmp_path: Path, pack: bool, longest: int) -> None:
    rows = chats(1, longest)
    samples_of = side(written(tmp_path / "tokens", rows), pack=pack)
    samples = samples_of.gather(np.arange(samples_of.count))
    found = []
    for tokens, targets, positions, documents in zip(*samples, strict=True):
        ends = np.flatnonzero(np.diff(documents)) + 1
        for part in np.split(np.arange(16), ends):
            ids, wanted = tokens[part].tolist(), targets[part].tolist()
            assert positions[part].tolist() == list(range(len(part)))
            length = len(ids) if 256 not in ids else ids.index(256)
            assert wanted[length - 1 :] == [IGNORE] * (len(ids) - length + 1)
            marks = [False, *(target != IGNORE for target in wanted[: length - 1])]
            assert [target for target in wanted if target != IGNORE] == [
                token for token, mark in zip(ids[:length], marks, strict=True) if mark
            ]
            found.append((ids[:length], marks))
    cut = [(ids[:16], marks[:16]) for ids, marks in rows]
    assert sorted(found) == sorted(cut)
    if not pack:
        assert found == cut
    lost = [(ids[16:], marks[16:]) for ids, marks in rows if len(ids) > 16]
    assert samples_of.cut_documents == len(lost)
    assert samples_of.cut_tokens == sum(len(ids) for ids, _ in lost)
    assert samples_of.cut_trained == sum(sum(marks) for _, marks in lost)


def test_bytes_are_those_of_the_targets_that_are_read(tmp_path: Path) -> None:
    samples_of = side(written(tmp_path / "tokens", chats(2, 24)))
    targets = samples_of.gather(np.arange(samples_of.count)).targets
    used = np.diff(samples_of.targets_before(np.arange(samples_of.count + 1)))
    flat = np.concatenate([row[:count] for row, count in zip(targets, used, strict=True)])
    assert len(flat) == samples_of.target_tokens
    for count in range(samples_of.target_tokens + 1):
        expected = flat[:count][flat[:count] != IGNORE]
        assert samples_of.byte_count(count) == len(expected)
        assert samples_of.text_bytes(count) == bytes(expected.tolist())


def test_the_first_places_are_in_the_first_samples(tmp_path: Path) -> None:
    samples_of = side(written(tmp_path / "tokens", chats(3, 16)))
    before = samples_of.targets_before(np.arange(samples_of.count + 1)).tolist()
    for count in range(samples_of.target_tokens + 1):
        wanted = next(number for number, places in enumerate(before) if places >= count)
        assert samples_of.samples_for(count) == wanted


def test_a_held_out_chat_is_on_one_side(tmp_path: Path) -> None:
    rows = chats(4, 12)
    shards = written(tmp_path / "tokens", rows)
    sides = [side(shards, held, val_fraction=1e-12) for held in (False, True)]
    assert [each.documents for each in sides] == [39, 1]


def test_an_arrangement_is_made_once_and_again_where_it_is_damaged(tmp_path: Path) -> None:
    shards = written(tmp_path / "tokens", chats(5, 24))
    first = side(shards)
    (folder,) = shards.home.glob("whole-*")
    path = folder / "samples.npz"
    made = path.stat().st_mtime_ns
    side(shards)
    assert path.stat().st_mtime_ns == made
    path.write_bytes(path.read_bytes()[:-100])
    again = side(shards)
    numbers = np.arange(first.count)
    for ours, theirs in zip(first.gather(numbers), again.gather(numbers), strict=True):
        assert np.array_equal(ours, theirs)


def test_a_changed_mark_is_found(tmp_path: Path) -> None:
    shards = written(tmp_path / "tokens", chats(6, 24))
    path = tmp_path / "tokens" / "00000.trained.bin"
    content = bytearray(path.read_bytes())
    content[3] ^= 1
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"trained\.bin"):
        shards.trained(np.arange(8))
    with pytest.raises(UserError, match=r"trained\.bin"):
        TokenShards(tmp_path / "tokens", check="content")


def test_a_mark_for_each_token_is_needed(tmp_path: Path) -> None:
    with (
        ShardWriter(tmp_path / "tokens", byte_tokenizer(), targets="marked") as writer,
        pytest.raises(ValueError, match="3 tokens have 2 marks"),
    ):
        writer.add_marked(np.zeros(3, dtype=np.uint32), np.zeros(2, dtype=np.bool_), 0, 0)
