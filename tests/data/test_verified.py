"""A corpus is hashed once, and what was changed in it is found all the same."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from meshwright.data import document_index, verification
from meshwright.data.manifest import MANIFEST
from meshwright.data.publish import hashed_chunks, sha256_file
from meshwright.data.shards import TokenShards
from meshwright.data.tokenize import tokenize
from meshwright.data.verification import Check
from meshwright.data.verified import BESIDE, RECORD
from meshwright.spec import UserError
from meshwright.spec.errors import DataError


@pytest.fixture
def tokens(folder: Path, tmp_path: Path) -> Path:
    """A folder of tokens that came from elsewhere: without a record."""
    tokenize(str(folder), "byte", tmp_path / "tokens", vocab_size=2048)
    shutil.rmtree(tmp_path / "tokens" / BESIDE)
    return tmp_path / "tokens"


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of files that were hashed, in order."""
    names: list[str] = []

    def count_chunks(path: Path, digest: Any) -> Iterator[bytes]:
        names.append(path.name)
        return hashed_chunks(path, digest)

    def count(path: Path) -> str:
        names.append(path.name)
        return sha256_file(path)

    monkeypatch.setattr(verification, "hashed_chunks", count_chunks)
    monkeypatch.setattr(document_index, "sha256_file", count)
    return names


def listed(folder: Path) -> list[str]:
    return sorted(json.loads((folder / MANIFEST).read_bytes())["files"])


def flip(path: Path, keep_time: bool = False) -> None:
    """Change a byte, and with `keep_time` hide it from those who look at sizes and times."""
    before = path.stat()
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1
    path.write_bytes(raw)
    if keep_time:
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def open_and_log(folder: Path, log: Path) -> int:
    """Open a corpus in another process, with a line in `log` for each file that is hashed."""

    def count(path: Path, digest: Any) -> Iterator[bytes]:
        with log.open("a") as file:
            file.write(f"{path.name}\n")
        return hashed_chunks(path, digest)

    verification.hashed_chunks = count  # type: ignore[attr-defined]
    opened = TokenShards(folder)
    opened.index(0.1, 0)
    return opened.documents


