"""Seconds and resident memory of a rank that opens a corpus of very many documents.

    python bench/documents.py [--documents 1000000000]

Shards are laid out as `meshwright tokenize` would lay out a trillion tokens. To fit on a small disk, they are
hard links to a few tables of documents and to one sparse file of tokens; the index over them is whole. It is
built once, by the first process; what counts is a rank that opens after that, in a process of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from meshwright.data.corpus import open_corpus
from meshwright.data.manifest import (
    DOCUMENT,
    MANIFEST,
    VERSION,
    FileEntry,
    ShardEntry,
    TokenManifest,
    documents_file,
    tokens_file,
)
from meshwright.data.permutation import hash64
from meshwright.data.publish import hashed_chunks
from meshwright.data.shard_writer import TOKENS_PER_SHARD
from meshwright.data.tokenizer import TOKENIZER_FILES, byte_tokenizer
from meshwright.data.verified import BESIDE, BlockHashes, write_record
from meshwright.spec import RunSpec
from meshwright.spec.load import from_tree

PER_SHARD = 2**18  # documents of 1,024 tokens on average
TABLES = 32  # different ones; the other shards are links to them


def make(folder: Path, documents: int) -> None:
    """Lay out a folder of tokens with so many documents, and the record that its files were verified."""
    folder.mkdir(parents=True)
    tokenizer = byte_tokenizer()
    tokenizer.save(folder)
    shards = -(-documents // PER_SHARD)
    for number in range(shards):
        table, tokens = folder / documents_file(number), folder / tokens_file(number)
        if number < TABLES:
            _write_table(table, number)
        else:
            os.link(folder / documents_file(number % TABLES), table)
        if number == 0:
            with tokens.open("wb") as file:
                file.truncate(2 * TOKENS_PER_SHARD)
        else:
            os.link(folder / tokens_file(0), tokens)
    different = [*TOKENIZER_FILES, tokens_file(0), *map(documents_file, range(min(TABLES, shards)))]
    hashes = {name: _hashed(folder / name) for name in different}
    hashes |= {tokens_file(number): hashes[tokens_file(0)] for number in range(shards)}
    hashes |= {documents_file(number): hashes[documents_file(number % TABLES)] for number in range(shards)}
    manifest = TokenManifest(
        version=VERSION,
        dtype="uint16",
        vocab_size=tokenizer.vocab_size,
        end_id=tokenizer.end_id,
        tokenizer=tokenizer.digest,
        utf8_bytes=0,
        shards=(ShardEntry(tokens=TOKENS_PER_SHARD, documents=PER_SHARD),) * shards,
        files={name: FileEntry(bytes=found.size, sha256="0" * 64) for name, found in hashes.items()},
    )
    (folder / MANIFEST).write_bytes(manifest.render())
    write_record(folder / BESIDE, manifest, {name: found.blocks() for name, found in hashes.items()})


def _hashed(path: Path) -> BlockHashes:
    hashes = BlockHashes()
    for _ in hashed_chunks(path, hashes):
        pass
    return hashes


def _write_table(path: Path, seed: int) -> None:
    """Documents of 512 to 1,536 tokens, about a byte a token, with hashes that are spread evenly."""
    number = np.arange(PER_SHARD)
    table = np.empty(PER_SHARD, DOCUMENT)
    table["start"] = 1024 * number + (hash64(seed, 1, number) % np.uint64(512)).astype(np.int64)
    table["start"][0] = 0
    table["bytes"] = 1000
    table["hash"] = hash64(seed, 2, number)
    path.write_bytes(table.tobytes())


def spec_of(folder: Path) -> RunSpec:
    """A run over the folder, of samples of 8,192 tokens."""
    data = {"corpus": str(folder), "tokenizer": "byte", "seq_len": 8192, "cache": str(folder / "cache")}
    return from_tree({"data": data, "train": {"batch_tokens": 2**20}})


def status(key: str) -> float:
    """MB of this process that /proc counts under `key`."""
    (line,) = [row for row in Path("/proc/self/status").read_text().splitlines() if row.startswith(key)]
    return int(line.split()[1]) / 1000


def rank(folder: Path) -> dict[str, float]:
    """Open the corpus as a rank does, and read what a step of 128 sequences and the validation begin with."""
    spec, before = spec_of(folder), status("VmRSS")
    began = time.perf_counter()
    corpus = open_corpus(spec, "lazy")
    opened, resident = time.perf_counter() - began, status("VmRSS")
    began = time.perf_counter()
    corpus.train.gather(corpus.train.ids(*corpus.order(0).at(np.arange(128))))
    step = time.perf_counter() - began
    began = time.perf_counter()
    corpus.validation.bytes_for(10**7)
    corpus.validation.gather(np.arange(16))
    return {
        "documents": corpus.train.documents + corpus.validation.documents,
        "tokens": corpus.train.target_tokens + corpus.validation.target_tokens,
        "open_s": opened,
        "rss_before_mb": before,
        "rss_opened_mb": resident,
        "step_of_128_s": step,
        "validation_s": time.perf_counter() - began,
        "rss_after_step_mb": status("VmRSS"),
        "peak_mb": status("VmHWM"),
    }


def fresh(folder: Path) -> dict[str, float]:
    """`rank` in a new process."""
    command = [sys.executable, __file__, "--rank", str(folder)]
    return dict(json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout))


def main() -> None:
    """Lay out, index once, open; print what each took."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--documents", type=int, default=10**9)
    parser.add_argument("--rank", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.rank is not None:
        print(json.dumps(rank(given.rank)))
        return
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "tokens"
        make(folder, given.documents)
        began = time.perf_counter()
        open_corpus(spec_of(folder))
        print(f"indexed once in {time.perf_counter() - began:.1f} s, peak {status('VmHWM'):.0f} MB")
        began = time.perf_counter()
        open_corpus(spec_of(folder))
        print(f"opened with all files and the index checked in {time.perf_counter() - began:.2f} s")
        print("; ".join(f"{key} {value:,.6g}" for key, value in fresh(folder).items()))


if __name__ == "__main__":
    main()
