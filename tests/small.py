"""Small runs for tests: a spec from dotted flags, with dots written as double underscores."""

from __future__ import annotations

from collections.abc import Mapping
from unittest.mock import patch

import torch

from meshwright.comm.mesh import Mesh
from meshwright.data.corpus import open_corpus
from meshwright.data.loader import Batch, Loader
from meshwright.parallel.data_parallel import DataParallel
from meshwright.spec import RunSpec, load
from meshwright.train import matmul_peak as peak
from meshwright.train import metrics
from meshwright.train.step import Trainer
from meshwright.train.step_sums import Sums, Totals

MODEL = {"layers": 2, "hidden": 32, "ffn": 40, "heads": 4, "kv_heads": 2}


def spec_of(base: Mapping[str, object], **flags: object) -> RunSpec:
    """A run of the small model with `base` (dotted keys) and `flags` laid over it.

    Stages are cut evenly: its head outweighs its blocks, and would be alone on its stage.
    """
    given = {f"model.{key}": value for key, value in MODEL.items()} | {"layout.stages": "even"} | dict(base)
    given |= {key.replace("__", "."): value for key, value in flags.items()}
    return load(None, [(key, str(value)) for key, value in given.items()])


def first_batches(spec: RunSpec, mesh: Mesh, steps: int) -> list[Batch]:
    """This rank's batches of the first steps."""
    loader = Loader(open_corpus(spec), spec, mesh.data_rank, spec.layout.data_ranks)
    batches = [loader.step(step) for step in range(steps)]
    loader.close()
    return batches


def after_a_step(spec: RunSpec, mesh: Mesh) -> Trainer:
    """A trainer that has taken its first step, which alone is on the wire."""
    trainer = Trainer(spec, mesh)
    trainer.initialise()
    (batch,) = first_batches(spec, mesh, 1)
    trainer.expect(batch)
    mesh.wire.clear()
    trainer.step(batch, 1)
    return trainer


def scale_gradients(states: DataParallel, factor: float) -> None:
    """Multiply every gradient of a rank, between `finish_step` and the update."""
    for unit in states.units:
        if unit.gradient is not None:
            unit.gradient.mul_(factor)


def measure_gradients(states: DataParallel) -> None:
    """Take the norms of a rank's gradients again, after they were changed."""
    states._reduction._norms = [states.squares(exact=True).sqrt().view(1)]


def sums_of_infinite_gradients(trainer: Trainer) -> Sums:
    """The numbers of a step in which every gradient is infinite, and the loss is 1; its gradients are due."""
    trainer._due_factor = 1.0
    for unit in trainer.states.units:
        unit.set_gradient(torch.full_like(unit.stored, torch.inf))
    return Sums(torch.tensor([torch.inf, 1.0, *[0.0] * (len(Totals._fields) - 2)], dtype=torch.float64))


def measure_peak_quickly() -> None:
    """From here on the runs of this process take one small product for the matmul rate.

    A run measures for 0.4 s, twice: on eight ranks of two cores, that takes longer than a test trains. Runs
    in processes of their own (`test_api.py`) still do.
    """
    metrics.matmul_flops_per_second = _rate_of_a_small_product


def _rate_of_a_small_product(dtype: torch.dtype, device: torch.device) -> float:
    with patch.object(peak, "CPU_SIZES", (64,)):
        return peak.matmul_flops_per_second(dtype, device, seconds=0.0)
