"""Data sets in Megatron's format, written here byte by byte: tokens and bounds, or a sentence."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from sample_texts import texts

from meshwright import api
from meshwright.data.corpus import open_corpus
from meshwright.data.shards import TokenShards
from meshwright.data.sources import open_source
from meshwright.data.tokenize import Counts
from meshwright.data.tokenizer import Tokenizer, train_bpe
from meshwright.spec import UserError
from meshwright.spec.load import from_tree

CODES = {"uint8": 1, "int8": 2, "int16": 3, "int32": 4, "int64": 5, "float64": 6, "float32": 7, "uint16": 8}


def write(
    prefix: Path, documents: Sequence[Sequence[Sequence[int]]], dtype: str = "uint16", modes: bool = False
) -> None:
    """Write documents, each of sequences of ids."""
    kind = np.dtype(dtype).newbyteorder("<")
    sequences = [sequence for document in documents for sequence in document]
    ids = [number for sequence in sequences for number in sequence]
    lengths = [len(sequence) for sequence in sequences]
    starts = [kind.itemsize * sum(lengths[:number]) for number in range(len(lengths))]
    bounds = [sum(map(len, documents[:number])) for number in range(len(documents) + 1)]
    index = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, CODES[dtype], len(sequences), len(bounds))
    index += struct.pack(f"<{len(lengths)}i", *lengths) + struct.pack(f"<{len(starts)}q", *starts)
    index += struct.pack(f"<{len(bounds)}q", *bounds) + bytes(len(sequences) if modes else 0)
    prefix.with_name(prefix.name + ".idx").write_bytes(index)
    prefix.with_name(prefix.name + ".bin").write_bytes(np.array(ids, kind).tobytes())


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    """A BPE of 280 entries whose file is tmp_path/tokenizer.json."""
    found = train_bpe(texts(40), 280)
    found.save(tmp_path)
    return found


def tokenize(corpus: Path, out: Path, vocab_size: int = 280) -> Counts:
    return api.tokenize(str(corpus), str(out.parent / "tokenizer.json"), out, vocab_size=vocab_size)


@pytest.mark.parametrize("ends", [True, False], ids=["append-eod", "without"])
@pytest.mark.parametrize("dtype", ["uint16", "int32", "int64", "int16"])
def test_tokens_and_hashes_are_those_of_the_text(
    ends: bool, dtype: str, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    written = list(texts(40))
    (tmp_path / "text").mkdir()
    for number, text in enumerate(written):
        (tmp_path / "text" / f"{number:03d}.txt").write_bytes(text.encode())
    end = [tokenizer.end_id] if ends else []
    write(tmp_path / "set", [[[*tokenizer.encode(text), *end]] for text in written], dtype)
    wanted = tokenize(tmp_path / "text", tmp_path / "wanted")
    for number, name in enumerate(("set", "set.idx", "set.bin")):
        assert tokenize(tmp_path / name, tmp_path / f"found{number}") == wanted
    (tmp_path / "folder").mkdir()
    for suffix in (".idx", ".bin"):
        (tmp_path / "folder" / f"a{suffix}").write_bytes((tmp_path / f"set{suffix}").read_bytes())
    assert tokenize(tmp_path / "folder", tmp_path / "found") == wanted


def test_documents_of_several_sequences_keep_their_bounds(tokenizer: Tokenizer, tmp_path: Path) -> None:
    end = tokenizer.end_id
    documents = [[[5, 6], [7]], [[8, end]], [], [[end]], [[9], [], [end, 10], [11, end]]]
    write(tmp_path / "set", documents, modes=True)
    counts = tokenize(tmp_path / "set", tmp_path / "out")
    assert counts.documents == 3 and counts.skipped == {"empty": 2}
    shards = TokenShards(tmp_path / "out")
    assert shards.take(np.arange(shards.tokens)).tolist() == [end, 5, 6, 7, end, 8, end, 9, end, 10, 11]
    assert shards.rows(0, 3).starts.tolist() == [0, 4, 6, 11]


def test_an_index_may_name_sequences_in_any_order(tokenizer: Tokenizer, tmp_path: Path) -> None:
    write(tmp_path / "set", [[[5, 6]], [[7, 8, 9]], [[10]]])
    index = bytearray((tmp_path / "set.idx").read_bytes())
    struct.pack_into("<3i", index, 34, 1, 2, 3)
    struct.pack_into("<3q", index, 46, 10, 0, 4)
    (tmp_path / "set.idx").write_bytes(index)
    tokenize(tmp_path / "set", tmp_path / "out")
    shards = TokenShards(tmp_path / "out")
    end = tokenizer.end_id
    assert shards.take(np.arange(shards.tokens)).tolist() == [end, 10, end, 5, 6, end, 7, 8, 9]


def test_a_run_reads_it(tokenizer: Tokenizer, tmp_path: Path) -> None:
    write(tmp_path / "set", [[tokenizer.encode(text)] for text in texts(40)])
    tree = {
        "model": {"vocab_size": 280},
        "data": {
            "corpus": str(tmp_path / "set"),
            "tokenizer": str(tmp_path / "tokenizer.json"),
            "seq_len": 16,
            "cache": str(tmp_path / "cache"),
        },
        "train": {"batch_tokens": 64},
    }
    corpus = open_corpus(from_tree(tree))
    assert corpus.train.documents + corpus.validation.documents == 40
    assert corpus.validation_text().decode() in "".join(texts(40))
    for setting in ("bpe", "bpe:280"):
        with pytest.raises(UserError, match=r"data\.tokenizer: .*set holds token ids.* its tokenizer\.json$"):
            open_corpus(from_tree(tree | {"data": tree["data"] | {"tokenizer": setting}}))


def test_ids_beyond_the_tokenizer_are_refused(tokenizer: Tokenizer, tmp_path: Path) -> None:
    for dtype, wrong in (("uint16", 280), ("int32", -1)):
        write(tmp_path / "set", [[[5, 6]], [[7, wrong]]], dtype)
        sentence = rf"document 1 of .*set\.bin has the token id {wrong}, and the tokenizer has 280 entries"
        with pytest.raises(UserError, match=sentence) as told:
            tokenize(tmp_path / "set", tmp_path / "out")
        assert told.value.code == 2 and not (tmp_path / "out").exists()


HEADER = struct.Struct("<9sQBQQ")
MAGIC = b"MMIDIDX\0\0"


def packed(version: int = 1, code: int = 8, sequences: int = 2, entries: int = 3, body: bytes = b"") -> bytes:
    return HEADER.pack(MAGIC, version, code, sequences, entries) + body


def body(lengths: tuple[int, int], starts: tuple[int, int], bounds: tuple[int, int, int]) -> bytes:
    return struct.pack("<2i2q3q", *lengths, *starts, *bounds)


GOOD = body((2, 1), (0, 4), (0, 1, 2))
HOSTILE: dict[str, tuple[bytes, str]] = {
    "cut header": (packed()[:20], "does not begin with the 34 bytes of an index of Megatron"),
    "counts beyond the file": (packed(sequences=2**40, body=GOOD), r"has 82 bytes, and 1,099,.* sequences"),
    "largest counts": (packed(sequences=2**64 - 1, entries=2**64 - 1, body=GOOD), "has 82 bytes, and 18,4"),
    "cut body": (packed(body=GOOD[:-1]), r"has 81 bytes, and 2 sequences in 3 entries take 82"),
    "longer body": (packed(body=GOOD + bytes(9)), "has 91 bytes"),
    "version": (packed(version=2, body=GOOD), "has version 2, and version 1 is read"),
    "floats": (packed(code=7, body=GOOD), "says that its data are float32, not token ids"),
    "code": (packed(code=99, body=GOOD), "numbers of the unknown code 99"),
    "negative length": (packed(body=body((2, -1), (0, 4), (0, 1, 2))), "sequence 1 at byte 4 with -1 ids"),
    "negative place": (packed(body=body((2, 1), (-8, 4), (0, 1, 2))), "sequence 0 at byte -8 with 2 ids"),
    "beyond the tokens": (packed(body=body((2, 2), (0, 4), (0, 1, 2))), r"with 2 ids, and .*bin has 6 bytes"),
    "far beyond": (packed(body=body((2, 2), (0, 2**62), (0, 1, 2))), "at byte 4611686018427387904"),
    "first document": (packed(body=body((2, 1), (0, 4), (1, 1, 2))), "begins its documents at sequence 1"),
    "documents back": (packed(body=body((2, 1), (0, 4), (0, 2, 1))), "document 1 from sequence 2 to 1, of 2"),
    "documents beyond": (packed(body=body((2, 1), (0, 4), (0, 1, 9))), "document 1 from sequence 1 to 9"),
    "documents short": (
        packed(body=body((2, 1), (0, 4), (0, 1, 1))),
        "2 sequences, and its .* end at 1",
    ),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_wrong_index_is_one_sentence(name: str, tokenizer: Tokenizer, tmp_path: Path) -> None:
    content, sentence = HOSTILE[name]
    (tmp_path / "set.idx").write_bytes(content)
    (tmp_path / "set.bin").write_bytes(struct.pack("<3H", 5, 6, 7))
    with pytest.raises(UserError, match=rf"^data\.corpus: .*set\.idx .*{sentence}") as told:
        tokenize(tmp_path / "set", tmp_path / "out")
    assert told.value.code == 2 and len(str(told.value).splitlines()) == 1


def test_half_a_data_set_and_others_beside_it(tokenizer: Tokenizer, tmp_path: Path) -> None:
    folder = tmp_path / "sets"
    folder.mkdir()
    write(folder / "a_text_document", [[[5, 6]]])
    write(folder / "b_text_document", [[[7]]])
    assert tokenize(folder, tmp_path / "both").documents == 2
    (folder / "readme.md").write_text("hello")
    sentence = r"holds data sets of Megatron and other files, such as readme\.md; give one .*a_text_document$"
    with pytest.raises(UserError, match=sentence):
        open_source(str(folder), "text")
    (folder / "a_text_document.bin").unlink()
    with pytest.raises(UserError, match=r"a_text_document\.idx is an index .*document\.bin is missing"):
        open_source(str(folder / "a_text_document"), "text")


def test_files_of_these_suffixes_that_are_others(tmp_path: Path) -> None:
    (tmp_path / "notes.idx").write_text("an index of words")
    assert list(open_source(str(tmp_path / "notes.idx"), "text").documents()) == ["an index of words"]
    (tmp_path / "notes.bin").write_bytes(b"\0\1")
    assert list(open_source(str(tmp_path), "text").documents()) == ["an index of words"]
    with pytest.raises(UserError, match=r"notes\.bin is binary"):
        list(open_source(str(tmp_path / "notes.bin"), "text").documents())
    with pytest.raises(UserError, match=r"there is no file or folder .*notes; did you mean"):
        open_source(str(tmp_path / "notes"), "text")
