"""Recipes of low precision in plans of this program, whose casts are not fused: they save no time yet."""

from __future__ import annotations

from itertools import product
from statistics import fmean
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from meshwright.hardware.find import cluster
from meshwright.model.low_precision_linear import ROLES, KernelProducts, LowPrecision, Scaling, turned
from meshwright.planner.cost.model import CostModel
from meshwright.planner.cost.precision import OURS
from meshwright.planner.cost.step import step_time
from meshwright.spec import RunSpec, load
from meshwright.spec.errors import UserError
from meshwright.spec.precision import PrecisionSpec


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
    assert plain < found[0] < found[1] < found[2] < found[3]


@pytest.mark.parametrize(("name", "recipe"), [("a100", "fp8"), ("h100", "mxfp8"), ("h100", "nvfp4")])
def test_a_gpu_without_the_format_is_told(name: str, recipe: str) -> None:
    with pytest.raises(UserError, match=rf"^precision.compute: '{recipe}' has no kernels on .*; try bf16"):
        seconds(run(recipe), name)


def test_gathers_in_8_bits_take_less_time() -> None:
    def gathered(flag: str) -> float:
        return step_time(run("fp8", precision__fp8_gather=flag), CostModel(cluster("h100", 16))).seconds

    assert gathered("true") < gathered("false")


MOVES_NOTHING = {
    "view", "unflatten", "t", "transpose", "slice", "detach", "expand", "select", "alias", "unsqueeze",
    "split", "as_strided", "permute", "_unsafe_view", "new_ones", "unbind",
}  # fmt: skip


class Moved(TorchDispatchMode):
    """Counts the bytes that operators read and write."""

    bytes = 0

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = operator(*args, **(kwargs or {}))
        if operator.overloadpacket.__name__ not in MOVES_NOTHING:
            tensors = [each for each in tree_leaves((args, kwargs, result)) if isinstance(each, Tensor)]
            self.bytes += sum(each.numel() * each.element_size() for each in tensors)
        return result


@pytest.mark.parametrize("recipe", OURS)
def test_casts_move_as_many_bytes_as_are_counted(recipe: str) -> None:
    kind = KernelProducts if OURS[recipe].products == "fp8" else LowPrecision
    products, weight = kind(PrecisionSpec.model_validate({"compute": recipe})), nn.Parameter(torch.ones(1, 1))
    products.scalings = {weight: Scaling(torch.ones(3), torch.zeros(3))}
    products.scaled = products.noting = True
    found = []
    for role, dim in product(ROLES, (-1, -2)):
        if recipe == "fp8-rowwise" and dim == -2 and role != "weight":
            continue  # of the gradient of a weight, which is not rounded
        x = torch.randn(1024, 1024).bfloat16()
        with Moved() as moved:
            if isinstance(products, KernelProducts):
                rounded = products.rounded(x, role, dim, weight)
                if dim == -2:
                    turned(rounded)
            else:
                products.operand(x, role, dim, weight)
        found.append(moved.bytes / x.numel())
    assert OURS[recipe].cast == pytest.approx(fmean(found), rel=0.02)
