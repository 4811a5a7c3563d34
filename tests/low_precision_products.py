"""Products in low precision by kernels and by rounded operands, and a stand-in for kernels that CPUs lack."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.nn.functional import ScalingType
from torchao.prototype.mx_formats.kernels import f4_unpacked_to_f32, unpack_uint4

from low_precision_cases import losses_and_norms
from meshwright.comm.mesh import Mesh
from meshwright.kernels.gradient_accumulation_fusion import RunningSum
from meshwright.kernels.low_precision_casts import unblocked
from meshwright.model.low_precision_linear import LowPrecision, Scaling, operand_of
from meshwright.model.scaled_products import KernelProducts
from meshwright.parallel import parallelize
from meshwright.spec import RunSpec


def scaled_mm(
    left: Tensor,
    right: Tensor,
    left_scales: Sequence[Tensor],
    left_kinds: Sequence[int],
    left_swizzles: Sequence[int],
    right_scales: Sequence[Tensor],
    right_kinds: Sequence[int],
    right_swizzles: Sequence[int],
    bias: None,
    form: torch.dtype,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """`torch.nn.functional.scaled_mm` by its documented layouts of scales, summed in fp64."""
    assert left_swizzles == right_swizzles and bias is None
    first = _values(left, left_scales, ScalingType(left_kinds[0]))
    second = _values(right.T, right_scales, ScalingType(right_kinds[0]))
    product = (first @ second.T).to(form)
    return product if out is None else out.copy_(product)


def _values(numbers: Tensor, scales: Sequence[Tensor], kind: ScalingType) -> Tensor:
    """The numbers (M, K) times their scales, fp64."""
    if numbers.dtype is torch.float4_e2m1fn_x2:
        numbers = f4_unpacked_to_f32(unpack_uint4(numbers.view(torch.uint8)))
    rows, columns = numbers.shape
    match kind:
        case ScalingType.BlockWise1x128:
            assert scales[0].stride(0) == 1
            each = scales[0].repeat_interleave(128, 1)
        case ScalingType.BlockWise128x128:  # (k, m), whose first dim is padded
            assert scales[0].shape[0] % 4 == 0 and scales[0].stride(0) == 1
            each = scales[0].T.repeat_interleave(128, 0).repeat_interleave(128, 1)
        case ScalingType.BlockWise1x32:
            each = unblocked(scales[0].float(), rows, columns // 32).repeat_interleave(32, 1)
        case _:
            each = unblocked(scales[0].float(), rows, columns // 16).repeat_interleave(16, 1) * scales[1]
    return numbers.double() * each[:rows, :columns].double()


def layer_products(
    products: LowPrecision,
    scalings: Mapping[nn.Parameter, Scaling],
    x: Tensor,
    weights: Sequence[nn.Parameter],
    biases: Sequence[Tensor],
    grads: Sequence[Tensor],
    expected_casts: bool,
) -> list[Tensor]:
    """The results of linear layers, the gradient of their input, those of the weights, and a sum of one."""
    products.scalings, products.scaled, products.noting = scalings, True, True
    plain = [weight.detach() for weight in weights]
    operand = products.input(x, plain, weights)
    assert (operand.along is not None) == expected_casts
    results = products.forward(operand, plain, biases, weights)
    kept = operand_of(operand.kept)
    found = products.gradients(grads, plain, weights)
    first, total = (torch.ones_like(weights[0], dtype=torch.float32) for _ in range(2))
    for begun, place in enumerate((first, total)):
        assert products.of_weight(found[0], kept, weights[0], RunningSum(place, begun > 0)) is None
    return [
        *(each.flatten(0, -2) for each in results),
        products.of_input(found, plain, weights),
        *(products.of_weight(*each) for each in zip(found, [kept] * len(weights), weights, strict=True)),
        first,
        total,
    ]  # type: ignore[list-item]


def run_by_kernels(mesh: Mesh, spec: RunSpec, capability: tuple[int, int]) -> tuple[list[float], int]:
    """Losses and norms of a short run by kernels, of which a stand-in computes some; and how often one was
    called."""
    calls = 0

    def counted(multiply: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def call(*args: Any, **kwargs: Any) -> Tensor:
            nonlocal calls
            calls += 1
            return multiply(*args, **kwargs)

        return call

    with (
        patch.object(parallelize, "products_of", lambda precision, *_: KernelProducts(precision, capability)),
        patch.object(torch, "_scaled_mm_v2", counted(scaled_mm)),
        patch.object(torch, "_scaled_mm", counted(torch._scaled_mm)),
    ):
        return losses_and_norms(mesh, spec), calls
