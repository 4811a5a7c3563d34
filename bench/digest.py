"""Seconds of the digest of parameters, and what they come to for large models on many ranks.

    python bench/digest.py [--preset small] [--rounds 5]

One process, one thread, the preset's parameters in fp32. Beside it the SHA-256 of their bytes, as one rank
would compute it after it had gathered them all. Seconds for larger models follow from both rates: of a digest
to which each rank adds its own share, and of one that a single rank computes. One JSON object.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import statistics
import time
from collections.abc import Callable
from tempfile import TemporaryDirectory

import torch

from meshwright.comm.mesh import build_mesh
from meshwright.spec import load
from meshwright.train.digest import parameters_sha256
from meshwright.train.step import Trainer
from world import join

MODELS = {
    "llama3-8b on 8": (8.0e9, 8),
    "llama3-70b on 512": (70.6e9, 512),
    "llama3-405b on 16,384": (405.9e9, 16384),
}
"""Model and ranks -> (parameters, ranks that share them)."""


def median_seconds(work: Callable[[], object], rounds: int) -> float:
    taken = []
    for _ in range(rounds):
        start = time.perf_counter()
        work()
        taken.append(time.perf_counter() - start)
    return statistics.median(taken)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--preset", default="small")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with TemporaryDirectory() as folder:
        device = join("cpu", f"{folder}/store", 0, 1)
    spec = load(None, [("model.preset", options.preset), ("layout.dp", "1"), ("data.corpus", "synthetic")])
    mesh = build_mesh(spec.layout, device)
    assert mesh is not None
    trainer = Trainer(spec, mesh)
    trainer.initialise()
    whole = [unit.stored.numpy() for unit in trainer.states.units]
    count = sum(each.size for each in whole)

    def gathered() -> None:
        found = hashlib.sha256()
        for each in whole:
            found.update(each)

    shared = count / median_seconds(lambda: parameters_sha256(trainer), options.rounds)
    alone = count / median_seconds(gathered, options.rounds)
    seconds = {
        name: {"shared": round(size / ranks / shared, 2), "on one rank": round(size / alone, 1)}
        for name, (size, ranks) in MODELS.items()
    }
    print(
        json.dumps(
            {
                "parameters": count,
                "shared_per_s": round(shared),
                "one_rank_per_s": round(alone),
                "seconds": seconds,
            }
        )
    )


if __name__ == "__main__":
    main()
