"""A batch that grows between the steps of `verify` equals one device, in float64, under every layout."""

from __future__ import annotations

from typing import Any

import pytest

from covering import marked, name
from equality import equal_to_one_device
from meshwright.comm.mesh import Mesh
from meshwright.spec import RunSpec
from meshwright.verify.narrow import narrow
from meshwright.verify.reference.batches import batch_sizes
from meshwright.verify.verify import exact, verify
from ranks import Ranks
from small import spec_of

T = 32
BASE = {
    "model.heads": 8, "model.head_dim": 4, "model.vocab_size": 61, "data.seq_len": T, "train.steps": 20,
    "train.warmup_steps": 1, "train.batch_tokens": 12 * T, "train.lr_scaling": "sqrt",
    "layout.micro_batch": 1, "train.batch_warmup": f"{4 * T}:{20 * T},{8 * T}:{99 * T}",
}  # fmt: skip
EXPERTS = {"model__moe__experts": 8, "model__moe__top_k": 2, "model__moe__ffn": 12, "layout__ep": 2,
           "model__moe__aux_loss": 0.01, "model__moe__bias": "true"}  # fmt: skip
PIPELINE = {"layout__pp": 2, "layout__dp": 2, "model__layers": 4}
CASES: list[dict[str, object]] = [
    {"layout__dp": 4},
    {"layout__dp": 4, "layout__zero": 2},
    {"layout__dp": 4, "layout__zero": 3, "layout__micro_batch": "none"},
    {"layout__dp": 2, "layout__tp": 2, "layout__zero": 1},
    {"layout__dp": 2, "layout__cp": 2, "layout__zero": 3, "recompute__policy": "full"},
    PIPELINE,
    {**PIPELINE, "layout__schedule": "interleaved", "layout__virtual": 2},
    {**PIPELINE, "layout__schedule": "zb-h1", "layout__zero": 1},
    {"layout__dp": 4, "layout__zero": 3, **EXPERTS},
    {**PIPELINE, **EXPERTS, "layout__tp": 2},
    {"layout__dp": 2, "layout__tp": 2, "precision__compute": "fp8", "model__head_dim": 16,
     "model__ffn": 64, "model__kv_heads": 4},
]  # fmt: skip


QUICK = [CASES[number] for number in (4, 7)]
"""Data, context and pipeline ranks."""


@pytest.mark.parametrize("case", marked(CASES, QUICK), ids=name)
def test_a_growing_batch_equals_one_device(ranks: Ranks, case: dict[str, object]) -> None:
    spec = spec_of(BASE, **case)
    assert [exact(spec, 2).train.batch_of_step(step) // T for step in range(1, 4)] == [4, 12, 12]
    assert "step 2 exp_avg_sq" in equal_to_one_device(ranks, spec, 1e-9)


def test_each_step_of_a_check_has_a_stage(ranks: Ranks) -> None:
    spec = spec_of(BASE, **PIPELINE)
    assert [exact(spec, 4).train.batch_of_step(step) // T for step in range(1, 5)] == [4, 8, 12, 12]
    found = ranks.run(spec.layout, of_steps, spec, 4)[0]
    assert found is not None and found["equal"] and found["worst_relative"] < 1e-9
    assert {row["kind"] for row in found["rows"]} >= {f"step {step} samples" for step in range(1, 5)}


def of_steps(mesh: Mesh, spec: RunSpec, steps: int) -> dict[str, Any] | None:
    return verify(spec, mesh, steps)


def sizes(spec: RunSpec, count: int) -> list[int]:
    found = batch_sizes(spec.train)
    return [next(found) for _ in range(count)]


@pytest.mark.parametrize("pp", [1, 4])
def test_a_narrowed_run_keeps_a_warm_up(pp: int) -> None:
    warmup = f"{64 * 8 * 512}:{10**9},{128 * 8 * 512}:{10**10}"
    spec = spec_of(
        {"model.layers": 32, "model.hidden": 2048, "model.ffn": 8192, "model.heads": 16, "model.kv_heads": 8},
        model__head_dim=128, train__batch_tokens=512 * 8 * 512, train__batch_warmup=warmup, layout__dp=8,
        layout__pp=pp, layout__micro_batch=1,
    )  # fmt: skip
    small, note = narrow(exact(spec, 3))
    assert note is not None and small.train.batch_tokens < spec.train.batch_tokens
    first, second, third, fourth = sizes(small, 4)
    assert first < second < third == fourth == small.train.batch_tokens
    counts = [small.at_step(step).microbatches for step in (1, 2, 3)]
    assert [count % pp for count in counts] == [count % pp for count in (64, 128, 512)]
