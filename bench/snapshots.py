"""Seconds of a snapshot, and of its load, beside a bare copy of as many bytes, on one rank.

    python bench/snapshots.py [--megabytes 384] [--rounds 7]

Snapshots in memory and in temporary files take turns. One JSON object with the median of each, in seconds of
the clock and of the processor; the first snapshots, which take new pages, are left out.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections import defaultdict
from collections.abc import Callable

import torch

from meshwright.checkpoint.snapshots import Snapshots
from meshwright.comm.control import Control
from meshwright.rank.shared_memory import new_file, new_memory

PIECE = 1 << 20
"""Elements of each tensor, in fp32."""


def seconds(work: Callable[[], object]) -> tuple[float, float]:
    """The time that the work takes, by the clock and of the processor."""
    begun, used = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - begun, time.process_time() - used


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=int, default=384)
    parser.add_argument("--rounds", type=int, default=7)
    flags = parser.parse_args()
    torch.set_num_threads(1)
    tensors = {f"t{number}": torch.randn(PIECE) for number in range(max(1, flags.megabytes * 2**18 // PIECE))}
    source = torch.randn(len(tensors) * PIECE)
    target = torch.empty_like(source).copy_(source)
    places = {"memory": lambda: new_memory("snapshot"), "disk": new_file}
    kept = {
        place: Snapshots([[new(), new()]], Control(), 1, lambda: 1 << 62, []) for place, new in places.items()
    }
    found: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for step in range(flags.rounds + 2):
        found["copy"].append(seconds(lambda: target.copy_(source)))
        for place, each in kept.items():
            save = seconds(lambda each=each, step=step: each.save(step, tensors, lambda: {"step": step}))
            found[f"snapshot, {place}"].append(save)
            found[f"load, {place}"].append(
                seconds(lambda each=each, step=step: each.load(step, tensors, lambda _: None))
            )
    row = {
        name: [round(statistics.median(column[2:]), 4) for column in zip(*times, strict=True)]
        for name, times in found.items()
    }
    print(json.dumps({"megabytes": source.nbytes / 1e6, **row}))


if __name__ == "__main__":
    main()
