"""Held-out loss of a model that is quantised after training, with and without quantisation-aware training.

    python bench/quantisation_aware.py --out DIR [--run examples/first.toml] [--recipe int4] [--seeds 0,1,2]
        [--share 0.3] [--layout.dp 1 ...]

For each seed one run is trained to its end without rounding, and another goes on from its checkpoint with the
last `--share` of the steps and `precision.qat`: the same tokens in the same order. Runs that
have ended are not repeated. Prints one JSON object: for each seed the held-out loss in nats a token of the
plain run as it is and quantised, and of the other one quantised.

    {"recipe", "group", "seeds": {"0": {"plain", "plain_quantised", "aware_quantised"}}, "mean": {...}}
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
from pathlib import Path

import torch

from meshwright import api
from meshwright.checkpoint.store import CheckpointStore
from meshwright.data.corpus import open_corpus
from meshwright.data.loader import Loader
from meshwright.rank.world import mesh_of
from meshwright.spec import load
from meshwright.train.step import Trainer

Keys = list[tuple[str, str]]


def held_out_loss(run: Path, qat: Keys) -> float:
    """The loss in nats a token of a run's newest checkpoint on its held-out text, with rounding by `qat`."""
    spec = load(run, [("layout.dp", "1"), ("precision.qat", "none"), *qat])
    with mesh_of(spec) as mesh, torch.no_grad():
        trainer = Trainer(spec, mesh)
        tensors = {f"model/{name}": each for name, each in trainer.states.parameters()}
        CheckpointStore(run / "checkpoints", 1).load(None, tensors)
        for unit in trainer.states.units:
            unit.expire()
        loader = Loader(open_corpus(spec), spec, 0, 1)
        total = sum(trainer.nll(batch) for batch in loader.validation.batches(spec.train.eval_tokens))
        loader.close()
    nll, tokens = torch.as_tensor(total).tolist()
    return float(nll / tokens)


def trained(run: Path, out: Path, keys: Keys, qat: Keys, share: float) -> tuple[Path, Path]:
    """The folders of a run without rounding and of one that ends with it."""
    spec = load(run, keys)
    steps = spec.train.total_steps
    begin = steps - max(1, round(share * steps))
    plain, aware = out / "plain", out / "aware"
    if not (aware / "result.json").is_file():
        first = [*keys, ("train.stop_at", str(begin))]
        api.train(load(run, first), out=plain, resume="auto", quiet=True)
        shutil.rmtree(aware, ignore_errors=True)
        shutil.copytree(plain, aware)
        (aware / "result.json").unlink()
        api.train(load(run, keys), out=plain, resume="auto", quiet=True)
        api.train(load(run, [*keys, *qat]), out=aware, resume="auto", quiet=True)
    return plain, aware


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--run", type=Path, default=Path("examples/first.toml"))
    parser.add_argument("--recipe", default="int4")
    parser.add_argument("--group", default="32")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--share", type=float, default=0.3)
    options, rest = parser.parse_known_args()
    given = [(key.removeprefix("--"), value) for key, value in zip(rest[::2], rest[1::2], strict=True)]
    qat = [("precision.qat", options.recipe)]
    qat += [("precision.qat_group", options.group)] if options.recipe == "int4" else []
    found: dict[str, dict[str, float]] = {}
    for seed in options.seeds.split(","):
        keys = [("layout.dp", "1"), ("train.eval_every", "0"), *given, ("train.seed", seed)]
        plain, aware = trained(options.run, options.out / f"seed-{seed}", keys, qat, options.share)
        found[seed] = {
            "plain": held_out_loss(plain, []),
            "plain_quantised": held_out_loss(plain, qat),
            "aware_quantised": held_out_loss(aware, qat),
        }
    mean = {key: statistics.mean(row[key] for row in found.values()) for key in next(iter(found.values()))}
    print(json.dumps({"recipe": options.recipe, "group": options.group, "seeds": found, "mean": mean}))


if __name__ == "__main__":
    main()
