"""Weights in bf16 that are rounded stochastically equal one device under every layout, draw by draw."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest
import torch

from covering import marked, name
from equality import equal_to_one_device
from meshwright.comm.mesh import Mesh
from meshwright.optim.stochastic_rounding import StoredRows, chunks_of, draws, round_
from meshwright.parallel.flat_param import ParamSlot
from meshwright.spec import RunSpec
from meshwright.spec.errors import UserError
from meshwright.train.digest import parameters_sha256
from meshwright.train.guard.vote import Vote
from meshwright.train.step import Trainer
from meshwright.verify.reference.rounding import stochastic
from meshwright.verify.reference.weights import initial_weights
from optimiser_cases import BASE, LAYOUTS
from ranks import Ranks
from small import first_batches, spec_of

BF16: dict[str, object] = {
    "precision.compute": "bf16", "precision.master": "bf16", "data.corpus": "synthetic",
}  # fmt: skip
ODD = {"model__hidden": 24, "model__head_dim": 6, "model__ffn": 44}
LOW = {
    "precision__compute": "mxfp8", "model__hidden": 32, "model__ffn": 64, "model__head_dim": 32,
    "model__heads": 4,
}  # fmt: skip
CASES: list[dict[str, object]] = [
    *({"train__optimiser": "adamw", **layout} for layout in LAYOUTS),
    *({"train__optimiser": "adamw8bit", **layout} for layout in LAYOUTS[1:12:2]),
    *({"train__optimiser": "lion", **layout} for layout in LAYOUTS[2:8:2]),
    *({"train__optimiser": "muon", **layout} for layout in LAYOUTS[3:12:3]),
    {"layout__dp": 4, "layout__zero": 3, **ODD},
    {"layout__tp": 4, **ODD},
    {"layout__dp": 2, "layout__zero": 1, **LOW},
]


QUICK = [CASES[number] for number in (15, 20, 28)]
"""Three optimisers; `test_precision_run.py` has more."""


@pytest.mark.parametrize("case", marked(CASES, QUICK), ids=name)
def test_rounded_weights_equal_one_device(ranks: Ranks, case: dict[str, object]) -> None:
    kinds = equal_to_one_device(ranks, spec_of(BASE | BF16, **case), 1e-9)
    assert "step 2 parameter" in kinds


def slot(shape: tuple[int, ...], offset: tuple[int, ...], part: tuple[int, ...]) -> ParamSlot:
    """A rank's part of a parameter, of which only the place matters here."""

    size = int(np.prod(part))
    return cast(
        ParamSlot, SimpleNamespace(key="w", global_shape=shape, offset=offset, part=part, padded=size)
    )


@pytest.mark.parametrize("shape", [(37,), (9, 10), (3, 7, 13), (5, 8)])
def test_draws_do_not_depend_on_how_a_parameter_is_cut(shape: tuple[int, ...]) -> None:
    cpu = torch.device("cpu")

    def drawn(offset: tuple[int, ...], part: tuple[int, ...], most: int) -> torch.Tensor:
        found = [draws(chunk, 5, 7, cpu) for chunk in chunks_of([slot(shape, offset, part)], most)]
        return torch.cat(found).view(part)

    whole = drawn((0,) * len(shape), shape, 10**6)
    for dim, size in enumerate(shape):
        for first in range(size):
            offset = tuple(first if each == dim else 0 for each in range(len(shape)))
            part = tuple(size - first if each == dim else n for each, n in enumerate(shape))
            assert torch.equal(drawn(offset, part, 11), whole.narrow(dim, first, size - first))


def test_draws_are_uniform_and_each_elements_own() -> None:
    shape, cpu = (512, 512), torch.device("cpu")
    rows = [StoredRows(slot(shape, (0, 0), shape), 0, shape[0])]
    tables = [draws(rows, 3, update, cpu).view(shape).double() / 2**16 for update in (1, 2)]
    count = tables[0].numel()
    for table in tables:
        assert abs(float(table.mean()) - 0.5) < 5 / (12 * count) ** 0.5
        cells = torch.histc(table, 256, 0, 1)
        chi = float(((cells - count / 256) ** 2 / (count / 256)).sum())
        assert abs(chi - 255) < 5 * (2 * 255) ** 0.5
    centred = [table - 0.5 for table in tables]
    pairs = [
        (centred[0], centred[1]),
        *((centred[0], centred[0].roll(by, dim)) for dim in (0, 1) for by in (1, 2, 3, 4, 5, 8)),
    ]
    for one, other in pairs:
        assert abs(float((one * other).mean()) * 12) < 5 / count**0.5


