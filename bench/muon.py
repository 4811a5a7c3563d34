"""Muon's matrices dealt to the ranks that share a unit, as the optimiser does, against gathered on each.

    python bench/muon.py [--ranks 2] [--rounds 7] [--hidden 512] [--layers 4]

Dealt, each rank gets all rows of its own matrices in one all-to-all, makes them orthogonal, and returns the
rows of the result in another. Gathered, all ranks get all matrices of a unit in one all-gather, and each
makes all of them orthogonal. Both sides take turns in the same processes of one thread each, over ZeRO-3, and
their results are compared. Prints one JSON object: medians in seconds over all units of a model, elements
that a rank receives of others, and the FLOPs that it does:

    {"ranks", "hidden", "layers", "dealt", "gathered", "ratio", "received": {...}, "tflops": {...}}
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import Tensor

from meshwright.comm.collectives import start_all_gather
from meshwright.comm.mesh import build_mesh
from meshwright.optim.muon import RMS, STEPS, Muon, matrices_of, orthogonalised
from meshwright.parallel.fsdp_unit import Unit
from meshwright.spec import RunSpec
from meshwright.train.step import Trainer


def gathered_update(unit: Unit, flat: Tensor) -> None:
    """Replace a unit's matrices in `flat` by orthogonal ones, each scaled, made on every rank."""
    axis = unit.shards
    assert axis is not None
    every = flat.new_empty(axis.size, len(flat))
    start_all_gather(every.view(-1), flat, axis).wait()
    for matrix in matrices_of(unit):
        place = slice(matrix.start, matrix.start + matrix.size)
        whole = every[:, place].reshape(-1, matrix.part[1])[: matrix.rows]
        step = orthogonalised(whole) * (RMS * max(whole.shape) ** 0.5)
        padded = F.pad(step, (0, 0, 0, axis.size * matrix.part[0] - matrix.rows))
        flat[place] = padded.view(axis.size, matrix.size)[axis.rank]


def flops_of(units: list[Unit]) -> int:
    """FLOPs of making all matrices of these units orthogonal."""
    total = 0
    for unit in units:
        for matrix in matrices_of(unit):
            rows, columns = sorted((matrix.rows, matrix.part[1]))
            total += STEPS * (4 * rows * rows * columns + 2 * rows**3)
    return total


def work(rank: int, store: str, options: argparse.Namespace) -> None:
    """One process."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=options.ranks)
    model = {"preset": "tiny", "hidden": options.hidden, "ffn": 4 * options.hidden, "layers": options.layers}
    model |= {"heads": 8, "kv_heads": 8, "head_dim": options.hidden // 8}
    layout = {"dp": options.ranks, "zero": 3}
    tree = {
        "model": model,
        "layout": layout,
        "train": {"optimiser": "muon", "batch_tokens": 512 * options.ranks},
    }
    spec = RunSpec.model_validate(tree)
    mesh = build_mesh(spec.layout, torch.device("cpu"))
    assert mesh is not None
    optimiser = Trainer(spec, mesh).optimiser
    assert isinstance(optimiser, Muon)
    exchanges = [exchange for _, exchange in optimiser.exchanges]
    sources = [torch.randn(exchange.unit.decayed) for exchange in exchanges]
    seconds: dict[str, list[float]] = {"dealt": [], "gathered": []}
    results: dict[str, list[Tensor]] = {}
    for turn in range(options.rounds + 1):
        for side, taken in seconds.items():
            flats = [source.clone() for source in sources]
            dist.barrier()
            began = time.perf_counter()
            for exchange, flat in zip(exchanges, flats, strict=True):
                exchange.update(flat) if side == "dealt" else gathered_update(exchange.unit, flat)
            dist.barrier()
            taken += [time.perf_counter() - began] if turn else []  # the first warms up
            results[side] = flats
    for dealt, gathered in zip(results["dealt"], results["gathered"], strict=True):
        torch.testing.assert_close(dealt, gathered, rtol=1e-4, atol=1e-6)
    if rank == 0:
        median = {side: round(statistics.median(taken), 4) for side, taken in seconds.items()}
        ratio = round(median["gathered"] / median["dealt"], 3)
        flops = flops_of([each.unit for each in exchanges]) / 1e12
        own = sum(source.numel() for source in sources)
        received = {
            "dealt": 2 * own * (options.ranks - 1) // options.ranks,
            "gathered": own * (options.ranks - 1),
        }
        row = {"ranks": options.ranks, "hidden": options.hidden, "layers": options.layers, **median}
        row |= {"ratio": ratio, "received": received}
        row |= {"tflops": {"dealt": round(flops / options.ranks, 4), "gathered": round(flops, 4)}}
        print(json.dumps(row))
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    for name, default in (("ranks", 2), ("rounds", 7), ("hidden", 512), ("layers", 4)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    with TemporaryDirectory() as folder:
        mp.spawn(work, (str(Path(folder) / "store"), options), nprocs=options.ranks)


if __name__ == "__main__":
    main()
