from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from meshwright.data import shard_writer
from meshwright.data.manifest import DOCUMENT, MANIFEST, VERSION, TokenManifest
from meshwright.data.publish import sha256_file
from meshwright.data.shard_writer import ShardWriter
from meshwright.data.shards import TokenShards
from meshwright.data.tokenizer import byte_tokenizer, number_tokenizer
from meshwright.data.verified import BESIDE
from meshwright.spec import UserError


def documents(count: int, vocab_size: int) -> list[np.ndarray]:
    rng = np.random.default_rng(count)
    return [rng.integers(0, vocab_size, rng.integers(0, 40)).astype(np.uint32) for _ in range(count)]


def write(folder: Path, docs: list[np.ndarray], vocab_size: int = 257, tokens_per_shard: int = 2**28) -> Path:
    tokenizer = byte_tokenizer() if vocab_size == 257 else number_tokenizer(vocab_size)
    with ShardWriter(folder, tokenizer, tokens_per_shard) as writer:
        for number, ids in enumerate(docs):
            writer.add(ids, utf8_bytes=2 * len(ids), content_hash=2**64 - 1 - number)
        writer.finish()
    return folder


@pytest.mark.parametrize("vocab_size", [257, 70_000])
@pytest.mark.parametrize("tokens_per_shard", [2**28, 100, 1])
def test_what_was_written_is_read(tmp_path: Path, vocab_size: int, tokens_per_shard: int) -> None:
    docs = documents(30, vocab_size)
    opened = TokenShards(write(tmp_path / "s", docs, vocab_size, tokens_per_shard))
    end = opened.tokenizer.end_id
    stream = np.concatenate([np.concatenate([[end], ids]) for ids in docs])
    assert opened.take(np.arange(len(stream))).tolist() == stream.tolist()
    places = np.random.default_rng(0).integers(0, len(stream), (5, 7))
    assert opened.take(places).tolist() == stream[places].tolist()
    lengths = [len(ids) for ids in docs]
    starts = np.cumsum([0, *(n + 1 for n in lengths)])
    for first, last in [(0, 30), (0, 1), (29, 30), (7, 19), (3, 4)]:
        rows = opened.rows(first, last)
        assert rows.starts.tolist() == starts[first : last + 1].tolist()
        assert rows.bytes.tolist() == [2 * n for n in lengths[first:last]]
        assert rows.hashes.tolist() == [2**64 - 1 - i for i in range(first, last)]
    names = {path.name for path in (tmp_path / "s").glob("*.tokens.bin")}
    assert len(names) == {2**28: 1, 1: 30}.get(tokens_per_shard, len(names))
    assert (len(names) > 1) == (tokens_per_shard < 2**28)


def test_the_writer_flushes_and_hashes_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = TokenShards(write(tmp_path / "a", documents(30, 256)))
    monkeypatch.setattr(shard_writer, "_WRITE_BUFFER", 16)
    pieces = TokenShards(write(tmp_path / "b", documents(30, 256)))
    assert pieces.digest == whole.digest


def files_of(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.is_file())


def read_all(folder: Path) -> None:
    opened = TokenShards(folder)
    opened.take(np.arange(opened.manifest.tokens))
    opened.rows(0, opened.documents)


@pytest.mark.parametrize("recorded", [True, False])
def test_a_flipped_bit_anywhere_is_refused_by_file_name(tmp_path: Path, recorded: bool) -> None:
    folder = write(tmp_path / "s", documents(12, 256), tokens_per_shard=100)
    if not recorded:
        shutil.rmtree(folder / BESIDE)
    rng = np.random.default_rng(0)
    flips = 0
    for path in files_of(folder):
        raw = path.read_bytes()
        for place in {0, len(raw) - 1, *rng.integers(0, len(raw), 30).tolist()}:
            flipped = bytearray(raw)
            flipped[place] ^= 1 << int(rng.integers(8))
            path.write_bytes(flipped)
            with pytest.raises(UserError, match=path.name.replace(".", r"\.")) as caught:
                read_all(folder)
            assert "\n" not in str(caught.value)
            flips += 1
        path.write_bytes(raw)
    read_all(folder)
    assert flips > 200


