"""The update decided on by the device, the norm before it, and the batch that is copied ahead."""

from __future__ import annotations

import gc
import math
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from meshwright.comm.mesh import Mesh
from meshwright.dryrun.memory_tracker import FakeMemory
from meshwright.dryrun.rank_step import rehearse
from meshwright.optim.optimiser import AdamW
from meshwright.parallel.grad_norm import norms, sum_of_squares
from meshwright.parallel.microbatches import microbatches
from meshwright.spec import RunSpec
from meshwright.train import garbage_collection
from meshwright.train.callbacks import Observers
from meshwright.train.open_run import open_run
from meshwright.train.step import Trainer
from ranks import Ranks
from small import first_batches, spec_of, sums_of_infinite_gradients

BASE = {"data.corpus": "synthetic", "data.seq_len": 32, "train.batch_tokens": 128, "layout.micro_batch": 1}
CPU = torch.device("cpu")


def operators(spec: RunSpec) -> list[str]:
    """Names of the operators of a dry run on the device, in order."""
    names: list[str] = []
    count = FakeMemory._count_operator

    def noted(memory: FakeMemory, func: Any, args: Any, kwargs: Any) -> None:
        names.append(func.name())
        count(memory, func, args, kwargs)

    with patch.object(FakeMemory, "_count_operator", noted):
        rehearse(spec, 0, CPU)
    return names


@pytest.mark.parametrize("master", ["fp32", "bf16"])
def test_the_device_is_given_the_update_before_the_host_waits(master: str) -> None:
    names = operators(spec_of(BASE, precision__compute="bf16", precision__master=master))
    wait = names.index("aten::_local_scalar_dense")
    assert "aten::_fused_adamw_" in names[:wait] and "aten::_fused_adamw_" not in names[wait:]
    assert not any(name.startswith("aten::_foreach_mul_") for name in names)  # a pass over all gradients


@pytest.mark.parametrize("skipped", [0.0, 1.0])
def test_float64_takes_the_update_of_fp32(ranks: Ranks, skipped: float) -> None:
    names = operators(spec_of(BASE, precision__compute="fp64"))
    wait = names.index("aten::_local_scalar_dense")
    assert "aten::_fused_adamw_" in names[:wait] and "aten::_fused_adamw_" not in names[wait:]
    fp64, fp32 = (
        ranks.run(spec_of(BASE).layout, divided, spec_of(BASE, precision__compute=compute), skipped)[0]
        for compute in ("fp64", "fp32")
    )
    for exact, found in zip(fp64, fp32, strict=True):
        torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=1e-6)


def divided(mesh: Mesh, spec: RunSpec, skipped: float) -> list[Tensor]:
    """The parameters, and the first moments, after gradients of 1 that are divided by 3."""
    trainer = Trainer(spec, mesh)
    trainer.initialise()
    for unit in trainer.states.units:
        unit.set_gradient(torch.ones_like(unit.stored))
    divisor = torch.tensor(3.0, dtype=torch.float64)
    trainer.optimiser.step_divided(1e-3, divisor, torch.tensor(skipped))
    moments = trainer.optimiser.moments["exp_avg"]
    wanted = 0.0 if skipped else (1 - spec.train.beta1) / 3
    assert all(bool((flat - wanted).abs().max() < 1e-7) for flat in moments)
    return [unit.stored for unit in trainer.states.units] + [*moments]


def test_a_limit_that_follows_the_steps_before_is_the_hosts() -> None:
    names = operators(spec_of(BASE, train__zclip=2.0, train__zclip_warmup=2))
    wait = names.index("aten::_local_scalar_dense")
    assert "aten::_fused_adamw_" not in names[:wait] and "aten::_fused_adamw_" in names[wait:]


def parameters_after(mesh: Mesh, spec: RunSpec, on_device: bool) -> list[Tensor]:
    """The stored parameters after three steps that the device or the host decides on."""
    with patch.object(AdamW, "takes_divisor", on_device):
        trainer = Trainer(spec, mesh)
        trainer.initialise()
        for number, batch in enumerate(first_batches(spec, mesh, 3), start=1):
            assert trainer.step(batch, number).applied
        assert trainer.optimiser.updates == 3
    return [unit.stored for unit in trainer.states.units]


@pytest.mark.parametrize("clip", ["none", 0.01, 100.0])
@pytest.mark.parametrize("master", ["fp32", "bf16"])
def test_device_and_host_decide_alike(ranks: Ranks, clip: object, master: str) -> None:
    compute = "fp32" if master == "fp32" else "bf16"
    spec = spec_of(BASE, train__clip=clip, precision__compute=compute, precision__master=master)
    device, host = (ranks.run(spec.layout, parameters_after, spec, each)[0] for each in (True, False))
    for found, wanted in zip(device, host, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6 if master == "fp32" else 1e-4)


