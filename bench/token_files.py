"""Seconds to open token files, and to read a step's samples, with blocks verified and without.

    python bench/token_files.py [--megabytes 400]

One run has both sides: opening by the record and by hashing everything; steps whose blocks are read for the
first time, steps whose blocks were compared before, and samples copied out of mapped files without any check.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median

import numpy as np

from meshwright.data.corpus import open_corpus
from meshwright.data.manifest import tokens_file
from meshwright.data.shard_writer import ShardWriter
from meshwright.data.shards import TokenShards
from meshwright.data.tokenizer import byte_tokenizer
from meshwright.spec import RunSpec
from meshwright.spec.load import from_tree

LENGTH = 4095  # tokens of a document
SEQ_LEN, SEQUENCES, STEPS = 2048, 16, 20


def write(folder: Path, megabytes: int) -> None:
    """Write documents of random bytes, 16 bits a token."""
    rng = np.random.default_rng(0)
    with ShardWriter(folder, byte_tokenizer()) as writer:
        for number in range(megabytes * 10**6 // (2 * LENGTH + 2)):
            hashed = int(rng.integers(2**63))
            writer.add(rng.integers(0, 256, LENGTH).astype(np.uint32), LENGTH, hashed + number % 2)
        writer.finish()


def spec_of(folder: Path) -> RunSpec:
    """A run over the folder."""
    data = {"corpus": str(folder), "tokenizer": "byte", "seq_len": SEQ_LEN, "cache": str(folder / "cache")}
    return from_tree({"data": data, "train": {"batch_tokens": SEQ_LEN * SEQUENCES}})


def seconds(work: Callable[[], object]) -> float:
    """How long `work` takes."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def main() -> None:
    """Write, open, read; print seconds and ratios."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=400)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "tokens"
        write(folder, given.megabytes)
        pairs = [
            (seconds(lambda: TokenShards(folder)), seconds(lambda: TokenShards(folder, check="content")))
            for _ in range(5)
        ]
        quick, whole = (median(column) for column in zip(*pairs, strict=True))
        print(f"open by the record {quick:.4f} s, hashing everything {whole:.3f} s: {whole / quick:.0f} x")
        corpus = open_corpus(spec_of(folder))
        order = corpus.order(0)
        mapped = np.memmap(folder / tokens_file(0), "<u2", mode="r")

        def read(step: int) -> None:
            slots = step * SEQUENCES + np.arange(SEQUENCES)
            corpus.train.gather(corpus.train.ids(*order.at(slots)))

        def copy(step: int) -> None:
            places = np.random.default_rng(step).integers(0, len(mapped) - SEQ_LEN - 1, SEQUENCES)
            mapped[places[:, None] + np.arange(SEQ_LEN + 1)].astype(np.int64)

        rows = [[seconds(partial(work, step)) for work in (read, read, copy)] for step in range(STEPS)]
        first, again, bare = (median(column) for column in zip(*rows, strict=True))
        print(
            f"{SEQUENCES} samples of {SEQ_LEN}: first {1e3 * first:.2f} ms, again {1e3 * again:.2f} ms, "
            f"copied from a map {1e3 * bare:.2f} ms: {first / again:.1f} x for blocks that are new"
        )


if __name__ == "__main__":
    main()
