"""Predictions of runs on pairs of answers: states, messages and the peak are those of dry runs, and forwards
ahead of a step are counted in its time and its FLOPs."""

from __future__ import annotations

from dataclasses import astuple
from typing import Any

import pytest
import torch

from covering import some
from meshwright import api
from meshwright.comm.mesh import Mesh
from meshwright.dryrun.rank_step import ACTIVATIONS, STATES, rehearse
from meshwright.hardware.find import cluster
from meshwright.planner.cost.model import CostModel
from meshwright.planner.cost.step import step_time
from meshwright.planner.memory.exact import memory_model
from meshwright.planner.memory.in_flight import peak_activations
from meshwright.planner.memory.states import states
from meshwright.planner.traffic.messages import traffic
from meshwright.spec import RunSpec, UserError
from meshwright.spec.training_flops import flops_per_token
from ranks import Ranks
from small import after_a_step, spec_of

BASE: dict[str, object] = {
    "model.layers": 2, "model.hidden": 64, "model.ffn": 192, "model.heads": 8, "model.kv_heads": 4,
    "data.corpus": "synthetic", "data.seq_len": 128, "train.batch_tokens": 128 * 8, "layout.micro_batch": 2,
    "precision.compute": "bf16",
}  # fmt: skip
DPO: dict[str, object] = {"preference.loss": "dpo", "lora.rank": 4}
SIMPO: dict[str, object] = {"preference.loss": "simpo"}
MOE: dict[str, object] = {"model.moe.experts": 4, "model.moe.top_k": 2, "model.moe.ffn": 32}
CASES: list[tuple[dict[str, object], dict[str, object]]] = [
    (DPO, {"dp": 2, "zero": 3}),
    (DPO, {"tp": 2, "cp": 2}),
    (DPO, {"pp": 2, "schedule": "zb-h1", "dp": 2, "zero": 3}),
    (DPO | MOE, {"ep": 2, "dp": 2, "tp": 2}),
    (SIMPO, {"tp": 2, "dp": 2, "zero": 2}),
]


def run_of(how: dict[str, object], layout: dict[str, object], **flags: object) -> RunSpec:
    return spec_of(BASE | how, **{f"layout__{key}": value for key, value in layout.items()}, **flags)


@pytest.mark.parametrize(("how", "layout"), some(CASES, CASES[1:4]), ids=str)
def test_formulas_hold_of_pairs(how: dict[str, object], layout: dict[str, object]) -> None:
    spec = run_of(how, layout)
    for place in {0, spec.layout.pp - 1}:
        found = rehearse(spec, place * spec.layout.strides["pp"], torch.device("cpu"))
        planned = dict(zip(STATES, astuple(states(spec, place)), strict=True))
        assert {kind: found.most[kind] for kind in STATES} == planned
        assert found.wire == pytest.approx(traffic(spec, place), rel=1e-12)
        assert found.most[ACTIVATIONS] == pytest.approx(peak_activations(spec, place), rel=0.06)


def one_step(mesh: Mesh, spec: RunSpec) -> dict[Any, float]:
    """Bytes that a rank sends in a step."""
    after_a_step(spec, mesh)
    return dict(mesh.wire.bytes)


@pytest.mark.parametrize("layout", [{"pp": 2, "cp": 2}, {"dp": 2, "zero": 3, "tp": 2}], ids=str)
def test_ranks_send_what_is_planned(ranks: Ranks, layout: dict[str, object]) -> None:
    spec = run_of(DPO, layout)
    found = ranks.run(spec.layout, one_step, spec)
    for rank, sent in enumerate(found):
        place = rank // spec.layout.strides["pp"] % spec.layout.pp
        assert sent == pytest.approx(traffic(spec, place), rel=1e-12)


@pytest.mark.parametrize("how", [DPO, SIMPO], ids=["dpo", "simpo"])
def test_a_plan_has_the_peak_of_a_dry_run(how: dict[str, object]) -> None:
    larger = {"model__hidden": 128, "model__ffn": 384, "model__vocab_size": 2000}
    spec = run_of(how, {"dp": 2, "zero": 2}, **larger)
    (planned,) = memory_model(CostModel(cluster("cpu", 2))).ranks(spec)
    assert planned.allocated == pytest.approx(rehearse(spec, 0, torch.device("cpu")).peak, rel=0.04)


@pytest.mark.parametrize("layout", [{}, {"dp": 2, "zero": 3}, {"pp": 2}], ids=str)
def test_a_forward_ahead_takes_its_time(layout: dict[str, object]) -> None:
    """A step with a reference is longer than one without by a forward of the model without adapters."""
    spec = run_of(DPO, layout)
    costs = CostModel(cluster("h100", spec.layout.world_size))
    with_reference = step_time(spec, costs)
    without = step_time(run_of({**SIMPO, "lora.rank": 4}, layout), costs)
    ahead = with_reference.parts["forwards ahead"]
    assert without.parts["forwards ahead"] == 0 < ahead
    assert with_reference.seconds == pytest.approx(without.seconds + ahead, rel=1e-9)
    work = with_reference.ranks[with_reference.rank].work.forward.total
    assert 0.5 * work < ahead < 1.6 * work
    assert flops_per_token(spec) - flops_per_token(run_of({**SIMPO, "lora.rank": 4}, layout)) == (
        spec.model.forward_flops(spec.data.seq_len)
    )


def test_the_verbs_take_pairs() -> None:
    spec = run_of(DPO, {"dp": 2})
    assert api.plan(spec, "h100", gpus=2, top=1).best.step_seconds > 0
    assert api.dryrun(spec)["ranks"]
    assert api.explain(spec, cluster="h100").time
    with pytest.raises(UserError, match="preference: simulate draws the passes of the schedule alone"):
        api.simulate(spec)
    assert api.simulate(run_of(SIMPO, {"pp": 2}))
