"""Files in gzip and zstd: the texts of the same files unpacked, or a sentence that names file and byte."""

from __future__ import annotations

import gzip
import io
import json
import random
import sys
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest

from meshwright import api
from meshwright.data import readers, row_files
from meshwright.data.sources import open_source
from meshwright.spec import UserError
from meshwright.storage import compressed
from meshwright.storage.compressed import CompressedFile
from meshwright.storage.stored_file import LocalFile

zstandard = pytest.importorskip("zstandard", reason="zstandard of the extra dev makes files in zstd")


def zstd(content: bytes) -> bytes:
    return bytes(zstandard.compress(content))


def zstd_streamed(content: bytes) -> bytes:
    """A frame that does not say its size, with a checksum, behind a frame to be skipped."""
    packed = io.BytesIO()
    with zstandard.ZstdCompressor(write_checksum=True).stream_writer(packed, closefd=False) as writer:
        for start in range(0, len(content), 1000):
            writer.write(content[start : start + 1000])
    return b"\x50\x2a\x4d\x18\x03\0\0\0abc" + packed.getvalue()


PACK: dict[str, tuple[str, Callable[[bytes], bytes]]] = {
    "gzip": (".gz", gzip.compress),
    "gzip, padded": (".gz", lambda content: gzip.compress(content) + b"\0" * 300_000),
    "zstd": (".zst", zstd),
    "zstd, streamed": (".zst", zstd_streamed),
}


def read(path: Path) -> list[str]:
    return list(open_source(str(path), "text").documents())


def noise(size: int) -> bytes:
    return random.Random(7).randbytes(size)


