"""The calls of a step are the planner's messages, one by one, and its bytes their sums, on every axis."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import cycle, product
from math import prod
from typing import Any
from unittest.mock import patch

import pytest

from covering import covered, marked, some
from meshwright.comm.mesh import Mesh
from meshwright.parallel.expert_parallel import AllToAllDispatcher, BoundedDispatcher
from meshwright.planner.traffic.layer_messages import Copies
from meshwright.planner.traffic.messages import messages, traffic
from meshwright.spec import RunSpec
from meshwright.train.step import Trainer
from ranks import Ranks
from small import first_batches, spec_of

BASE = {"model.vocab_size": 61, "data.corpus": "synthetic", "data.seq_len": 16, "layout.micro_batch": 2}
"""Nothing divides 61 rows, so that padding counts."""
MICROBATCHES = 3  # the first, one within, the last: all that may differ in what they send


Call = tuple[str, str, float]
"""(axis, operation, bytes)."""


@contextmanager
def counted_copies() -> Iterator[list[Copies]]:
    """The copies of tokens of each first dispatch to experts on other ranks."""
    found: list[Copies] = []
    settled = {kind: kind._plan for kind in (AllToAllDispatcher, BoundedDispatcher)}

    def count(trip: AllToAllDispatcher, *args: Any) -> None:
        settled[type(trip)](trip, *args)
        if not trip._cache.recomputing:
            here = trip._axis.rank
            found.append(
                Copies(
                    *(
                        float(sum(by_rank[:here] + by_rank[here + 1 :]))
                        for by_rank in (trip._sent_rows, trip._received_rows)
                    )
                )
            )

    with patch.object(AllToAllDispatcher, "_plan", count), patch.object(BoundedDispatcher, "_plan", count):
        yield found


def one_step(mesh: Mesh, spec: RunSpec) -> tuple[list[Call], list[Copies]]:
    """The calls of one step on this rank, and its dispatches."""
    trainer = Trainer(spec, mesh)
    trainer.initialise()
    (batch,) = first_batches(spec, mesh, 1)
    trainer.expect(batch)
    trainer.buffers.assume(1)  # what has no room is let go: messages are as large without it
    mesh.wire.clear()
    mesh.wire.log = []
    with counted_copies() as copies:
        trainer.step(batch, 1)
    return mesh.wire.log, copies


def multiset(calls: Iterable[tuple[str, str, float, float]]) -> dict[str, Counter[float]]:
    """'axis operation' -> bytes of a call -> number of such calls, of (axis, operation, bytes, number).

    Bytes are fractions of whole numbers, so a thousandth of one tells calls apart.
    """
    found: dict[str, Counter[float]] = {}
    for axis, operation, sent, count in calls:
        found.setdefault(f"{axis} {operation}", Counter())[round(sent, 3)] += count
    return found


def spec_for(base: dict[str, object], **flags: object) -> RunSpec:
    """A run of as many sequences a step as give each rank its microbatches."""
    data_ranks = prod(int(str(flags.get(f"layout__{axis}", 1))) for axis in ("dp", "replicate"))
    return spec_of(base, **flags, train__batch_tokens=16 * 2 * MICROBATCHES * data_ranks)


def equal_bytes(ranks: Ranks, base: dict[str, object], **flags: object) -> None:
    spec = spec_for(base, **flags)
    assert spec.microbatches == MICROBATCHES
    for rank, (calls, copies) in enumerate(ranks.run(spec.layout, one_step, spec)):
        stage = rank * spec.layout.pp // spec.layout.world_size
        listed = messages(spec, stage, copies, on_cpu=True)
        recorded = multiset((*call, 1) for call in calls)
        assert recorded == multiset((m.axis, m.operation, m.sent, m.count) for m in listed)
        sums: Counter[tuple[str, str]] = Counter()
        for axis, operation, sent in calls:
            sums[axis, operation] += sent
        assert sums == pytest.approx(traffic(spec, stage, copies), rel=1e-14)


POLICIES = ["none", "full", "selective"]
DATA: list[dict[str, object]] = [
    {"layout__dp": dp, "layout__zero": zero, "layout__replicate": replicate, "precision__compute": compute}
    for (dp, zero, replicate), compute in product(
        [(4, 0, 1), (4, 1, 1), (4, 2, 1), (4, 3, 1), (2, 2, 2), (2, 3, 2), (1, 1, 1), (1, 2, 3), (3, 3, 1)],
        ["fp32", "bf16", "fp64"],
    )
]


@pytest.mark.parametrize("flags", covered(DATA))
def test_bytes_of_the_data_axes(ranks: Ranks, flags: dict[str, object]) -> None:
    equal_bytes(ranks, BASE, **flags)


TENSOR: list[dict[str, object]] = [
    {
        "layout__tp": tp, "model__kv_heads": kv_heads, "layout__dp": dp, "layout__zero": zero,
        "layout__sequence_parallel": sequence, "recompute__policy": recompute, "model__tied": tied,
    }
    for (tp, kv_heads, dp, zero), sequence, recompute, tied in product(
        [(2, 2, 1, 0), (4, 1, 2, 3), (4, 2, 2, 1)], ["true", "false"], POLICIES, ["true", "false"]
    )
]  # fmt: skip


@pytest.mark.parametrize("flags", covered(TENSOR))
def test_bytes_of_the_tensor_axis(ranks: Ranks, flags: dict[str, object]) -> None:
    equal_bytes(ranks, BASE, **flags, model__qk_norm=flags["model__tied"], precision__compute="bf16")


LATENTS = {
    "model__head_dim": 12, "model__kv_heads": 4, "model__mla__q_rank": 16, "model__mla__kv_rank": 8,
    "model__mla__rope_dim": 4, "model__mla__v_dim": 6,
}  # fmt: skip


LATENT_CASES: list[dict[str, object]] = [
    {"layout__sequence_parallel": sequence, "recompute__policy": recompute, "model__mla__q_rank": q_rank}
    for sequence, recompute, q_rank in product(["true", "false"], POLICIES, [16, "none"])
]


@pytest.mark.parametrize("case", covered(LATENT_CASES))
def test_bytes_of_latents(ranks: Ranks, case: dict[str, object]) -> None:
    flags = {"layout__tp": 2, "layout__dp": 2, "layout__zero": 3, "precision__compute": "bf16"}
    equal_bytes(ranks, BASE, **(LATENTS | flags | case))


@pytest.mark.parametrize("recompute", ["none", "selective"])
@pytest.mark.parametrize("mode", ["ring", "gather", "ulysses"])
def test_bytes_of_latents_over_context_ranks(ranks: Ranks, mode: str, recompute: str) -> None:
    flags = {
        "layout__tp": 2, "layout__cp": 2, "layout__context_mode": mode,
        "recompute__policy": recompute,
    }  # fmt: skip
    equal_bytes(ranks, BASE, **LATENTS, **flags)


CONTEXT: list[dict[str, object]] = [
    {
        "layout__context_mode": mode, "model__kv_heads": kv_heads, "precision__compute": compute,
        "recompute__policy": recompute,
    }
    for (mode, kv_heads), compute, recompute in product(
        [("ring", 4), ("gather", 4), ("ulysses", 4), ("ring+ulysses", 4), ("ring", 1), ("gather", 2)],
        ["fp64", "bf16"],
        POLICIES,
    )
]  # fmt: skip


@pytest.mark.parametrize("flags", covered(CONTEXT))
def test_bytes_of_the_context_axis(ranks: Ranks, flags: dict[str, object]) -> None:
    equal_bytes(ranks, BASE, **flags, layout__cp=4, layout__zero=3)


@pytest.mark.parametrize(
    ("mode", "save"),
    some(
        product(("ring", "ulysses"), ("matmul", "attention")), [("ring", "matmul"), ("ulysses", "attention")]
    ),
)
def test_bytes_of_all_axes_together(ranks: Ranks, mode: str, save: str) -> None:
    flags = {
        "layout__tp": 2, "layout__cp": 2, "layout__dp": 2, "layout__zero": 2,
        "layout__context_mode": mode, "model__kv_heads": 4, "recompute__save": save,
    }  # fmt: skip
    equal_bytes(ranks, BASE, **flags)


PIPELINES: list[dict[str, object]] = [
    {"layout__schedule": schedule, "layout__pp": pp, "layout__zero": zero, "model__tied": tied}
    for schedule, (pp, zero, tied) in product(
        ["gpipe", "1f1b", "interleaved", "zb-h1", "zb-v", "dualpipe-v"],
        [(2, 0, "true"), (2, 3, "false"), (4, 1, "false"), (4, 2, "true")],
    )
]
QUICK = [
    case for number, case in enumerate(PIPELINES) if number % 4 in (number // 4 % 2, 3 - number // 4 % 2)
]
"""Each schedule with both numbers of stages, tied and not."""


@pytest.mark.parametrize("case", marked(PIPELINES, QUICK))
def test_bytes_of_the_pipeline_axis(ranks: Ranks, case: dict[str, object]) -> None:
    equal_bytes(ranks, BASE, **case, layout__dp=2, model__layers=6)


WITH_OTHERS: list[dict[str, object]] = [
    {**axes, "layout__schedule": schedule}
    for axes in ({"layout__tp": 4}, {"layout__tp": 2, "layout__cp": 2}, {"layout__tp": 2, **LATENTS})
    for schedule in ("1f1b", "zb-v")
]


@pytest.mark.parametrize("case", marked(WITH_OTHERS, [WITH_OTHERS[place] for place in (0, 3, 5)]))
def test_bytes_of_the_pipeline_and_others(ranks: Ranks, case: dict[str, object]) -> None:
    flags = {
        "layout__pp": 2, "model__tied": "true", "recompute__policy": "selective",
        "precision__compute": "bf16", "model__layers": 5,
    }  # fmt: skip
    equal_bytes(ranks, BASE, **flags, **case)


MOE = BASE | {
    "model.layers": 3, "model.moe.experts": 8, "model.moe.top_k": 3, "model.moe.ffn": 12,
    "model.moe.shared_ffn": 24, "model.moe.aux_loss": 0.01, "model.moe.dense_first": 1,
}  # fmt: skip
BARE = {"model__moe__shared_ffn": 0, "model__moe__aux_loss": 0.0, "model__moe__dense_first": 0}
EXPERTS: list[dict[str, object]] = [
    {"dp": 4, "ep": 4},
    {"dp": 4, "ep": 2, "zero": 1},
    {"dp": 4, "ep": 4, "zero": 2} | BARE,
    {"dp": 4, "ep": 2, "zero": 3},
    {"dp": 4, "zero": 3, "model__tied": "true"},
    {"dp": 2, "replicate": 2, "ep": 2, "zero": 3},
    {"dp": 2, "replicate": 2, "ep": 1, "zero": 2, "tp": 2},
    {"replicate": 2, "tp": 2, "zero": 3},
    {"tp": 4, "zero": 2},
    {"tp": 4, "ep": 2, "zero": 3, "model__kv_heads": 4, "sequence_parallel": "false"},
    {"tp": 2, "ep": 2, "sequence_parallel": "false"} | BARE,
    {"dp": 2, "etp": 2, "zero": 1},
    {"dp": 2, "tp": 2, "ep": 2, "zero": 3, "model__moe__shared_gate": "true"},
    {"tp": 2, "ep": 2, "sequence_parallel": "false", "model__moe__shared_gate": "true"},
    {
        "dp": 2, "tp": 2, "ep": 2, "etp": 2, "zero": 3, "model__moe__expert_bias": "true",
        "model__moe__router_bias": "true",
    },
    {"dp": 2, "tp": 2, "ep": 2, "etp": 2, "zero": 2},
    {"cp": 4, "ep": 4, "model__moe__z_loss": 0.1, "model__moe__bias": "true"},
    {"cp": 2, "tp": 2, "dp": 2, "ep": 4, "zero": 2, "context_mode": "gather"},
    {"cp": 2, "dp": 2, "ep": 4, "expert_parts": 2, "model__moe__capacity_factor": 0.75},
    {"tp": 2, "dp": 2, "ep": 2, "expert_parts": 3, "model__moe__capacity_factor": 1.0} | BARE,
    {"dp": 4, "ep": 4, "expert_buffer_factor": 1.3},
    {"dp": 2, "tp": 2, "ep": 2, "etp": 2, "expert_parts": 3, "expert_buffer_factor": 1.1, "zero": 3},
    {"tp": 2, "dp": 2, "ep": 4, "expert_buffer_factor": 9, "model__moe__capacity_factor": 1.0},
    {"pp": 2, "dp": 2, "ep": 2, "zero": 2, "model__tied": "true", "stages": "1,2"},
    {"pp": 2, "tp": 2, "etp": 2, "zero": 3, "schedule": "zb-v"},
    {"pp": 2, "cp": 2, "dp": 2, "ep": 2, "zero": 1, "schedule": "zb-h1", "model__moe__every": 2},
]  # fmt: skip


BYTES_OF_EXPERTS = [*zip(EXPERTS, cycle(POLICIES))]
QUICK_EXPERTS = [BYTES_OF_EXPERTS[number] for number in (1, 5, 9, 11, 16, 18, 20, 23)]
"""Each axis, each stage of ZeRO, each policy, and messages in parts and of a bounded size."""


@pytest.mark.parametrize(("axes", "recompute"), some(BYTES_OF_EXPERTS, QUICK_EXPERTS), ids=str)
def test_bytes_of_experts(ranks: Ranks, axes: dict[str, object], recompute: str) -> None:
    flags = {key if "__" in key else f"layout__{key}": value for key, value in axes.items()}
    equal_bytes(ranks, MOE, **flags, recompute__policy=recompute, precision__compute="bf16")


@pytest.mark.parametrize("axes", [axes for axes in EXPERTS if "expert_buffer_factor" in axes], ids=str)
def test_bounded_messages_are_as_large_whatever_the_routing(ranks: Ranks, axes: dict[str, object]) -> None:
    flags = {key if "__" in key else f"layout__{key}": value for key, value in axes.items()}
    spec = spec_for(MOE, **flags | {"layout__expert_buffer_factor": 9}, precision__compute="bf16")
    for calls, copies in ranks.run(spec.layout, one_step, spec):
        assert copies
        recorded = multiset((*call, 1) for call in calls)
        listed = messages(spec, on_cpu=True)
        assert recorded == multiset((m.axis, m.operation, m.sent, m.count) for m in listed)


@pytest.mark.parametrize(
    ("save", "compute"),
    [
        ("matmul", "fp64"),
        ("attention", "fp32"),
        pytest.param("matmul", "fp32", marks=pytest.mark.full),
        pytest.param("attention", "fp64", marks=pytest.mark.full),
    ],
)
def test_bytes_of_experts_by_format_and_saved_operator(ranks: Ranks, save: str, compute: str) -> None:
    flags = {
        "layout__dp": 2, "layout__tp": 2, "layout__ep": 4, "layout__zero": 3, "recompute__save": save,
        "precision__compute": compute, "model__moe__capacity_factor": 1.0,
    }  # fmt: skip
    equal_bytes(ranks, MOE, **flags)


@pytest.mark.parametrize("axes", [{"dp": 4, "ep": 2}, {"tp": 2, "dp": 2, "ep": 2, "etp": 2}], ids=str)
def test_by_default_routing_is_even(ranks: Ranks, axes: dict[str, int]) -> None:
    """The mean over all ranks of what each sends is what even routing sends, but for copies that stay."""
    flags = {f"layout__{key}": size for key, size in axes.items()}
    spec = spec_of(
        MOE, **flags, layout__micro_batch=4, train__batch_tokens=16 * 48
    )  # enough tokens for a mean
    found = [
        sum(sent for axis, _, sent in calls if axis == "expert")
        for calls, _ in ranks.run(spec.layout, one_step, spec)
    ]
    assert sum(found) / len(found) == pytest.approx(traffic(spec)["expert", "all_to_all"], rel=0.15)


def test_an_axis_of_one_rank_sends_nothing() -> None:
    assert traffic(spec_for(BASE)) == {}
    assert traffic(spec_for(MOE)) == {}


def some_steps(mesh: Mesh, spec: RunSpec) -> list[tuple[list[Call], list[Copies]]]:
    """The calls of each step of a run on this rank, and its dispatches."""
    trainer = Trainer(spec, mesh)
    trainer.initialise()
    found = []
    for number, batch in enumerate(first_batches(spec, mesh, spec.train.total_steps), 1):
        mesh.wire.log = None
        trainer.expect(batch)
        mesh.wire.log = []
        with counted_copies() as copies:
            trainer.step(batch, number)
        found.append((mesh.wire.log, copies))
    return found


ISLANDS: list[dict[str, object]] = [
    {"layout__replicate": 3, "outer__every": 2},
    {"layout__dp": 2, "layout__zero": 2, "precision__compute": "bf16"},
    {"layout__dp": 2, "layout__zero": 3, "outer__fragments": 2, "outer__delay": 2,
     "precision__compute": "fp64"},
    {"layout__tp": 2, "model__tied": "true", "outer__delay": 1},
    {"layout__pp": 2, "model__tied": "true", "outer__fragments": 2, "outer__delay": 2, "model__layers": 4},
    {"layout__pp": 2, "layout__schedule": "zb-v", "model__tied": "true", "model__layers": 4},
    {"layout__dp": 2, "layout__ep": 2, "layout__zero": 1, "model__moe__bias": "true", "outer__fragments": 3,
     "outer__every": 5},
    {"layout__replicate": 3, "layout__dp": 2, "layout__zero": 1, "outer__format": "int4",
     "outer__fragments": 2},
    {"layout__tp": 2, "outer__top_k": 0.1, "outer__format": "int8", "outer__delay": 1},
    {"layout__pp": 2, "model__tied": "true", "outer__format": "bf16", "model__layers": 4},
]  # fmt: skip


@pytest.mark.parametrize("flags", ISLANDS, ids=str)
def test_bytes_of_islands(ranks: Ranks, flags: dict[str, object]) -> None:
    """In steps with an exchange and without, and in the last one, which exchanges everything."""
    given = {"layout__replicate": 2, "outer__every": 3, "train__steps": 6, **flags}
    spec = spec_for(MOE if "layout__ep" in flags else BASE, **given)
    exchanged = []
    for rank, steps in enumerate(ranks.run(spec.layout, some_steps, spec)):
        stage = rank // spec.layout.strides["pp"] % spec.layout.pp
        for number, (calls, copies) in enumerate(steps, 1):
            listed = messages(spec, stage, copies, on_cpu=True, number=number)
            recorded = multiset((*call, 1) for call in calls)
            assert recorded == multiset((m.axis, m.operation, m.sent, m.count) for m in listed)
            exchanged.append(any(axis == "replicate" for axis, *_ in calls))
    assert {*exchanged} == {True, False}


def test_over_a_period_islands_send_the_mean() -> None:
    flags = {"layout__dp": 2, "layout__zero": 1, "outer__fragments": 2, "outer__delay": 1}
    spec = spec_for(BASE, layout__replicate=2, outer__every=4, train__steps=100, **flags)
    sums: Counter[tuple[str, str]] = Counter()
    for number in range(9, 13):
        sums.update(traffic(spec, number=number))
    assert traffic(spec) == pytest.approx({key: size / 4 for key, size in sums.items()}, rel=1e-12)
