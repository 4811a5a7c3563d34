"""Validation loss and seconds of an update with fp32 masters, and with weights in bf16 that are rounded.

    python bench/bf16_weights.py [--run examples/first.toml] [--steps 300] [--seeds 2]
        [--optimisers adamw,lion,muon] [--batch-tokens 1024] [--lr 5e-4]

Weights in bf16 are rounded stochastically, as `precision.master = "bf16"` does, or to nearest, which no run
does: here it shows what the draws are for. All else is the run file's, on one rank. Prints a JSON object for
each optimiser: median seconds of an update, in turns; and one for each kind of weights: the losses by seed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import patch

import torch
from torch import Tensor

from meshwright import api
from meshwright.optim import optimiser
from meshwright.rank.world import mesh_of
from meshwright.spec import RunSpec, load
from meshwright.train.step import Trainer

KINDS = {"fp32": "fp32", "stochastic": "bf16", "nearest": "bf16"}
"""Kind of weights -> `precision.master`."""
PAPERS = {
    "adamw": [],
    "lion": [("train.beta2", "0.99"), ("train.lr", "4e-4")],
    "muon": [("train.beta1", "0.95")],
}


@contextmanager
def rounding(kind: str) -> Iterator[None]:
    """Context in which weights in bf16 are rounded as `kind` says."""

    def nearest(values: Tensor, _draws: Tensor) -> Tensor:
        return values.copy_(values.bfloat16())

    with patch.object(optimiser, "round_", nearest if kind == "nearest" else optimiser.round_):
        yield


def run_of(options: argparse.Namespace, name: str, kind: str, seed: int) -> RunSpec:
    """The run of an optimiser, a kind of weights and a seed, on one rank."""
    keys = [("train.optimiser", name), ("train.seed", str(seed)), ("train.steps", str(options.steps))]
    keys += [("train.eval_every", "0"), ("layout.dp", "1"), ("precision.compute", "bf16"), *PAPERS[name]]
    keys += [("train.batch_tokens", str(options.batch_tokens))] if options.batch_tokens else []
    keys += [("train.lr", options.lr)] if options.lr else []
    return load(options.run, [*keys, ("precision.master", KINDS[kind])])


def final_loss(spec: RunSpec, kind: str) -> float:
    """The validation loss at the end of a run."""
    with TemporaryDirectory() as folder, rounding(kind):
        return float(api.train(spec, out=Path(folder) / "run", quiet=True)["val_loss"])


def seconds_of_updates(specs: dict[str, RunSpec], times: int = 15) -> dict[str, float]:
    """Median seconds of an update by kind of weights, which take turns."""
    found: dict[str, list[float]] = {kind: [] for kind in specs}
    with mesh_of(next(iter(specs.values()))) as mesh:
        trainers = {kind: Trainer(spec, mesh) for kind, spec in specs.items()}
        for trainer in trainers.values():
            trainer.initialise()
            for unit in trainer.states.units:
                unit.set_gradient(torch.randn(unit.part))
        for _ in range(times):
            for kind, trainer in trainers.items():
                began = time.perf_counter()
                trainer.optimiser.step(1e-4)
                found[kind].append(time.perf_counter() - began)
    return {kind: statistics.median(seconds) for kind, seconds in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--run", type=Path, default=Path("examples/first.toml"))
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch-tokens", type=int, help="default: that of the run file")
    parser.add_argument("--lr", help="default: that of the run file, or of the optimiser's paper")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--optimisers", default="adamw,lion,muon")
    options = parser.parse_args()
    for name in options.optimisers.split(","):
        specs = {kind: run_of(options, name, kind, 0) for kind in KINDS if kind != "nearest"}
        print(json.dumps({"optimiser": name, "seconds": seconds_of_updates(specs)}), flush=True)
        for kind in KINDS if options.seeds else ():
            seeds = range(options.seeds)
            losses = [final_loss(run_of(options, name, kind, seed), kind) for seed in seeds]
            row = {"optimiser": name, "weights": kind, "losses": losses, "mean": statistics.fmean(losses)}
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