@pytest.mark.parametrize("name", PACK)
@pytest.mark.parametrize("size", [0, 1, 2**16, 3 * 2**20 + 1])
@pytest.mark.parametrize("content", ["noise", "zeros"])
def test_what_is_unpacked_is_what_was_packed(name: str, size: int, content: str, tmp_path: Path) -> None:
    suffix, pack = PACK[name]
    plain = noise(size) if content == "noise" else bytes(size)
    path = tmp_path / f"x.txt{suffix}"
    for packed, wanted in ((pack(plain), plain), (pack(plain[:77]) + pack(plain), plain[:77] + plain)):
        if "padded" in name and len(wanted) > len(plain):
            continue  # nothing may follow zeros but zeros in half of the programs
        path.write_bytes(packed)
        file = CompressedFile(LocalFile(path))
        with file.open() as opened:
            assert opened.read() == wanted
        with file.open(len(wanted) // 3) as opened:
            assert opened.read(1000) == wanted[len(wanted) // 3 :][:1000]


@pytest.mark.parametrize("name", PACK)
def test_tokens_are_those_of_the_files_unpacked(name: str, tmp_path: Path) -> None:
    suffix, pack = PACK[name]
    rows = [{"text": f"row {number} ä " * (1 + number % 30)} for number in range(300)]
    files = {
        "a.jsonl": "\n".join(map(json.dumps, rows)).encode(),
        "b.JSON": json.dumps(rows[:20], indent=1).encode(),
        "c.csv": b'n,text\n1,"two\nlines"\n',
        "d.txt": b"\xef\xbb\xbfone<|endoftext|>two",
        "e.ndjson": json.dumps(rows[0], indent=2).encode() + json.dumps(rows[1]).encode(),
    }
    for kind in ("plain", "packed"):
        (tmp_path / kind).mkdir()
        for file, content in files.items():
            packed = kind == "packed"
            (tmp_path / kind / (file + suffix * packed)).write_bytes(pack(content) if packed else content)
    plain, packed = (
        api.tokenize(str(tmp_path / kind), "bpe", tmp_path / f"{kind}-out", vocab_size=300)
        for kind in ("plain", "packed")
    )
    assert plain == packed and plain.documents == 300 + 20 + 1 + 2 + 2
    for file in files:
        assert read(tmp_path / "packed" / (file + suffix)) == read(tmp_path / "plain" / file)


@pytest.mark.parametrize("name", ["gzip", "zstd", "zstd, streamed"])
def test_a_cut_or_damaged_file_is_one_sentence(name: str, tmp_path: Path) -> None:
    suffix, pack = PACK[name]
    lines = "".join(json.dumps({"text": noise(30).hex()}) + "\n" for _ in range(4000))
    whole = pack(lines.encode()) if name != "zstd" else pack(lines.encode()[:1000]) + pack(lines.encode())
    path = tmp_path / f"rows.jsonl{suffix}"
    for cut in (1, 9, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:cut])
        with pytest.raises(
            UserError, match=rf"{path.name} ends at byte {cut}, before its compressed"
        ) as told:
            read(path)
        assert told.value.code == 2 and str(told.value).endswith("; fetch or compress it again")
        with pytest.raises(UserError, match=f"ends at byte {cut}"):
            read(tmp_path)  # nor is it left out of a folder in silence
    for damaged in (b"no" + whole[2:], whole + b"what is this"):
        path.write_bytes(damaged)
        with pytest.raises(UserError, match=rf"{path.name} is damaged before its byte \d+ \(.+\)") as told:
            read(path)
        assert "\n" not in str(told.value)


def test_a_changed_byte_of_gzip_is_seen_by_its_checksum(tmp_path: Path) -> None:
    packed = bytearray(gzip.compress(b'{"text": "a"}\n' * 10))
    packed[-8] ^= 1
    (tmp_path / "rows.jsonl.gz").write_bytes(packed)
    with pytest.raises(UserError, match=r"rows\.jsonl\.gz is damaged before its byte \d+"):
        read(tmp_path / "rows.jsonl.gz")


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_a_small_file_that_unpacks_to_very_much_is_refused_in_little_memory(
    suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readers, "UNPACKED_FREELY", 10**6)
    monkeypatch.setattr(readers, "MOST_UNPACKED", 10)
    lines = json.dumps({"text": "x" * 10_000}).encode() + b"\n"
    (tmp_path / f"rows.jsonl{suffix}").write_bytes((gzip.compress if suffix == ".gz" else zstd)(lines * 500))
    with pytest.raises(UserError, match=r"unpacks to more than 1 MB of text"):
        read(tmp_path / f"rows.jsonl{suffix}")
    monkeypatch.setattr(row_files, "LARGEST_DOCUMENT", 10**5)
    packer = zlib.compressobj(wbits=31)
    endless = packer.compress(b'{"text": "' + b"x" * 10**7) + packer.flush()
    (tmp_path / "line.jsonl.gz").write_bytes(endless)
    with pytest.raises(UserError, match=r"the document in .*line 1 has more than"):
        read(tmp_path / "line.jsonl.gz")


def test_reads_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No more is unpacked at once than `_MOST_OUT`, however much the next bytes hold."""
    monkeypatch.setattr(compressed, "_MOST_OUT", 1000)
    path = tmp_path / "x.txt.gz"
    path.write_bytes(gzip.compress(bytes(10**6)))
    with CompressedFile(LocalFile(path)).open() as opened:
        raw = opened.raw  # type: ignore[attr-defined]
        opened.read(10)
        assert len(raw._ready) <= 1000
        assert len(opened.read()) == 10**6 - 10


def test_zstd_without_its_package_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "x.jsonl.zst").write_bytes(zstd(b'{"text": "a"}'))
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(UserError, match=r"needs the package zstandard; pip install 'meshwright\[zstd\]'"):
        read(tmp_path / "x.jsonl.zst")


def test_a_pointer_of_git_lfs_in_the_place_of_a_compressed_file_is_told(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl.gz"
    path.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 12\n")
    with pytest.raises(UserError, match=r"x\.jsonl\.gz is a pointer of Git LFS"):
        read(path)


def test_a_long_text_is_read_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readers, "LARGEST_DOCUMENT", 1000)
    monkeypatch.setattr(readers, "_AT_ONCE", 37)
    monkeypatch.setattr(readers, "_HEAD", 10)
    parts = [f"document {number} ä" * (1 + number % 20) for number in range(300)]
    (tmp_path / "x.txt").write_text("<|endoftext|>".join(parts))
    (tmp_path / "y.txt.gz").write_bytes(gzip.compress((tmp_path / "x.txt").read_bytes()))
    assert read(tmp_path / "x.txt") == read(tmp_path / "y.txt.gz") == parts
    (tmp_path / "x.txt").write_bytes("<|endoftext|>".join(parts).encode() + b"\xff")
    with pytest.raises(UserError, match=r"x\.txt is not UTF-8 near its byte [\d,]+; convert it first"):
        read(tmp_path / "x.txt")
    (tmp_path / "x.txt").write_text("a" * 2000)
    with pytest.raises(UserError, match=r"x\.txt has more than"):
        read(tmp_path / "x.txt")
