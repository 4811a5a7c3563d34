"""GPTQ: codes that keep a layer's outputs, where rounding to nearest keeps its weights (Frantar et al. 2022).

A layer W (O, I) is given inputs X (N, I) of calibration; its error is the sum of ((W - Q) X^T)^2 over tokens.
Columns are rounded from the first to the last, and the error of each is made up for by those that follow,
as the inverse of the Hessian X^T X tells. arXiv 2210.17323, algorithm 1, with columns in their own order.
"""

from __future__ import annotations

import torch
from torch import Tensor

from meshwright.model.quantisation import Codes, codes_of, scales_of
from meshwright.spec.errors import NumericalError
from meshwright.spec.precision import Quantised

BLOCK = 128
"""Columns whose errors reach the columns behind them in one product; a multiple of every group."""
DAMPING = 0.01
"""Share of the Hessian's mean diagonal that is added to it, as in the paper's §3.3."""


def gptq(weight_OI: Tensor, hessian_II: Tensor, recipe: Quantised, group: int = 0) -> Codes:
    """The codes of a weight by a recipe with a scale for each `group` of columns, or for all (0).

    `hessian_II` is the sum of x x^T over the inputs x (I,) of calibration; it is not changed. The scale of a
    group is that of its columns when the first is rounded. Raises `NumericalError` for a Hessian that is not
    finite.
    """
    weight = weight_OI.float().clone()
    columns = weight.shape[1]
    upper = _inverse_cholesky(hessian_II)
    codes = torch.empty_like(weight, dtype=torch.float8_e4m3fn if recipe == "fp8" else torch.int8)
    scales = [] if group else [scales_of(weight, recipe).bfloat16()]
    for first in range(0, columns, BLOCK):
        last = min(first + BLOCK, columns)
        errors = weight.new_zeros(len(weight), last - first)
        for column in range(first, last):
            if group and column % group == 0:
                scales.append(scales_of(weight[:, column : column + group], recipe).bfloat16())
            scale, own = scales[-1], weight[:, column : column + 1]
            code = codes_of(own, scale, recipe)
            codes[:, column : column + 1] = code
            error = (own - code.float() * scale.float()) / upper[column, column]
            weight[:, column:last] -= error * upper[column, column:last]
            errors[:, column - first] = error.squeeze(1)
        weight[:, last:] -= errors @ upper[first:last, last:]
    return Codes(codes, torch.cat(scales, 1))


def _inverse_cholesky(hessian_II: Tensor) -> Tensor:
    """The upper Cholesky factor (I, I) of the damped Hessian's inverse, in fp32, computed in fp64."""
    hessian = hessian_II.double().clone()
    diagonal = hessian.diagonal()
    diagonal += (DAMPING * diagonal.mean()).clamp(min=1e-12)
    lower, failed = torch.linalg.cholesky_ex(hessian)
    if not failed:
        lower, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower), upper=True)
    if failed or not torch.isfinite(lower).all():
        raise NumericalError(
            "gptq: the inputs of calibration are not finite, or too large; give other text, or the algorithm "
            "rtn"
        )
    return lower.float()
