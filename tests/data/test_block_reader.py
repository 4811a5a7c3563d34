"""Blocks of token files are compared with their hashes when they are first read, also while a run goes on."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from meshwright.data.shard_writer import ShardWriter
from meshwright.data.shards import TokenShards
from meshwright.data.tokenizer import number_tokenizer
from meshwright.spec.errors import DataError

VOCABULARY = 2**16


def write(folder: Path, tokens: int = 600_000, length: int = 999, tokens_per_shard: int = 2**28) -> Path:
    """Write documents of `length` tokens of 16 bits each."""
    rng = np.random.default_rng(0)
    with ShardWriter(folder, number_tokenizer(VOCABULARY), tokens_per_shard) as writer:
        for number in range(tokens // (length + 1)):
            writer.add(rng.integers(0, VOCABULARY - 1, length).astype(np.uint32), length, number)
        writer.finish()
    return folder


def overwrite(path: Path, place: int, data: bytes) -> None:
    """Change bytes of a file in place."""
    with path.open("r+b") as file:
        file.seek(place)
        file.write(data)


@pytest.fixture
def tokens(tmp_path: Path) -> Path:
    return write(tmp_path / "tokens")


def test_a_file_changed_in_place_while_it_is_read_is_named(tokens: Path) -> None:
    opened, file = TokenShards(tokens), tokens / "00000.tokens.bin"
    opened.take(np.arange(600_000))
    overwrite(file, 700_000, b"\0\1\0\1")
    assert opened.take(np.arange(100)).shape == (100,)
    with pytest.raises(DataError, match=r"00000\.tokens\.bin: bytes 524288 to 786432"):
        opened.take(np.arange(349_990, 350_010))


def test_a_file_that_is_written_again_as_it_was_does_no_harm(tokens: Path) -> None:
    opened, file = TokenShards(tokens), tokens / "00000.tokens.bin"
    before = opened.take(np.arange(600_000))
    file.write_bytes(file.read_bytes())
    os.utime(file, (0, 0))
    assert opened.take(np.arange(600_000)).tolist() == before.tolist()


def test_a_truncated_file_does_not_end_the_process_without_a_name(tokens: Path) -> None:
    script = f"""
import os, numpy as np
from pathlib import Path
from meshwright.data.shards import TokenShards
opened = TokenShards(Path({str(tokens)!r}))
opened.take(np.arange(10)), opened.rows(0, 300), opened.index(0.0, 0)
for name in ("00000.tokens.bin", "00000.documents.bin"):
    os.truncate(Path({str(tokens)!r}) / name, 4096)
    try:
        opened.take(np.arange(500_000, 500_010)), opened.rows(400, 410)
    except Exception as error:
        print(type(error).__name__, error)
index = opened.index(0.0, 0)
os.truncate(index.file, 0)
try:
    index.side(held=False)
except Exception as error:
    print(type(error).__name__, error)
"""
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    first, second, third = ended.stdout.splitlines()
    assert ended.returncode == 0, ended.stderr
    assert first.startswith("DataError") and "00000.tokens.bin: has 4096 bytes" in first
    assert second.startswith("DataError") and "00000.tokens.bin: has 4096 bytes" in second
    assert third.startswith("DataError") and "sums.npy: was cut while it was in use" in third


def test_more_shards_than_descriptors(tmp_path: Path) -> None:
    folder = write(tmp_path / "many", tokens=20_000, length=99, tokens_per_shard=100)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = len(os.listdir("/proc/self/fd"))
    opened = TokenShards(folder)
    resource.setrlimit(resource.RLIMIT_NOFILE, (used + 100, hard))
    try:
        assert opened.take(np.arange(20_000)).shape == (20_000,)
        assert len(opened.rows(0, 200).bytes) == 200
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    del opened
    left = len(os.listdir("/proc/self/fd")) - used
    assert left < 5, "of some hundred; threads of earlier tests may open one"


def test_threads_read_at_once(tmp_path: Path) -> None:
    opened = TokenShards(write(tmp_path / "many", tokens=20_000, length=99, tokens_per_shard=100))
    stream = opened.take(np.arange(20_000))
    wrong: list[int] = []

    def read(seed: int) -> None:
        rng = np.random.default_rng(seed)
        for _ in range(40):
            place = rng.integers(0, 20_000, 50)
            if (opened.take(place) != stream[place]).any():
                wrong.append(seed)

    threads = [threading.Thread(target=read, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
