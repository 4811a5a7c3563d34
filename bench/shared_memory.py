"""Collectives of processes of one host: through memory that they share, and through gloo's sockets.

    python bench/shared_memory.py [--ranks 2] [--megabytes 0.01 1 4 64] [--rounds 7]

Ranks of one thread each, bf16. The two ways take turns in the same processes; before each collective a rank
multiplies matrices for a millisecond, as in training. One JSON object a line, medians over rounds in
milliseconds, on the clock and of the first rank's processor:

    {"operation", "megabytes", "ranks", "shared": [wall, cpu], "gloo": [wall, cpu], "ratio"}
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from meshwright.comm import collectives
from meshwright.comm.mesh import Axis, build_mesh
from meshwright.spec import Layout
from world import join

OPERATIONS = ("all_gather", "reduce_scatter", "all_reduce")


def call(operation: str, elements: int, axis: Axis) -> Callable[[], object]:
    """One collective of a whole tensor of so many numbers, started and waited for."""
    whole = torch.zeros(elements, dtype=torch.bfloat16)
    part = torch.zeros(elements // axis.size, dtype=torch.bfloat16)
    calls: dict[str, Callable[[], object]] = {
        "all_gather": lambda: collectives.start_all_gather(whole, part, axis).wait(),
        "reduce_scatter": lambda: collectives.start_reduce_scatter(part, whole, axis).wait(),
        "all_reduce": lambda: collectives.start_all_reduce(whole, axis).wait(),
    }
    return calls[operation]


def milliseconds(run: Callable[[], object], count: int) -> tuple[float, float]:
    """(wall, processor) of a call, less the products before each."""
    a = torch.ones(256, 256)

    def row(then: Callable[[], object]) -> tuple[float, float]:
        dist.barrier()
        start, used = time.perf_counter(), time.process_time()
        for _ in range(count):
            torch.mm(a, a)
            then()
        return time.perf_counter() - start, time.process_time() - used

    with_call, without = row(run), row(lambda: None)
    return tuple(1e3 * (x - y) / count for x, y in zip(with_call, without, strict=True))  # type: ignore[return-value]


def measure(rank: int, store: str, options: argparse.Namespace) -> None:
    """Print the figures of all operations and sizes, on the first rank."""
    torch.set_num_threads(1)
    device = join("cpu", store, rank, options.ranks)
    mesh = build_mesh(Layout(tp=options.ranks), device)
    assert mesh is not None and mesh.tensor.memory is not None
    if not mesh.tensor.memory.joined():
        raise SystemExit("the ranks of this system cannot share memory, so there is nothing to compare")
    ways = {"shared": mesh.tensor, "gloo": replace(mesh.tensor, memory=None)}
    for operation in OPERATIONS:
        for size in options.megabytes:
            elements = int(size * 1e6 / 2) // options.ranks * options.ranks
            count = max(2, min(50, int(100 / size)))
            runs = {way: call(operation, elements, axis) for way, axis in ways.items()}
            for run in runs.values():
                run()  # the first takes new pages
            found: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
            for _ in range(options.rounds):
                for way, run in runs.items():
                    found[way].append(milliseconds(run, count))
            row = {
                way: [round(statistics.median(column), 3) for column in zip(*times, strict=True)]
                for way, times in found.items()
            }
            ratio = round(row["gloo"][0] / row["shared"][0], 2)
            if rank == 0:
                head = {"operation": operation, "megabytes": size, "ranks": options.ranks}
                print(json.dumps(head | row | {"ratio": ratio}), flush=True)
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--megabytes", type=float, nargs="+", default=[0.01, 1, 4, 64])
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    with TemporaryDirectory() as folder:
        mp.spawn(measure, (str(Path(folder) / "store"), options), nprocs=options.ranks)


if __name__ == "__main__":
    main()
