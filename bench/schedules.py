"""Pipeline schedules beside each other, and beside what was published about them. Needs no torch and no GPU.

    python bench/schedules.py [--ranks 8] [--microbatches 32]

Prints three tables in Markdown. The first is the simulation of Qi et al. (2023, Zero Bubble Pipeline
Parallelism) from their table of profiled times, beside their table of bubble rates. The second is every
schedule where a stage's F, I and W take 1 second each and links cost nothing. The third is what this machine
takes to make, check and simulate the lists of 64 ranks and 512 microbatches.
"""

from __future__ import annotations

import argparse
import time
from itertools import pairwise

from meshwright.schedule import NAMES, StageCost, StageLink, check, make, simulate

# (model, p, m): milliseconds of F, I (there named B), W, and of a message between neighbours; then the
# published bubble rates of 1F1B, interleaved, ZB-H1 and ZB-H2. The figures were not set beside the paper's
# text again when they were written down here. That the times give 36 rates to the last digit vouches for the
# times and for those rates; nothing vouches so for the interleaved column.
PUBLISHED = {
    ("1.5B", 8, 24): ((18.522, 18.086, 9.337, 0.601), (0.2431, 0.1055, 0.1585, 0.1083)),
    ("1.5B", 8, 32): ((18.513, 18.086, 9.331, 0.626), (0.1985, 0.0818, 0.1242, 0.0837)),
    ("1.5B", 8, 64): ((18.546, 18.097, 9.321, 0.762), (0.1240, 0.0443, 0.0674, 0.0444)),
    ("6.2B", 8, 24): ((29.718, 29.444, 19.927, 0.527), (0.2347, 0.0808, 0.1323, 0.0698)),
    ("6.2B", 8, 32): ((29.802, 29.428, 19.530, 0.577), (0.1898, 0.0628, 0.1045, 0.0559)),
    ("6.2B", 8, 64): ((29.935, 29.621, 19.388, 0.535), (0.1091, 0.0320, 0.0554, 0.0294)),
    ("14.6B", 16, 48): ((11.347, 11.248, 8.132, 0.377), (0.2552, 0.1104, 0.1397, 0.0672)),
    ("14.6B", 16, 64): ((11.307, 11.254, 8.101, 0.379), (0.2082, 0.0852, 0.1088, 0.0516)),
    ("14.6B", 16, 128): ((11.325, 11.308, 8.109, 0.378), (0.1251, 0.0445, 0.0576, 0.0266)),
    ("28.3B", 32, 96): ((10.419, 10.207, 7.715, 0.408), (0.2646, 0.1493, 0.1421, 0.0641)),
    ("28.3B", 32, 128): ((10.408, 10.204, 7.703, 0.408), (0.2168, 0.1164, 0.1106, 0.0490)),
    ("28.3B", 32, 256): ((10.402, 10.248, 7.698, 0.460), (0.1352, 0.0624, 0.0594, 0.0257)),
}
# Stages a rank of the interleaved schedule. Not stated beside the table: one layer a stage is assumed, with
# the embedding and the head in the place of two layers (24, 32, 48 and 64 in all).
INTERLEAVED = {"1.5B": 3, "6.2B": 4, "14.6B": 3, "28.3B": 2}
COMPARED = ("1f1b", "interleaved", "zb-h1", "zb-h2")
TWO_CHUNKS = ("zb-v", "v-half", "v-min", "dualpipe-v")


def simulated(model: str, ranks: int, microbatches: int) -> list[float]:
    """The bubble rates of `COMPARED` for a row of `PUBLISHED`, without common synchronisation."""
    (f, i, w, message), _ = PUBLISHED[model, ranks, microbatches]
    rates = []
    for name in COMPARED:
        virtual = INTERLEAVED[model] if name == "interleaved" else 1
        cost = StageCost(f / virtual, i / virtual, w / virtual)
        timed = simulate(make(name, ranks, virtual, microbatches), cost, StageLink(latency=message))
        rates.append(timed.bubble_without_sync)
    return rates


def print_published() -> None:
    heads = [f"{name}: published | simulated" for name in COMPARED]
    print("| model | p | m | " + " | ".join(heads) + " |")
    print("| --- | --- | --- |" + " --- | --- |" * len(COMPARED))
    for (model, ranks, microbatches), (_, published) in PUBLISHED.items():
        pairs = zip(published, simulated(model, ranks, microbatches), strict=True)
        cells = " | ".join(f"{theirs:.4f} | {ours:.4f}" for theirs, ours in pairs)
        print(f"| {model} | {ranks} | {microbatches} | {cells} |")


def print_unit(ranks: int, microbatches: int) -> None:
    print("| schedule | v | bubble | without synchronisation | peak, of 1F1B's | messages |")
    print("| --- | --- | --- | --- | --- | --- |")
    for name in NAMES:
        virtual = 2 if name in (*TWO_CHUNKS, "interleaved", "bfs") else 1
        schedule = make(name, ranks, virtual, microbatches)
        report = check(schedule)
        timed = simulate(schedule, StageCost(1 / virtual, 1 / virtual, 1 / virtual))
        peak = max(report.peak) / virtual / min(ranks, microbatches)
        print(
            f"| {name} | {virtual} | {timed.bubble:.4f} | {timed.bubble_without_sync:.4f} | {peak:.2f} | "
            f"{report.messages} |"
        )


def print_seconds(ranks: int = 64, microbatches: int = 512) -> None:
    print("| schedule | actions | make, s | check, s | simulate, s |")
    print("| --- | --- | --- | --- | --- |")
    for name in ("1f1b", "zb-h1", *TWO_CHUNKS):
        clock = [time.perf_counter()]
        schedule = make(name, ranks, 2 if name in TWO_CHUNKS else 1, microbatches)
        clock.append(time.perf_counter())
        check(schedule)
        clock.append(time.perf_counter())
        simulate(schedule, StageCost(1e-2, 1e-2, 1e-2, output=1e6), StageLink(1e-5, 1e10))
        clock.append(time.perf_counter())
        taken = " | ".join(f"{b - a:.2f}" for a, b in pairwise(clock))
        print(f"| {name} | {sum(map(len, schedule.actions))} | {taken} |")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--microbatches", type=int, default=32)
    arguments = parser.parse_args()
    print_published()
    print()
    print_unit(arguments.ranks, arguments.microbatches)
    print()
    print_seconds()


if __name__ == "__main__":
    main()
