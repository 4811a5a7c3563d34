"""Plans of runs with a quantised base: states of a dry run, and bounds that no layout is below."""

from __future__ import annotations

from typing import Any

import pytest

from covering import some
from gpu_loss import rehearsed
from meshwright.hardware.find import cluster
from meshwright.planner.cost.model import CostModel
from meshwright.planner.cost.stages import model_contents
from meshwright.planner.memory.exact import memory_model
from meshwright.planner.memory.states import states, units
from meshwright.planner.rank_view import place_of
from meshwright.spec import RunSpec
from meshwright.spec.lora import BASE_BITS

MODEL = {
    "preset": "tiny",
    "layers": 4,
    "hidden": 256,
    "ffn": 768,
    "heads": 4,
    "kv_heads": 2,
    "vocab_size": 512,
}
FORMS = list(BASE_BITS)


def spec_of(form: str = "nf4", **sections: dict[str, Any]) -> RunSpec:
    given: dict[str, Any] = {"model": MODEL, "data": {"seq_len": 256}, "precision": {"compute": "bf16"}}
    given |= {"train": {"batch_tokens": 16 * 256}, "lora": {"rank": 8, "quantise": form}}
    return RunSpec.model_validate(given | sections)


LAYOUTS: list[dict[str, Any]] = [
    {},
    {"layout": {"dp": 4, "zero": 3}},
    {"layout": {"dp": 2, "zero": 1}, "lora": {"quantise": "int8"}},
    {"layout": {"tp": 2}, "lora": {"quantise": "int4"}},
    {"layout": {"tp": 2, "pp": 2}},
    {"layout": {"pp": 2, "dp": 2, "zero": 2}},
]


@pytest.mark.parametrize("sections", some(LAYOUTS, LAYOUTS[2:5]), ids=str)
def test_states_and_the_peak_are_those_of_a_dry_run(sections: dict[str, Any]) -> None:
    spec = spec_of(**sections)
    found = rehearsed(spec)
    assert found.states == states(spec, 0).total
    assert found.most["buffers"] < 0.5 * 2 * spec.model.parameters  # one block at a time is dequantised
    if spec.layout.pp == 1:
        planned = memory_model(CostModel(cluster("h100", spec.layout.world_size))).in_step(spec)[0]
        assert planned.allocated == pytest.approx(found.peak, rel=0.04)


@pytest.mark.parametrize("form", FORMS)
def test_a_base_takes_its_bits_and_a_scale_for_each_block(form: str) -> None:
    spec = spec_of(form)
    whole = states(spec_of("none"), 0)
    base = sum(unit.part for unit in units(place_of(spec, 0)) if unit.quantised)
    assert base > 0.9 * (whole.parameters / 2 - 2 * 512 * 256)
    saved = base * 2 - (base * BASE_BITS[form] // 8 + base // 64 * 2)
    assert whole.total - states(spec, 0).total == saved


@pytest.mark.parametrize("sections", LAYOUTS, ids=str)
def test_no_layout_needs_less_than_its_lower_bound(sections: dict[str, Any]) -> None:
    spec = spec_of(**sections)
    on = CostModel(cluster("h100", spec.layout.world_size))
    memory = memory_model(on)
    exact, blocks = memory.peak(spec).device, on.blocks(spec)
    bound = memory.lower_bound(spec, blocks, model_contents(spec)).device
    assert 0.5 * exact < bound <= exact
