"""Host time of planning context-parallel attention: in each pass of each layer, and once a microbatch.

    python bench/context_plans.py [--tokens 131072] [--ranks 16] [--layers 126] [--window 0] [--rounds 5]

Plans are those of flash attention, for the last rank of a ring that holds one sequence of documents of 3,000
tokens or, with `--whole`, one document. Both sides take turns, on one thread, and nothing is computed. Prints
one JSON object, medians in milliseconds of a layer's forward and backward:

    {"tokens", "ranks", "layers", "window", "each_pass", "once", "ratio"}
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections import deque

import torch

from meshwright.kernels.attention_flash import FLASH
from meshwright.kernels.attention_intervals import AttentionIntervals, attention_intervals
from meshwright.parallel.context_parallel import zigzag
from meshwright.parallel.ring_attention import KeyParts

KV_HEADS, GROUP = 8, 4


def planned(intervals: AttentionIntervals, places: list[torch.Tensor], layers: int, once: bool) -> float:
    """Milliseconds of a layer, of the plans that a microbatch's forwards and backwards take."""
    start = time.perf_counter()
    recent = deque[KeyParts](maxlen=2)
    for _ in range(2 * layers):
        # A compiled block's lookup, which compares all intervals; an eager one keeps the parts themselves.
        met = recent and torch.equal(recent[0].intervals.whole, intervals.whole.clone())
        if not (once and met):
            recent.appendleft(KeyParts(intervals, places))
        recent[0].plans(FLASH, KV_HEADS, GROUP)
    return 1e3 * (time.perf_counter() - start) / layers


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, default in (("tokens", 131_072), ("ranks", 16), ("layers", 126), ("window", 0), ("rounds", 5)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--whole", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(1)
    places = [zigzag(given.tokens, given.ranks, rank) for rank in range(given.ranks)]
    documents = None if given.whole else (torch.arange(given.tokens) // 3000).unsqueeze(0)
    window = given.window or None
    intervals = attention_intervals(documents, given.tokens, window, places[-1], 1, "cpu")
    taken: dict[bool, list[float]] = {False: [], True: []}
    for turn in range(given.rounds + 1):
        for once, times in taken.items():
            found = planned(intervals, places, given.layers, once)
            if turn:  # the first warms up
                times.append(found)
    each_pass, once_each = (statistics.median(taken[once]) for once in (False, True))
    shown = {name: getattr(given, name) for name in ("tokens", "ranks", "layers", "window")}
    shown |= {"each_pass": round(each_pass, 3), "once": round(once_each, 3)}
    print(json.dumps(shown | {"ratio": round(each_pass / once_each, 1)}))


if __name__ == "__main__":
    main()
