"""Recipes of low precision in plans of this program: bytes of its casts, and what they save."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from meshwright.hardware.find import cluster
from meshwright.kernels import low_precision_casts
from meshwright.model.low_precision_linear import Scaling
from meshwright.model.scaled_products import CAPABILITY, KernelProducts
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


def test_kernels_save_more_than_casts_cost() -> None:
    """Dense models gain in every recipe; torchtitan measured 1.28 times its rate in bf16."""
    plain = seconds(run("bf16"), "h100")
    for recipe in ("fp8", "fp8-blockwise"):
        assert plain / seconds(run(recipe), "h100") > 1.2
    assert seconds(run("fp8-rowwise"), "h100") < plain
    plain = seconds(run("bf16"), "b200")
    found = [seconds(run(recipe), "b200") for recipe in ("fp8", "fp8-blockwise", "mxfp8", "nvfp4")]
    assert all(each < plain for each in found) and found[-1] < min(found[:-1])


def test_experts_without_kernels_save_nothing() -> None:
    experts = {"model.preset": "mixtral-8x7b", "layout.ep": "8", "data.seq_len": "4096"}
    given = {key.replace(".", "__"): value for key, value in experts.items()}
    plain, block = (seconds(run(recipe, **given), "h100") for recipe in ("bf16", "fp8-blockwise"))
    assert block > plain


@pytest.mark.parametrize(("name", "recipe"), [("a100", "fp8"), ("h100", "mxfp8"), ("h100", "nvfp4")])
def test_a_gpu_without_the_format_is_told(name: str, recipe: str) -> None:
    with pytest.raises(UserError, match=rf"^precision.compute: '{recipe}' has no kernels on .*; try bf16"):
        seconds(run(recipe), name)


def test_gathers_in_8_bits_take_less_time() -> None:
    def gathered(flag: str) -> float:
        return step_time(run("fp8", precision__fp8_gather=flag), CostModel(cluster("h100", 16))).seconds

    assert gathered("true") < gathered("false")


class Moved(TorchDispatchMode):
    """Counts the bytes that casts read and write."""

    bytes = 0

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = operator(*args, **(kwargs or {}))
        if operator.namespace == "meshwright":
            tensors = [each for each in tree_leaves((args, kwargs, result)) if isinstance(each, Tensor)]
            again = args[0].nbytes if "cast_rows" in operator.name() else 0  # the scale is known after a pass
            self.bytes += sum(each.nbytes for each in tensors) + again
        return result


@pytest.mark.parametrize("recipe", OURS)
def test_casts_move_as_many_bytes_as_are_counted(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """For two products each of an input, a gradient and a weight; fp8-rowwise rounds 4 operands."""
    monkeypatch.setattr(low_precision_casts, "takes_triton", lambda _device: True)
    products = KernelProducts(PrecisionSpec.model_validate({"compute": recipe}), CAPABILITY[recipe])
    with torch.device("meta"):
        weight = nn.Parameter(torch.empty(4096, 4096, dtype=torch.bfloat16))
        x, scales, seen = torch.empty_like(weight.detach()), torch.ones(3), torch.zeros(3)
    products.scalings, products.scaled = {weight: Scaling(scales, seen)}, True
    moved = Moved(), Moved(), Moved()
    with moved[0]:
        operand = products.input(x, [weight.detach()], [weight])
    with moved[1]:
        (gradient,) = products.gradients([x], [weight.detach()], [weight])
    with moved[2]:
        for across in (False, True):
            products._weight(weight.detach(), weight, across)
    assert operand.along is not None and gradient.along is not None
    found = [each.bytes / x.numel() for each in moved]
    assert OURS[recipe].operands == pytest.approx(found, rel=0.01)
    assert OURS[recipe].cast == pytest.approx(sum(found) / (4 if recipe == "fp8-rowwise" else 6), rel=0.01)
