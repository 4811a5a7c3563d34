"""When things move: communication starts before the computation that it runs beside."""

from __future__ import annotations

import gc
import math
import weakref
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from meshwright.comm.mesh import Mesh
from meshwright.kernels.gradient_accumulation_fusion import no_sum
from meshwright.parallel.flat_param import ParamSlot
from meshwright.parallel.fsdp_unit import Unit
from meshwright.spec import RunSpec
from meshwright.train.step import Trainer
from ranks import Ranks
from small import first_batches, scale_gradients, spec_of

BASE = {
    "model.layers": 3,
    "model.vocab_size": 64,
    "data.corpus": "synthetic",
    "data.seq_len": 8,
    "train.batch_tokens": 64,
    "layout.dp": 2,
}


def order_of_events(mesh: Mesh, spec: RunSpec) -> list[tuple[str, int]]:
    """("compute" | "ready" | "gather" | "reduce", unit) of one step, in order."""
    trainer = Trainer(spec, mesh)
    trainer.initialise()
    (batch,) = first_batches(spec, mesh, 1)
    trainer.step(batch, 1)
    events: list[tuple[str, int]] = []
    units = trainer.states.units

    def noted(kind: str, index: int, honest):  # type: ignore[no-untyped-def]
        def run(*args, **kwargs):  # type: ignore[no-untyped-def]
            events.append((kind, index))
            return honest(*args, **kwargs)

        return run

    for index, unit in enumerate(units):
        unit.start_gather = noted("gather", index, unit.start_gather)  # type: ignore[method-assign]
        unit.take_packed = noted("reduce", index, unit.take_packed)  # type: ignore[method-assign]
        unit.pack = noted("gradient", index, unit.pack)  # type: ignore[method-assign]
        for module in trainer.states.modules[index]:
            module.forward = noted("compute", index, module.forward)
    trainer.step(batch, 2)
    return events


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_a_unit_is_reduced_while_the_backward_goes_on(ranks: Ranks, zero: int) -> None:
    spec = spec_of(BASE, layout__zero=zero)
    for events in ranks.run(spec.layout, order_of_events, spec):
        reduced = [unit for kind, unit in events if kind == "reduce"]
        assert reduced == [4, 3, 2, 1, 0]
        for unit in (4, 3, 2, 1):
            assert events.index(("reduce", unit)) < events.index(("gradient", unit - 1))


@pytest.mark.parametrize("zero", [1, 3])
def test_a_gather_is_started_one_unit_ahead(ranks: Ranks, zero: int) -> None:
    spec = spec_of(BASE, layout__zero=zero)
    for events in ranks.run(spec.layout, order_of_events, spec):
        for unit in range(1, 5):
            assert events.index(("gather", unit)) < events.index(("compute", unit - 1))


def inner_microbatches(mesh: Mesh, spec: RunSpec) -> dict[tuple[str, str], int]:
    trainer = Trainer(spec, mesh)
    trainer.initialise()
    (batch,) = first_batches(spec, mesh, 1)
    mesh.wire.clear()
    trainer.step(batch, 1)
    return mesh.wire.calls


@pytest.mark.parametrize(("zero", "operation"), [(0, "all_reduce"), (1, "reduce_scatter")])
def test_inner_microbatches_send_no_gradients(ranks: Ranks, zero: int, operation: str) -> None:
    spec = spec_of(BASE, layout__zero=zero, layout__micro_batch=1)
    assert spec.microbatches == 4
    for calls in ranks.run(spec.layout, inner_microbatches, spec):
        assert calls["shard", operation] == 5  # one for each unit


def gradients_of_weights(mesh: Mesh, spec: RunSpec, adds: bool) -> tuple[set[str], dict[str, Tensor]]:
    """Names of the blocks' maps whose gradients are packed, not added by the products themselves; gradients
    of the second step."""
    trainer, packed, pack = Trainer(spec, mesh), set[str](), Unit.pack
    trainer.initialise()

    def noted(unit: Unit, slot: ParamSlot, grad: Tensor) -> None:
        if slot.key.startswith("blocks.") and grad.ndim > 1:
            packed.add(slot.key.split(".", 2)[2])
        pack(unit, slot, grad)

    if not adds:
        trainer.pipeline.store.gradient_sum = no_sum
    with patch.object(Unit, "pack", noted):
        for batch in first_batches(spec, mesh, 2):
            trainer.gradients(batch)
    return packed, {name: grad.full_tensor() for name, grad in trainer.states.gradients()}


ROUTER = ["mlp.router.weight"]
DENSE = [f"attn.{name}.weight" for name in "koqv"] + [f"mlp.{name}.weight" for name in ("down", "gate", "up")]


