"""Seconds of a snapshot in memory, and of its load, beside a bare copy of as many bytes, on one rank.

    python bench/snapshots.py [--megabytes 384] [--rounds 7]

One JSON object with the median of each; the first snapshots, which take new pages, are left out.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable

import torch

from meshwright.checkpoint.snapshots import Snapshots
from meshwright.parallel.control import Control

PIECE = 1 << 20
"""Elements of each tensor, in fp32."""


def seconds(work: Callable[[], object]) -> float:
    """The time that the work takes."""
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=int, default=384)
    parser.add_argument("--rounds", type=int, default=7)
    flags = parser.parse_args()
    torch.set_num_threads(1)
    tensors = {f"t{number}": torch.randn(PIECE) for number in range(max(1, flags.megabytes * 2**18 // PIECE))}
    source = torch.randn(len(tensors) * PIECE)
    target = torch.empty_like(source).copy_(source)
    slots = [[os.memfd_create("snapshot"), os.memfd_create("snapshot")]]
    kept = Snapshots(slots, Control(), 1, lambda: 1 << 62, [])
    found: dict[str, list[float]] = {"copy": [], "snapshot": [], "load": []}
    for step in range(flags.rounds + 2):
        found["copy"].append(seconds(lambda: target.copy_(source)))
        found["snapshot"].append(seconds(lambda step=step: kept.save(step, tensors, lambda: {"step": step})))
        found["load"].append(seconds(lambda step=step: kept.load(step, tensors, lambda _: None)))
    row = {name: statistics.median(times[2:]) for name, times in found.items()}
    print(
        json.dumps(
            {"megabytes": source.nbytes / 1e6, **row, "snapshot_per_copy": row["snapshot"] / row["copy"]}
        )
    )


if __name__ == "__main__":
    main()
