"""Seconds and bytes of an update of each optimiser, on one device.

    python bench/optimiser_step.py [--optimisers adamw,adamw8bit] [--rounds 7] [--hidden 512] [--layers 4]
        [--device cpu]

All optimisers hold models of the same shape and random gradients, and take turns in one process. Prints one
JSON object: parameters, and by optimiser the median seconds of an update and the bytes of states a parameter:

    {"parameters", "seconds": {...}, "state_bytes": {...}}
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

from meshwright.comm.mesh import build_mesh
from meshwright.spec import RunSpec
from meshwright.train.step import Trainer


def trainer_of(optimiser: str, options: argparse.Namespace) -> Trainer:
    """A trainer of one device, whose units have gradients."""
    model = {"preset": "tiny", "hidden": options.hidden, "ffn": 4 * options.hidden, "layers": options.layers}
    model |= {"heads": 8, "kv_heads": 8, "head_dim": options.hidden // 8}
    spec = RunSpec.model_validate({"model": model, "train": {"optimiser": optimiser}})
    mesh = build_mesh(spec.layout, torch.device(options.device))
    assert mesh is not None
    trainer = Trainer(spec, mesh)
    trainer.initialise()
    for unit in trainer.states.units:
        unit.set_gradient(torch.randn_like(unit.stored))
    return trainer


def measure(options: argparse.Namespace) -> dict[str, object]:
    """The object to print."""
    trainers = {name: trainer_of(name, options) for name in options.optimisers.split(",")}
    seconds: dict[str, list[float]] = {name: [] for name in trainers}
    wait = torch.cuda.synchronize if options.device.startswith("cuda") else lambda: None
    for turn in range(options.rounds + 1):
        for name, trainer in trainers.items():
            wait()
            began = time.perf_counter()
            trainer.optimiser.step(1e-3)
            wait()
            seconds[name] += [time.perf_counter() - began] if turn else []  # the first warms up
    parameters = next(iter(trainers.values())).spec.model.parameters
    return {
        "parameters": parameters,
        "seconds": {name: round(statistics.median(taken), 5) for name, taken in seconds.items()},
        "state_bytes": {
            name: round(sum(trainer.optimiser.memory().values()) / parameters, 3)
            for name, trainer in trainers.items()
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--optimisers", default="adamw,adamw8bit")
    parser.add_argument("--device", default="cpu")
    for name, default in (("rounds", 7), ("hidden", 512), ("layers", 4)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{Path(folder) / 'store'}", rank=0, world_size=1)
        print(json.dumps(measure(options)))
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