@pytest.mark.parametrize(
    ("layout", "experts", "packed"),
    [
        ({"dp": 2, "micro_batch": 4}, 0, []),
        ({"dp": 2, "micro_batch": 2}, 0, []),  # a second microbatch's products add to the first's
        ({"tp": 2, "micro_batch": 4}, 0, []),
        ({"pp": 2, "micro_batch": 2, "schedule": "zb-h1"}, 0, []),  # deferred
        ({"dp": 2, "micro_batch": 4, "zero": 3}, 0, []),
        ({"dp": 2, "micro_batch": 2, "zero": 1}, 0, []),
        ({"dp": 2, "micro_batch": 2}, 4, ROUTER),
        ({"pp": 2, "micro_batch": 2, "schedule": "zb-h1"}, 4, ROUTER),
        ({"dp": 2, "micro_batch": 2, "ep": 2, "expert_parts": 2}, 4, ROUTER),
    ],
    ids=str,
)
def test_products_add_gradients_where_they_are_packed(
    ranks: Ranks, layout: dict[str, object], experts: int, packed: list[str]
) -> None:
    moe = {"model.moe.experts": experts, "model.moe.top_k": 2, "model.moe.ffn": 16} if experts else {}
    base = BASE | moe | {"layout.dp": 1, "precision.compute": "fp64"}
    spec = spec_of(base, **{f"layout__{key}": value for key, value in layout.items()})
    plain = ranks.run(spec.layout, gradients_of_weights, spec, False)
    added = ranks.run(spec.layout, gradients_of_weights, spec, True)
    for (every, wanted), (own, found) in zip(plain, added, strict=True):
        assert sorted(own) == packed and len(every) == len(DENSE) + bool(experts)
        for name, gradient in wanted.items():
            torch.testing.assert_close(found[name], gradient, rtol=1e-12, atol=1e-14)


def memory_after_steps(mesh: Mesh, spec: RunSpec) -> tuple[dict[str, int], int, int]:
    trainer = Trainer(spec, mesh)
    trainer.initialise()
    *before, last = first_batches(spec, mesh, 3)
    for number, batch in enumerate(before, start=1):
        trainer.step(batch, number)
    sums = trainer.sums(trainer.gradients(last))
    held = trainer.states.memory()
    trainer.apply(sums, 3)
    assert trainer.states.memory()["gradients"] == held["gradients"]  # what the result tells
    return held, trainer.optimiser.memory()["optimiser"], trainer.states._bytes_of_gradients()


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_states_take_the_bytes_of_their_stage(ranks: Ranks, zero: int) -> None:
    """Rajbhandari et al. 2020; the whole table is `bench/memory.py`. All rows here divide by two."""
    spec = spec_of(BASE, layout__zero=zero, precision__compute="bf16", model__tied="false")
    count, shards = spec.model.parameters, 2 if zero else 1
    for held, optimiser, after in ranks.run(spec.layout, memory_after_steps, spec):
        assert held["parameters"] == 4 * count / shards
        assert optimiser == 8 * count / shards
        assert held["gradients"] == 4 * count / shards
        assert held["compute copies"] == (0 if zero == 3 else 2 * count)
        assert after == 0


def norms_of_large_gradients(mesh: Mesh, spec: RunSpec) -> tuple[float, float, float, float]:
    """Norms: as it is, times 1e25, with an infinity on one rank, and with one that is no number."""
    trainer = Trainer(spec, mesh)
    trainer.initialise()
    loss = trainer.gradients(first_batches(spec, mesh, 1)[0])
    states = trainer.states

    def norm() -> float:
        states._reduction.measure()
        sums = trainer.sums(loss)
        return math.sqrt(trainer._totals(sums, sums.start_read())[0].squares)

    found = [norm()]
    scale_gradients(states, 1e25)
    found.append(norm())
    for value in (math.inf, math.nan):
        if mesh.rank == mesh.world.size - 1:
            states.units[1].gradient[0] = value  # type: ignore[index]
        found.append(norm())
    small, large, infinite, none = found
    return small, large, infinite, none


@pytest.mark.parametrize("flags", [{"zero": 2}, {"dp": 1, "tp": 2}, {"dp": 1, "pp": 2}], ids=str)
def test_only_a_gradient_that_is_not_finite_has_no_finite_norm(ranks: Ranks, flags: dict[str, int]) -> None:
    """Squares of 1e25 are beyond float32, whose rows are summed first."""
    spec = spec_of(BASE, **{f"layout__{key}": value for key, value in flags.items()})
    for small, large, infinite, none in ranks.run(spec.layout, norms_of_large_gradients, spec):
        assert large == pytest.approx(1e25 * small, rel=1e-6)
        assert infinite == math.inf and math.isnan(none)


def units_that_outlive_their_trainer(mesh: Mesh, spec: RunSpec) -> int:
    trainer = Trainer(spec, mesh)
    trainer.initialise()
    (batch,) = first_batches(spec, mesh, 1)
    trainer.step(batch, 1)
    units = [weakref.ref(unit) for unit in trainer.states.units]
    del trainer
    gc.collect()
    return sum(unit() is not None for unit in units)


@pytest.mark.parametrize("zero", [0, 3])
def test_a_trainer_that_is_dropped_frees_its_parameters(ranks: Ranks, zero: int) -> None:
    spec = spec_of(BASE, layout__zero=zero)
    assert ranks.run(spec.layout, units_that_outlive_their_trainer, spec) == [0, 0]
