"""State on a CUDA device: initial weights, digests and AdamW's updates are those of the CPU."""

from __future__ import annotations

from pathlib import Path

import cuda_runs
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.kernels.splitmix64 import mix64_, stream
from meshwright.model.init import fill_
from meshwright.optim.lr_schedule import learning_rate
from meshwright.spec import RunSpec
from meshwright.train.callbacks import Observers
from meshwright.train.digest import parameters_sha256
from meshwright.train.loop import TrainingRun
from meshwright.train.open_run import open_run
from meshwright.train.step import Trainer
from meshwright.verify.reference.optimisers import update

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("world"),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine"),
]

DEVICE = "cuda"


def spec_of(**flags: object) -> RunSpec:
    return cuda_runs.spec_of(**({"train__batch_tokens": 1024, "train__steps": 4} | flags))


def trainer_on(device: str, spec: RunSpec) -> Trainer:
    trainer = Trainer(spec, cuda_runs.mesh_of(spec, device))
    trainer.initialise()
    return trainer


def test_device_groups_are_of_nccl_only(world: dist.ProcessGroup) -> None:
    """Messages between hosts go through the store: no gloo group is there."""
    assert dist.get_backend_config(world) == "cuda:nccl"


def test_bits_of_splitmix64() -> None:
    places = torch.arange(2**20) * 7919 - 2**40
    for key in (1, 0x9E3779B97F4A7C15, 2**64 - 1):
        assert torch.equal(mix64_(stream(places.to(DEVICE), key)).cpu(), mix64_(stream(places, key)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_drawn_weights(dtype: torch.dtype) -> None:
    """The bits are equal; the inverse of the normal's distribution is computed in float64 by each device's
    own functions, and rounded to equal numbers."""

    def drawn(device: str) -> Tensor:
        shape = torch.Size((700, 1001))
        local = torch.empty(shape, dtype=dtype, device=device)
        indices = [torch.arange(size, device=device) for size in shape]
        return fill_(
            local, seed=3, name="blocks.0.mlp.up.weight", index_vectors=indices, shape=shape, std=0.02
        )

    found, wanted = drawn(DEVICE).cpu(), drawn("cpu")
    assert int((found != wanted).sum()) == 0


@pytest.mark.parametrize("preset", ["tiny", "moe-tiny"])
def test_parameters_have_the_digest_of_the_cpu(preset: str) -> None:
    """Digests of the initial weights and of others are those of the CPU."""
    spec = spec_of(model__preset=preset)
    ours, theirs = trainer_on(DEVICE, spec), trainer_on("cpu", spec)
    for mine, other in zip(ours.states.units, theirs.states.units, strict=True):
        assert torch.equal(mine.stored.cpu(), other.stored)
    initial = parameters_sha256(ours)
    assert initial == parameters_sha256(theirs)
    for mine, other in zip(ours.states.units, theirs.states.units, strict=True):
        other.stored.mul_(1 + 2**-12).add_(2**-30)
        mine.stored.copy_(other.stored)
    assert parameters_sha256(ours) == parameters_sha256(theirs) != initial


def test_fused_adamw() -> None:
    """Against the paper's algorithm in float64: a step rounds the parameter once, and its change, of the size
    of the rate, some ten times (two moments, their corrections, a root, a quotient, the decay)."""
    spec, steps = spec_of(train__lr=1e-2, train__warmup_steps=1), 5
    trainer = trainer_on(DEVICE, spec)
    exact = [unit.stored.double().cpu() for unit in trainer.states.units]
    moments = [(torch.zeros_like(flat), torch.zeros_like(flat)) for flat in exact]
    draw = torch.Generator().manual_seed(0)
    off = torch.finfo(torch.float32).eps / 2
    bound = [torch.zeros_like(flat) for flat in exact]
    for number in range(1, steps + 1):
        rate = learning_rate(spec.train, number)
        for unit, flat, moment, most in zip(trainer.states.units, exact, moments, bound, strict=True):
            gradient = torch.randn(len(flat), generator=draw)
            unit.gradient = gradient.to(DEVICE)
            decayed, still = slice(unit.decayed), slice(unit.decayed, None)
            for part, dims in ((decayed, 2), (still, 1)):
                # `adamw` decays matrices only: the parts are given as such.
                given = [x[part].view(*[1] * (dims - 1), -1) for x in (flat, gradient.double(), *moment)]
                update(given[0], given[1], (given[2], given[3]), spec.train, number)
            # The moments' roundings are relative to gradients that may be larger than what is left of them.
            most += off * (flat.abs() + 64 * rate)
        trainer.optimiser.step(rate)
    for unit, flat, most in zip(trainer.states.units, exact, bound, strict=True):
        assert bool(((unit.stored.double().cpu() - flat).abs() <= most).all())


def test_one_rank_steps_saves_loads_and_validates(tmp_path: Path) -> None:
    spec = spec_of(precision__compute="bf16", train__eval_every=1, checkpoint__every=2, train__stop_at=2)

    def run() -> TrainingRun:
        return open_run(spec, cuda_runs.mesh_of(spec, DEVICE), tmp_path, Observers([]))

    half = run()
    first = half.execute(None)
    assert first["steps"] == 2 and first["val_loss"] is not None and first["val_loss"] < 20
    loaded = run()
    again = loaded.execute("auto")
    assert again["parameters_sha256"] == first["parameters_sha256"]
    assert again["val_loss"] == first["val_loss"]
    for mine, other in zip(loaded.trainer.states.units, half.trainer.states.units, strict=True):
        assert torch.equal(mine.stored, other.stored)
    moments = zip(loaded.trainer.optimiser.tensors(), half.trainer.optimiser.tensors(), strict=True)
    assert all(mine[0] == other[0] for mine, other in moments)
    assert loaded.trainer.optimiser.updates == 2