def update_of_gradients(mesh: Mesh, spec: RunSpec, value: float) -> tuple[bool, bool, bool, int]:
    """(applied, parameters are as before, moments are, updates) of a step with these gradients."""
    trainer = Trainer(spec, mesh)
    trainer.initialise()
    sums = sums_of_infinite_gradients(trainer)
    for unit in trainer.states.units:
        unit.set_gradient(torch.full_like(unit.stored, value))
    before = [unit.stored.clone() for unit in trainer.states.units]
    done = trainer.apply(sums, 1)
    same = all(map(torch.equal, before, (unit.stored for unit in trainer.states.units)))
    still = not any(flat.any() for flats in trainer.optimiser.moments.values() for flat in flats)
    return done.applied, same, still, trainer.optimiser.updates


def test_what_the_device_skips_the_host_takes_only_if_the_norm_is_finite_after_all(ranks: Ranks) -> None:
    spec = spec_of(BASE, train__warmup_steps=0)
    assert ranks.run(spec.layout, update_of_gradients, spec, math.nan)[0] == (False, True, True, 0)
    # Each element is finite, but the norm of a row is beyond fp32.
    assert ranks.run(spec.layout, update_of_gradients, spec, 3e38)[0] == (True, False, False, 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_norms_of_parts_are_those_of_all_elements(dtype: torch.dtype) -> None:
    flats = [torch.randn(size, dtype=dtype) for size in (0, 1, 1023, 1024, 5000, 2048)]
    wanted = torch.cat(flats).double().square().sum()
    for exact in (False, True):
        torch.testing.assert_close(sum_of_squares(norms(flats, exact), CPU), wanted, rtol=1e-6, atol=0)
    in_one_kernel = torch._foreach_norm(flats, 2, dtype=torch.float64)  # what a GPU runs
    torch.testing.assert_close(sum_of_squares([torch.stack(in_one_kernel)], CPU), wanted, rtol=1e-12, atol=0)
    assert sum_of_squares(norms([]), CPU) == 0


class Copies(TorchDispatchMode):
    """Counts copies to another device, and those that the host waits for."""

    def __init__(self) -> None:
        super().__init__()
        self.all = self.waited_for = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._to_copy.default:
            self.all += 1
            self.waited_for += not (kwargs or {}).get("non_blocking", False)
        return func(*args, **(kwargs or {}))


def copies_of_a_batch(mesh: Mesh, spec: RunSpec) -> tuple[int, int, int]:
    """Microbatches of a batch, its tensors that are copied, and those that the host waits for."""
    (batch,) = first_batches(spec, mesh, 1)
    with Copies() as copies:
        micros = list(microbatches(batch, 1, torch.device("meta")))
    assert {each.documents.device.type for each in micros} == {"cpu"}
    return len(micros), copies.all, copies.waited_for


def test_a_device_is_sent_three_tensors_of_a_batch_at_once(ranks: Ranks) -> None:
    spec = spec_of(BASE)
    assert ranks.run(spec.layout, copies_of_a_batch, spec)[0] == (4, 3, 0)


def batches_ahead(mesh: Mesh, spec: RunSpec) -> list[bool]:
    """For each step, if its batch was on the device before it began."""
    trainer = Trainer(spec, mesh)
    trainer.initialise()
    batches, ahead = first_batches(spec, mesh, 3), []
    for number, batch in enumerate(batches, start=1):
        ahead.append(trainer._ahead is not None and trainer._ahead[0] is batch)
        trainer.step(batch, number, batches[number] if number < 3 else None)
    assert trainer._ahead is None
    return ahead


def test_a_batch_is_on_the_device_before_its_step(ranks: Ranks) -> None:
    assert ranks.run((spec := spec_of(BASE)).layout, batches_ahead, spec)[0] == [False, True, True]


def collections_of_a_run(mesh: Mesh, spec: RunSpec, out: Path) -> list[tuple[int, int]]:
    """(steps done, generation) of each garbage collection that begins while a run trains."""
    run = open_run(spec, mesh, out, Observers([]))
    found: list[tuple[int, int]] = []

    def note(phase: str, about: dict[str, int]) -> None:
        if phase == "start" and not gc.isenabled():
            found.append((run.done, about["generation"]))
        elif phase == "start" and 0 < run.done < spec.train.last_step:
            found.append((run.done, -1))  # an automatic one

    before = gc.get_threshold()
    gc.callbacks.append(note)
    gc.set_threshold(50, 2, 2)
    try:
        with patch.multiple(garbage_collection, YOUNG=2, FULL=5):
            run.execute(None)
        assert gc.isenabled()
    finally:
        gc.set_threshold(*before)
        gc.callbacks.remove(note)
    return found


def test_all_ranks_collect_garbage_after_the_same_steps_and_in_none(ranks: Ranks, tmp_path: Path) -> None:
    spec = spec_of(BASE, layout__dp=2, train__steps=6)
    found = ranks.run(spec.layout, collections_of_a_run, spec, tmp_path)
    assert found == [[(1, 2), (2, 1), (4, 1), (5, 2), (6, 1)]] * 2
