"""Coordinate check of muP: how far the first steps move activations and logits, against the model's width.

    python bench/coordinate_check.py [--widths 64,128,256,512] [--steps 5] [--seeds 3]
        [--optimisers adamw,lion,muon] [--device cpu] [--train.lr 0.01 ...]

Models of each width are trained for a few steps, in the standard parametrisation, where `train.lr` and
`model.init_std` are the same at all widths, and with `model.mup_base_hidden` of the least width. Heads, their
channels being fixed, and ffn (experts' too) grow in proportion to hidden. The coordinates (Yang et al. 2022,
section D.1) are means of |x after the steps - x at the start| over the first batch, in the embedding, after
each block and in the logits. A slope is that of log(coordinate) against log(width), by least squares: 0 where
widths learn alike. Prints a JSON object for each optimiser and parametrisation: the coordinates by width,
means over seeds, and the slopes. Other keys of a run file are given as flags.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Mapping, Sequence
from math import log
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor, nn

from meshwright.checkpoint.gather_full import gather_full
from meshwright.comm.mesh import Mesh, build_mesh
from meshwright.data.corpus import open_corpus
from meshwright.data.loader import Batch, Loader
from meshwright.model.decoder import Decoder
from meshwright.spec import RunSpec, load
from meshwright.train.step import Trainer
from world import join

HEAD_DIM = 16
SIZES = {
    "model.layers": 2, "model.head_dim": HEAD_DIM, "model.vocab_size": 256, "data.corpus": "synthetic",
    "data.seq_len": 64, "train.batch_tokens": 1024, "train.schedule": "constant", "train.warmup_steps": 0,
    "train.weight_decay": 0,
}  # fmt: skip
RATES = {"adamw": 0.01, "lion": 0.003, "muon": 0.01}
Coordinates = dict[str, float]


def spec_of(width: int, base: int | None, optimiser: str, flags: Mapping[str, object]) -> RunSpec:
    """A run of a model `width` wide, with muP if there is a `base`."""
    heads = width // HEAD_DIM
    given = {
        **SIZES, "model.hidden": width, "model.ffn": 2 * width, "model.heads": heads,
        "model.kv_heads": heads, "train.optimiser": optimiser, "train.lr": RATES[optimiser], **flags,
    }  # fmt: skip
    if "model.moe.experts" in flags:
        given["model.moe.ffn"] = width
    if base is not None:
        given["model.mup_base_hidden"] = base
    return load(None, [(key, str(value)) for key, value in given.items()])


def coordinates(mesh: Mesh, spec: RunSpec, steps: int) -> Coordinates:
    """Mean change of each coordinate over `steps` optimiser steps, on one device."""
    loader = Loader(open_corpus(spec), spec, 0, 1)
    batches = [loader.step(step) for step in range(steps)]
    loader.close()
    trainer = Trainer(spec, mesh)
    trainer.initialise()
    before = activations(trainer, batches[0])
    for number, batch in enumerate(batches, 1):
        trainer.step(batch, number)
    after = activations(trainer, batches[0])
    return {name: float((after[name] - start).abs().mean()) for name, start in before.items()}


@torch.no_grad()
def activations(trainer: Trainer, batch: Batch) -> dict[str, Tensor]:
    """The embedding, the output of each block and the logits, by name, on a batch."""
    device = trainer.mesh.device
    with torch.device(device):
        decoder = Decoder(trainer.spec.model)
    decoder.load_state_dict(gather_full(trainer.states.parameters(), trainer.mesh))
    found: dict[str, Tensor] = {}

    def keep(name: str, module: nn.Module) -> None:
        module.register_forward_hook(lambda _module, _inputs, output: found.update({name: output}))

    keep("embed", decoder.embed)
    for index, block in enumerate(decoder.blocks):
        keep(f"blocks.{index}", block)
    moved = batch.to(device)
    found["logits"] = decoder(moved.tokens, moved.positions, moved.documents)
    return found


def slope(by_width: Mapping[int, float]) -> float:
    """The slope of log(value) against log(width), by least squares."""
    return statistics.linear_regression([log(w) for w in by_width], [log(v) for v in by_width.values()]).slope


def checked(
    mesh: Mesh, widths: Sequence[int], optimiser: str, mup: bool, steps: int, seeds: int,
    flags: Mapping[str, object],
) -> tuple[dict[int, Coordinates], Coordinates]:  # fmt: skip
    """The coordinates by width, as means over seeds, and their slopes."""
    rows: dict[int, Coordinates] = {}
    base = min(widths) if mup else None
    for width in widths:
        specs = [spec_of(width, base, optimiser, {**flags, "train.seed": seed}) for seed in range(seeds)]
        runs = [coordinates(mesh, spec, steps) for spec in specs]
        rows[width] = {name: statistics.fmean(run[name] for run in runs) for name in runs[0]}
    names = rows[widths[0]]
    return rows, {name: slope({width: row[name] for width, row in rows.items()}) for name in names}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--widths", default="64,128,256,512", help=f"multiples of {HEAD_DIM}")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--optimisers", default="adamw,lion,muon")
    parser.add_argument("--device", default="cpu")
    options, rest = parser.parse_known_args()
    flags = {key.removeprefix("--"): value for key, value in zip(rest[::2], rest[1::2], strict=True)}
    with TemporaryDirectory() as folder:
        device = join(options.device, str(Path(folder) / "store"), 0, 1)
    widths = [int(width) for width in options.widths.split(",")]
    mesh = build_mesh(spec_of(widths[0], None, "adamw", flags).layout, device)
    assert mesh is not None
    for optimiser in options.optimisers.split(","):
        for mup in (False, True):
            rows, slopes = checked(mesh, widths, optimiser, mup, options.steps, options.seeds, flags)
            found = {"optimiser": optimiser, "parametrisation": "muP" if mup else "standard"}
            print(json.dumps({**found, "coordinates": rows, "slopes": slopes}), flush=True)


if __name__ == "__main__":
    main()
