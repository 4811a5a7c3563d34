"""A server of S3 and one of HTTP on this host, and a corpus of files of all kinds."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from servers import Bucket, RangeServer, s3_bucket


@pytest.fixture(scope="session")
def s3() -> Iterator[Bucket]:
    """A bucket that s3fs reaches by its environment."""
    pytest.importorskip("moto", reason="moto of the extra dev is the server of S3")
    pytest.importorskip("s3fs", reason="s3fs of the extra dev reaches S3")
    with pytest.MonkeyPatch.context() as patch, s3_bucket(patch) as bucket:
        yield bucket


@pytest.fixture
def http(tmp_path: Path) -> Iterator[RangeServer]:
    """A server of the files in `tmp_path`, which serves ranges and may cut connections."""
    pytest.importorskip("aiohttp", reason="aiohttp of the extra dev reaches HTTP")
    with RangeServer(tmp_path) as server:
        yield server


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """A folder of text, rows and compressed files, some of which are left out."""
    zstandard = pytest.importorskip("zstandard", reason="zstandard of the extra dev makes files in zstd")
    rows = [{"text": f"row {number} äß " + "words and more " * (number % 400)} for number in range(900)]
    lines = "".join(json.dumps(row) + "\n" for row in rows).encode()
    files = {
        "a/rows.jsonl": lines,
        "a/rows-2.jsonl.gz": gzip.compress(lines[: lines.index(b"\n", 100_000)]),
        "b.txt.gz": gzip.compress("one ä<|endoftext|>two".encode()) + gzip.compress(b" and three"),
        "c.jsonl.zst": zstandard.compress(lines[:50_000][: lines[:50_000].rindex(b"\n")]),
        "d.csv": b"text\nfour\n",
        "e.txt": b"five<|endoftext|>\nsix",
        "f.md": b"# seven",
        "empty.txt": b"",
        "image.png": b"\x89PNG\0",
        "packed.tar.gz": gzip.compress(b"\0"),
        ".hidden/g.txt": b"no",
    }
    root = tmp_path / "corpus"
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(content)
    return root
