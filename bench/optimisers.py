"""Validation loss of a run file by optimiser, learning rate and seed, at the same tokens.

    python bench/optimisers.py [--run examples/first.toml] [--steps 300] [--seeds 3]
        [--adamw 2e-3,4e-3] [--muon 2e-3,4e-3] [--lion 2e-4,4e-4]

Each optimiser gets its own learning rates, since what is best for one is not for another, its paper's
momentum, and all else of the run file. Prints one JSON object: for each (optimiser, learning rate) the losses
by seed and their mean, and for each optimiser the best mean.
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
    "lion": [("train.beta2", "0.99")],
    "muon": [("train.beta1", "0.95")],
}
"""Keys of each optimiser besides its learning rate."""


def final_loss(run: Path, optimiser: str, rate: float, seed: int, steps: int) -> float:
    """The validation loss at the end of a run."""
    keys = [("train.optimiser", optimiser), ("train.lr", str(rate)), ("train.seed", str(seed))]
    keys += [("train.steps", str(steps)), ("train.eval_every", "0"), *PAPERS[optimiser]]
    with TemporaryDirectory() as folder:
        result = api.train(load(run, keys), out=Path(folder) / "run", quiet=True)
    return float(result["val_loss"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--run", type=Path, default=Path("examples/first.toml"))
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, default=3)
    for name, rates in (("adamw", "2e-3,4e-3"), ("lion", "2e-4,4e-4"), ("muon", "2e-3,4e-3")):
        parser.add_argument(f"--{name}", default=rates, help="learning rates; an empty text leaves it out")
    options = parser.parse_args()
    found, best = {}, {}
    for optimiser in PAPERS:
        for rate in filter(None, getattr(options, optimiser).split(",")):
            losses = [
                final_loss(options.run, optimiser, float(rate), seed, options.steps)
                for seed in range(options.seeds)
            ]
            mean = statistics.fmean(losses)
            found[f"{optimiser} {rate}"] = {"losses": losses, "mean": mean}
            best[optimiser] = min(best.get(optimiser, mean), mean)
    print(json.dumps({"run": str(options.run), "steps": options.steps, "found": found, "best": best}))


if __name__ == "__main__":
    main()