def test_rounding_is_unbiased_and_to_neighbours() -> None:
    shape, cpu = (64, 1024), torch.device("cpu")
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(shape, generator=generator)
    rows, sums, times = [StoredRows(slot(shape, (0, 0), shape), 0, shape[0])], torch.zeros(shape).double(), 64
    for update in range(times):
        rounded = round_(start.clone().view(-1), draws(rows, 0, update, cpu)).view(shape)
        assert torch.equal(rounded, rounded.bfloat16().float())
        sums += rounded
    gap = 2.0 ** (torch.frexp(start.double()).exponent.double() - 8)
    off = (sums / times - start) / gap
    assert float((rounded.double() - start).abs().div(gap).max()) < 1
    assert abs(float(off.mean())) < 5 * 0.5 / (off.numel() * times) ** 0.5
    assert float(off.abs().max()) < 6 * 0.5 / times**0.5


def test_what_is_not_finite_stays_so() -> None:
    bits = torch.tensor([0x7FFFFFFF, -1, 0x7F800000, -0x800000, 0x7FC00000], dtype=torch.int32)
    rounded = round_(bits.view(torch.float32), torch.full((5,), 0xFFFF, dtype=torch.int32))
    assert not rounded.isfinite().any()


@pytest.mark.parametrize("shape", [(37,), (9, 10), (3, 7, 13)])
def test_both_formats_round_as_the_reference_does(shape: tuple[int, ...]) -> None:
    rows = [StoredRows(slot(shape, (0,) * len(shape), shape), 0, int(np.prod(shape[:-1])))]
    values = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    wanted = stochastic(values, 4, 9, "w")
    for dtype in (torch.float32, torch.float64):
        found = round_(values.to(dtype).view(-1).clone(), draws(rows, 4, 9, torch.device("cpu")))
        assert torch.equal(found.double().view(shape), wanted)
    assert not torch.equal(wanted, values.double())


def trained(mesh: Mesh, spec: RunSpec) -> tuple[str, str, object, set[str]]:
    trainer = Trainer(spec, mesh)
    trainer.initialise()
    first = parameters_sha256(trainer)
    for number, batch in enumerate(first_batches(spec, mesh, 2), 1):
        trainer.step(batch, number)
    kept = {str(tensor.dtype) for _, tensor in trainer.states.parameters()}
    return first, parameters_sha256(trainer), Vote(trainer)(), kept


def test_replicas_stay_equal_and_weights_are_bf16(ranks: Ranks) -> None:
    starts = set()
    for layout in ({"layout__dp": 4}, {"layout__dp": 2, "layout__replicate": 2, "layout__zero": 3}):
        spec = spec_of(BASE | BF16, **layout)
        found = ranks.run(spec.layout, trained, spec)
        assert all(divergence is None for _, _, divergence, _ in found)
        assert found[0][3] == {"torch.bfloat16"} and len({after for _, after, _, _ in found}) == 1
        starts.add(found[0][0])
    assert len(starts) == 1


def test_initial_weights_are_the_references(ranks: Ranks) -> None:
    spec = spec_of(BASE | BF16)
    (found,) = ranks.run(spec.layout, initial, spec)
    wanted = initial_weights(spec.model, spec.train.seed, "bf16")
    assert all(torch.equal(found[key].double(), wanted[key]) for key in wanted)


def initial(mesh: Mesh, spec: RunSpec) -> dict[str, torch.Tensor]:
    trainer = Trainer(spec, mesh)
    trainer.initialise()
    return {key: tensor.to_local().clone() for key, tensor in trainer.states.parameters()}  # type: ignore[union-attr]


@pytest.mark.parametrize("compute", ["fp32", "fp16"])
def test_wider_computation_is_refused(compute: str) -> None:
    with pytest.raises(UserError, match=r"precision.master: 'bf16' does not go with precision.compute"):
        spec_of(BASE, precision__compute=compute, precision__master="bf16")
