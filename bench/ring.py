"""Ring attention on two processes of one thread each, against one such process with the whole sequence.

    python bench/ring.py [--tokens 8192 16384] [--rounds 7] [--precision bf16]

Forward and backward of one layer's attention (8 query heads, 4 key-value heads, 64 channels) over one causal
document. Three sides take turns in the same two processes: `one` (the other process waits), `zigzag` and
`contiguous`, a plain ring in which each process holds half of the sequence in one piece. Prints one JSON
object a line, medians in seconds, with the load of the machine just before:

    {"tokens", "precision", "one", "zigzag", "contiguous", "speedup", "zigzag_over_contiguous", "load"}
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from meshwright.comm.mesh import Mesh, build_mesh
from meshwright.kernels.attention_intervals import attention_intervals
from meshwright.parallel.context_parallel import zigzag
from meshwright.parallel.precision import DTYPES
from meshwright.parallel.recompute_cache import RecomputeCache
from meshwright.parallel.ring_attention import KeyParts, RingAttention
from meshwright.spec import Layout

PROCESSES, HEADS, KV_HEADS, DIM = 2, 8, 4, 64


def inputs(tokens: int, dtype: torch.dtype) -> list[Tensor]:
    """q, k, v and the gradient of the output, of the whole sequence."""
    make = torch.Generator().manual_seed(0)
    shapes = [(1, tokens, heads, DIM) for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)]
    return [torch.randn(shape, generator=make).to(dtype) for shape in shapes]


def make_side(mesh: Mesh, side: str, whole: list[Tensor]) -> Callable[[], None]:
    """One forward and backward of a side on this rank."""
    tokens, rank = whole[0].shape[1], mesh.context.rank
    if side == "one":
        places = [torch.arange(tokens)]
    elif side == "zigzag":
        places = [zigzag(tokens, PROCESSES, r) for r in range(PROCESSES)]
    else:
        places = list(torch.arange(tokens).chunk(PROCESSES))
    own = places[0] if side == "one" else places[rank]
    seen = attention_intervals(None, tokens, None, own, 1, "cpu")
    *qkv, grad = (x[:, own].contiguous() for x in whole)
    leaves = [x.requires_grad_() for x in qkv]
    parts = KeyParts(seen, places)
    axis = replace(mesh.context, size=1, rank=0) if side == "one" else mesh.context
    attention = RingAttention(axis, lambda _: parts, RecomputeCache())

    def run() -> None:
        if side != "one" or rank == 0:
            (out,) = attention(*leaves)
            torch.autograd.grad(out, leaves, grad)

    return run


def timed(mesh: Mesh, run: Callable[[], None]) -> float:
    """Seconds until all ranks have done it."""
    dist.barrier(mesh.context.group)
    start = time.perf_counter()
    run()
    dist.barrier(mesh.context.group)
    return time.perf_counter() - start


def measure(mesh: Mesh, tokens: int, precision: str, rounds: int) -> dict[str, object]:
    """One line of the result."""
    whole = inputs(tokens, DTYPES[precision])
    load = os.getloadavg()[0]
    sides = {side: make_side(mesh, side, whole) for side in ("one", "zigzag", "contiguous")}
    seconds: dict[str, list[float]] = {side: [] for side in sides}
    for turn in range(rounds + 1):
        for side, run in sides.items():
            taken = timed(mesh, run)
            if turn:  # the first warms up
                seconds[side].append(taken)
    median = {side: statistics.median(values) for side, values in seconds.items()}
    return {
        "tokens": tokens,
        "precision": precision,
        **{side: round(value, 4) for side, value in median.items()},
        "speedup": round(median["one"] / median["zigzag"], 3),
        "zigzag_over_contiguous": round(median["contiguous"] / median["zigzag"], 3),
        "load": round(load, 2),
    }


def work(rank: int, store: str, arguments: argparse.Namespace) -> None:
    """One process."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=PROCESSES)
    mesh = build_mesh(Layout(cp=PROCESSES), torch.device("cpu"))
    assert mesh is not None
    for tokens in arguments.tokens:
        line = measure(mesh, tokens, arguments.precision, arguments.rounds)
        if rank == 0:
            print(json.dumps(line), flush=True)
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, nargs="+", default=[8192, 16384])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--precision", choices=sorted(DTYPES), default="bf16")
    with TemporaryDirectory() as folder:
        mp.spawn(work, (str(Path(folder) / "store"), parser.parse_args()), nprocs=PROCESSES)


if __name__ == "__main__":
    main()
