"""Recipes of low precision in plans of this program, whose casts are not fused: they save no time yet."""

from __future__ import annotations

import pytest

from meshwright.hardware.find import cluster
from meshwright.planner.cost.model import CostModel
from meshwright.planner.cost.step import step_time
from meshwright.spec import RunSpec, load
from meshwright.spec.errors import UserError


def run(recipe: str, **flags: str) -> RunSpec:
    given = {
        "model.preset": "llama3-8b", "precision.compute": recipe, "data.seq_len": "8192",
        "train.batch_tokens": "524288", "layout.dp": "16", "layout.zero": "3", "layout.micro_batch": "1",
    }  # fmt: skip
    return load(None, [*(given | {key.replace("__", "."): value for key, value in flags.items()}).items()])


def seconds(spec: RunSpec, name: str) -> float:
    return step_time(spec, CostModel(cluster(name, 16))).seconds


def test_casts_that_are_not_fused_cost_more_than_kernels_save() -> None:
    plain = seconds(run("bf16"), "b200")
    found = [seconds(run(recipe), "b200") for recipe in ("fp8", "fp8-blockwise", "mxfp8", "nvfp4")]
    assert found == sorted(found) and plain < found[0] and found[1] == found[2]
    assert found[-1] < 3 * plain


@pytest.mark.parametrize(("name", "recipe"), [("a100", "fp8"), ("h100", "mxfp8"), ("h100", "nvfp4")])
def test_a_gpu_without_the_format_is_told(name: str, recipe: str) -> None:
    with pytest.raises(UserError, match=rf"^precision.compute: '{recipe}' has no kernels on .*; try bf16"):
        seconds(run(recipe), name)


def test_gathers_in_8_bits_take_less_time() -> None:
    def gathered(flag: str) -> float:
        return step_time(run("fp8", precision__fp8_gather=flag), CostModel(cluster("h100", 16))).seconds

    assert gathered("true") <= gathered("false")