@pytest.mark.parametrize("cut", [1, 2, 24, 10**9])
def test_a_truncated_or_grown_file_is_refused(tmp_path: Path, cut: int) -> None:
    good = write(tmp_path / "good", documents(12, 256))
    for name in [path.name for path in files_of(good)]:
        raw = (good / name).read_bytes()
        for changed in (raw[: max(0, len(raw) - cut)], raw + b"\0" * min(cut, 100)):
            (good / name).write_bytes(changed)
            with pytest.raises(UserError, match=name.replace(".", r"\.")):
                TokenShards(good)
        (good / name).write_bytes(raw)
    TokenShards(good)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    for name in [path.name for path in files_of(write(tmp_path / "x", documents(3, 256)))]:
        folder = write(tmp_path / name, documents(3, 256))
        (folder / name).unlink()
        with pytest.raises(UserError, match=name.replace(".", r"\.")):
            TokenShards(folder)


def forge(folder: Path, **changes: object) -> None:
    """Rewrite the manifest with its own hash right: what only a hand, not an accident, can do."""
    fields = json.loads((folder / MANIFEST).read_bytes())
    fields.pop("sha256")
    manifest = TokenManifest.model_validate({**fields, **changes})
    (folder / MANIFEST).write_bytes(manifest.render())


def test_a_token_beyond_the_vocabulary_is_named(tmp_path: Path) -> None:
    folder = write(tmp_path / "s", [np.array([5, 299], dtype=np.uint32)], vocab_size=300)
    TokenShards(folder)
    forge(folder, vocab_size=299)
    with pytest.raises(UserError, match=r"00000\.tokens\.bin: holds the token id 299, .* 299 entries"):
        TokenShards(folder)


def test_the_writer_refuses_such_a_token(tmp_path: Path) -> None:
    with ShardWriter(tmp_path / "s", number_tokenizer(300)) as writer, pytest.raises(ValueError, match="300"):
        writer.add(np.array([300], dtype=np.uint32), 0, 0)


@pytest.mark.parametrize("name", ["../outside.bin", "/etc/hostname", "sub/inside.bin", ".."])
def test_no_listed_file_lies_elsewhere(tmp_path: Path, name: str) -> None:
    folder = write(tmp_path / "s", documents(3, 256))
    (tmp_path / "outside.bin").write_bytes(b"x")
    files = json.loads((folder / MANIFEST).read_bytes())["files"]
    forge(folder, files={**files, name: {"bytes": 1, "sha256": "0"}})
    with pytest.raises(UserError, match="is not a file there"):
        TokenShards(folder)


def test_no_listed_file_is_a_link(tmp_path: Path) -> None:
    folder = write(tmp_path / "s", documents(3, 256))
    (folder / "00000.tokens.bin").rename(tmp_path / "moved.bin")
    (folder / "00000.tokens.bin").symlink_to(tmp_path / "moved.bin")
    with pytest.raises(UserError, match=r"00000\.tokens\.bin: the manifest lists it, but it is not a file"):
        TokenShards(folder)


def test_counts_that_do_not_fit_the_files_are_refused(tmp_path: Path) -> None:
    folder = write(tmp_path / "s", documents(3, 256))
    forge(folder, shards=[{"tokens": 2**50, "documents": 3}])
    with pytest.raises(UserError, match=r"does not list 00000\.tokens\.bin as it should"):
        TokenShards(folder)


def test_a_document_table_that_does_not_fill_the_tokens_is_refused(tmp_path: Path) -> None:
    folder = write(tmp_path / "s", documents(3, 256))
    path = folder / "00000.documents.bin"
    table = np.fromfile(path, dtype=DOCUMENT)
    table["start"] = table["start"][::-1]
    path.write_bytes(table.tobytes())
    files = json.loads((folder / MANIFEST).read_bytes())["files"]
    entry = {"bytes": path.stat().st_size, "sha256": sha256_file(path)}
    forge(folder, files={**files, path.name: entry})
    with pytest.raises(UserError, match=r"00000\.documents\.bin: its documents do not fill the token file"):
        TokenShards(folder)


def test_another_version_is_named(tmp_path: Path) -> None:
    folder = write(tmp_path / "s", documents(3, 256))
    forge(folder, version=99)
    with pytest.raises(UserError, match=f"has version 99, and {VERSION} is read"):
        TokenShards(folder)


def test_the_same_documents_have_the_same_digest_elsewhere(tmp_path: Path) -> None:
    one, other = (TokenShards(write(tmp_path / name, documents(5, 256))) for name in "ab")
    assert one.digest == other.digest
    assert TokenShards(write(tmp_path / "c", documents(6, 256))).digest != one.digest
