"""Messages of compressed exchanges: the reference's and, to the bit, equal in every layout of an island."""

from __future__ import annotations

import zlib
from typing import Any

import pytest
import torch
from torch import Tensor

from covering import marked, name
from meshwright.checkpoint.gather_full import gather_full
from meshwright.comm.mesh import Mesh
from meshwright.islands.outer import Outer
from meshwright.spec import RunSpec, UserError
from meshwright.train.step import Trainer
from meshwright.verify.reference.compression import Messages
from ranks import Ranks
from small import spec_of

BASE = {
    "model.heads": 8, "model.head_dim": 4, "model.kv_heads": 2, "model.vocab_size": 61, "data.seq_len": 32,
    "model.hidden": 36, "model.ffn": 40, "train.batch_tokens": 16 * 32, "train.steps": 2,
    "layout.replicate": 2, "outer.every": 1, "outer.delay": 0, "model.moe.experts": 4, "model.moe.top_k": 2,
    "model.moe.ffn": 24, "model.moe.dense_first": 1, "data.corpus": "synthetic",
}  # fmt: skip
FORMATS: list[dict[str, Any]] = [
    {"outer__format": form, **sparse}
    for form in ("fp32", "bf16", "int8", "int4", "fp4")
    for sparse in ({}, {"outer__top_k": 0.3})
    if form != "fp32" or sparse
]
LAYOUTS: list[dict[str, Any]] = [
    {"layout__dp": 2, "layout__zero": 3, "layout__ep": 2},
    {"layout__tp": 4, "layout__ep": 2, "layout__etp": 2},
    {"layout__pp": 2, "layout__dp": 2, "layout__zero": 1, "layout__etp": 2},
]


def moved_of(island: int, name: str, shape: tuple[int, ...], exchange: int) -> Tensor:
    """How far an island moved: halves of one number, so that many tie, with zeros of both signs."""
    draw = torch.Generator().manual_seed(zlib.crc32(f"{island} {name} {exchange}".encode()))
    halves = torch.randint(-8, 9, shape, generator=draw).float() / 2 * 1.1e-3
    halves[torch.rand(shape, generator=draw) < 0.1] = -0.0
    noise = torch.randn(shape, generator=draw) * 1e-3
    return torch.where(torch.rand(shape, generator=draw) < 0.5, halves, noise)


def sums_of(mesh: Mesh, spec: RunSpec) -> list[dict[str, Tensor]]:
    """The whole sums over islands of two exchanges after another, as the first rank of all decodes them."""
    trainer = Trainer(spec, mesh)
    outer = trainer.part(Outer)
    outer.begin()
    found = []
    for exchange in range(2):
        for unit in trainer.states.units:
            for slot in unit.slots:
                own = moved_of(mesh.replicate.rank, slot.key, slot.global_shape, exchange)
                held = unit.local(unit.stored, slot)
                for dim, (start, size) in enumerate(zip(*slot.rectangle, strict=True)):
                    within = max(0, min(size, own.shape[dim] - start))  # the rest is padding
                    own, held = (
                        own.narrow(dim, min(start, own.shape[dim]), within),
                        held.narrow(dim, 0, within),
                    )
                held.copy_(-own)
        summed = [(part, each.total()) for part, each in started(outer)]
        whole = [each for part, total in summed for each in outer._stored("sum", part, total)]
        found.append({key.removeprefix("sum/"): each for key, each in gather_full(whole, mesh).items()})
    return found


def started(outer: Any) -> Any:
    return zip(outer._parts[0], outer._start(0, 1).deltas, strict=True)


@pytest.mark.parametrize("flags", FORMATS, ids=name)
def test_messages_are_the_references(ranks: Ranks, flags: dict[str, Any]) -> None:
    spec = spec_of(BASE, **flags, outer__error_decay=0.5, precision__compute="fp64")
    messages = Messages(spec)
    for exchange, sums in enumerate(ranks.run(spec.layout, sums_of, spec)[0]):
        assert len(sums) > 20
        for key, tensor in sums.items():
            moved = [moved_of(island, key, tuple(tensor.shape), exchange).double() for island in range(2)]
            told = [messages.sent(island, key, each) for island, each in enumerate(moved)]
            torch.testing.assert_close(tensor, sum(told), rtol=0, atol=1e-16, msg=key)


@pytest.mark.parametrize("flags", marked(FORMATS, FORMATS[::2]))
def test_messages_are_equal_to_the_bit_in_every_layout(ranks: Ranks, flags: dict[str, Any]) -> None:
    spec = spec_of(BASE, **flags, outer__error_decay=0.5)
    wanted = ranks.run(spec.layout, sums_of, spec)[0]
    for layout in LAYOUTS:
        again = spec_of(BASE, **flags, **layout, outer__error_decay=0.5)
        for ours, theirs in zip(ranks.run(again.layout, sums_of, again)[0], wanted, strict=True):
            assert ours.keys() == theirs.keys()
            for key, tensor in theirs.items():
                assert torch.equal(ours[key], tensor), (layout, key)


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ({"outer__top_k": 0}, "outer.top_k"),
        ({"outer__top_k": 1.0}, "outer.top_k"),
        ({"outer__error_decay": 1.5, "outer__format": "int8"}, "outer.error_decay"),
        ({"outer__error_decay": 0.5}, "outer.error_decay: 0.5 has no effect with outer.format = 'fp32'"),
        ({"outer__format": "int2"}, "outer.format"),
        ({"outer__every": 0, "outer__format": "int8", "layout__zero": 1}, "outer.format: int8 has no effect"),
        (
            {"outer__format": "int4", "layout__tp": 3, "layout__etp": 3, "model__heads": 9, "model__ffn": 45,
             "model__moe__ffn": 33, "model__kv_heads": 3, "data__seq_len": 48, "train__batch_tokens": 768},
            "layout.etp: 3 slices of model.moe.ffn = 33 channels cut blocks of outer.format = 'int4'",
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused(flags: dict[str, Any], told: str) -> None:
    with pytest.raises(UserError) as caught:
        spec_of(BASE, **flags)
    assert told in str(caught.value)
