"""Validation loss of a run file by optimiser, learning rate and seed, at the same tokens.

    python bench/optimisers.py [--run examples/first.toml] [--steps 300] [--seeds 3] [--dp 2]
        [--adamw 2e-3,4e-3] [--adamw8bit 2e-3,4e-3] [--muon 2e-3,4e-3] [--lion 2e-4,4e-4]

Each optimiser gets its own learning rates, since what is best for one is not for another, its paper's
momentum, and all else of the run file. The rate that is best with seed 0 is run with the other seeds. Prints
a JSON object for each run, and one for each optimiser: its best rate, the losses by seed and their mean.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from tempfile import TemporaryDirectory

from meshwright import api
from meshwright.spec import load

PAPERS = {
    "adamw": [],
    "adamw8bit": [],
    "lion": [("train.beta2", "0.99")],
    "muon": [("train.beta1", "0.95")],
}
"""Keys of each optimiser besides its learning rate."""


def final_loss(options: argparse.Namespace, optimiser: str, rate: str, seed: int) -> float:
    """The validation loss at the end of a run, which is also printed."""
    keys = [("train.optimiser", optimiser), ("train.lr", rate), ("train.seed", str(seed))]
    keys += [("train.steps", str(options.steps)), ("train.eval_every", "0"), *PAPERS[optimiser]]
    keys += [("layout.dp", str(options.dp))] if options.dp else []
    with TemporaryDirectory() as folder:
        result = api.train(load(options.run, keys), out=Path(folder) / "run", quiet=True)
    loss = float(result["val_loss"])
    print(json.dumps({"optimiser": optimiser, "lr": rate, "seed": seed, "val_loss": loss}), flush=True)
    return loss


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--run", type=Path, default=Path("examples/first.toml"))
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--dp", type=int, help="ranks; default: those of the run file")
    for name in PAPERS:
        rates = "2e-4,4e-4" if name == "lion" else "2e-3,4e-3"
        parser.add_argument(f"--{name}", default=rates, help="learning rates; an empty text leaves it out")
    options = parser.parse_args()
    for optimiser in PAPERS:
        rates = [rate for rate in getattr(options, optimiser).split(",") if rate]
        if not rates:
            continue
        first = {rate: final_loss(options, optimiser, rate, 0) for rate in rates}
        best = min(first, key=first.__getitem__)
        losses = [
            first[best],
            *(final_loss(options, optimiser, best, seed) for seed in range(1, options.seeds)),
        ]
        row = {"optimiser": optimiser, "best_lr": best, "losses": losses, "mean": statistics.fmean(losses)}
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