def test_of_many_processes_one_reads_each_file_once(tokens: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    with multiprocessing.get_context("spawn").Pool(4) as pool:
        found = pool.starmap(open_and_log, [(tokens, log)] * 8, chunksize=1)
    assert found == [40] * 8
    assert sorted(log.read_text().splitlines()) == listed(tokens)


def test_what_was_written_here_is_not_hashed_again(folder: Path, tmp_path: Path, hashed: list[str]) -> None:
    tokenize(str(folder), "byte", tmp_path / "tokens", vocab_size=2048)
    TokenShards(tmp_path / "tokens")
    assert hashed == []


def test_a_record_stays_good_when_files_have_other_times(tokens: Path, hashed: list[str]) -> None:
    TokenShards(tokens)
    assert sorted(hashed) == listed(tokens)
    hashed.clear()
    path = tokens / "00000.tokens.bin"
    path.write_bytes(path.read_bytes())
    assert TokenShards(tokens).take(np.arange(3)).shape == (3,)
    assert hashed == []


@pytest.mark.parametrize("check", ["files", "lazy"])
def test_damage_that_left_size_and_time_alone_is_found_where_it_is_read(tokens: Path, check: Check) -> None:
    TokenShards(tokens)
    flip(tokens / "00000.tokens.bin", keep_time=True)
    opened = TokenShards(tokens, check=check)
    with pytest.raises(DataError, match=r"00000\.tokens\.bin: bytes 0 to \d+ \(block 0\) are not those"):
        opened.take(np.arange(3))


def test_all_bytes_are_read_when_that_is_asked_for(tokens: Path, hashed: list[str]) -> None:
    TokenShards(tokens)
    flip(tokens / "00000.tokens.bin", keep_time=True)
    hashed.clear()
    with pytest.raises(UserError, match=r"00000\.tokens\.bin: .*altered"):
        TokenShards(tokens, check="content")
    assert "00000.tokens.bin" in hashed  # the rest need not be read any more
    with pytest.raises(UserError, match="altered"):  # and no record was left
        TokenShards(tokens)


def damage(record: Path) -> list[Callable[[], None]]:
    """Ways to spoil the first line of a record; none of them spells another one that holds."""
    raw = record.read_bytes()
    body = json.loads(raw.partition(b"\n")[0])

    def rewrite(**changes: object) -> None:
        changed = {**body, **changes}
        changed.pop("sha256")
        digest = hashlib.sha256(json.dumps(changed, sort_keys=True).encode()).hexdigest()
        line = json.dumps({**changed, "sha256": digest}, sort_keys=True).encode()
        record.write_bytes(line + b"\n" + raw.partition(b"\n")[2])

    return [
        lambda: record.unlink(),
        lambda: record.write_bytes(b""),
        lambda: record.write_bytes(raw[:100]),
        lambda: record.write_bytes(raw.replace(b'"version": 2', b'"version": 3')),
        lambda: record.write_text("[]"),
        lambda: record.write_bytes(b"[" * 10**5),
        lambda: rewrite(version=99),
        lambda: rewrite(block_bytes=1),
        lambda: rewrite(manifest="0" * 64),
        lambda: rewrite(files={}),
        lambda: rewrite(files={**body["files"], "00000.tokens.bin": 0}),
    ]


@pytest.mark.parametrize("check", ["files", "lazy"])
def test_a_bad_record_is_no_record(tokens: Path, hashed: list[str], check: Check) -> None:
    TokenShards(tokens)
    for spoil in damage(tokens / BESIDE / RECORD):
        spoil()
        hashed.clear()
        TokenShards(tokens, check=check)
        assert sorted(hashed) == listed(tokens)
        hashed.clear()
        TokenShards(tokens, check=check)
        assert hashed == []


def test_a_record_with_damaged_hashes_is_no_record(tokens: Path, hashed: list[str]) -> None:
    TokenShards(tokens)
    record = tokens / BESIDE / RECORD
    raw = record.read_bytes()
    for spoilt in (raw[:-1], raw[:-1] + bytes([raw[-1] ^ 1])):
        record.write_bytes(spoilt)
        hashed.clear()
        TokenShards(tokens)
        assert sorted(hashed) == listed(tokens)
    flipped = raw[:-64] + bytes([raw[-64] ^ 1]) + raw[-63:]
    record.write_bytes(flipped)
    with pytest.raises(DataError, match=r"the record of tokenizer(_config)?\.json is damaged; remove"):
        TokenShards(tokens, check="lazy")


def test_a_copy_without_its_record_is_verified_anew(tokens: Path, tmp_path: Path, hashed: list[str]) -> None:
    TokenShards(tokens)
    hashed.clear()
    shutil.copytree(tokens, tmp_path / "whole")
    TokenShards(tmp_path / "whole")
    assert hashed == []
    shutil.copytree(tokens, tmp_path / "part", ignore=shutil.ignore_patterns(BESIDE))
    TokenShards(tmp_path / "part")
    assert sorted(hashed) == listed(tokens)


def test_the_record_of_a_read_only_folder_is_in_the_cache(
    tokens: Path, tmp_path: Path, hashed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    access = os.access

    def read_only(path: Path, mode: int) -> bool:
        return access(path, mode) and not (Path(path) == tokens and mode & os.W_OK)

    monkeypatch.setattr(os, "access", read_only)
    for _ in range(2):
        opened = TokenShards(tokens, cache=tmp_path / "cache")
        opened.index(0.1, 0)
        files, hashed[:] = [name for name in hashed if name != "sums.npy"], []
        assert sorted(files) == (listed(tokens) if _ == 0 else [])
    assert not (tokens / BESIDE).exists()
    assert {path.name for path in (tmp_path / "cache" / "verified").glob("*/*")} >= {RECORD}


def test_a_damaged_index_is_built_again(tokens: Path) -> None:
    sums = TokenShards(tokens).index(0.1, 0).side(held=False).targets.tolist()
    (table,) = (tokens / BESIDE).glob("index-*/sums.npy")
    raw = table.read_bytes()
    for spoilt in (raw[:-8], raw[:-1] + b"\x7f", b"", b"\x93NUMPY"):
        table.write_bytes(spoilt)
        assert TokenShards(tokens).index(0.1, 0).side(held=False).targets.tolist() == sums
        assert table.read_bytes() == raw
    (table.parent / "index.json").write_text("{}")
    assert TokenShards(tokens, check="lazy").index(0.1, 0).side(held=False).targets.tolist() == sums
