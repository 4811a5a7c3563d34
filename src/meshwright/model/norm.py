"""Root-mean-square normalisation (Zhang and Sennrich 2019) and layer normalisation (Ba et al. 2016)."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from meshwright.spec import ModelSpec


class _RmsNormOnCpu(torch.autograd.Function):
    """y = w * x / sqrt(mean(x^2) + eps), accumulated in fp32 at least.

    torch's CPU `rms_norm` is a chain of six operators that keeps several fp32 copies for its backward;
    this one keeps x and one number a row, and takes half the time.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = _wide(x)
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        ctx.save_for_backward(x, weight, scale)
        wide = wide * scale if wide is x else wide.mul_(scale)
        return wide.mul_(weight).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, scale = ctx.saved_tensors
        wide = _wide(x)
        unit = wide * scale if wide is x else wide.mul_(scale)
        grad_wide = _wide(grad)
        product = grad_wide * unit
        grad_weight = product.flatten(0, -2).sum(0)
        along = (product @ weight.to(product.dtype).unsqueeze(1)) / x.shape[-1]
        grad_x = product.copy_(grad_wide).mul_(weight).sub_(unit.mul_(along)).mul_(scale)
        return grad_x.to(x.dtype), grad_weight.to(weight.dtype), None


def rms_factors(weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The arguments `factors` (D,) and `floor` (1,) of `rms_norm_of_few`, in fp32 at least."""
    size, exact = len(weight), torch.promote_types(weight.dtype, torch.float32)
    floor = torch.full((1,), (size * eps) ** 0.5, dtype=exact, device=weight.device)
    return weight.to(exact) * size**0.5, floor


def rms_norm_of_few(x: Tensor, factors: Tensor, floor: Tensor) -> Tensor:
    """RMSNorm (..., D) without a backward, for few rows, which take as long as the operators are many.

    y = sqrt(D) w * x / sqrt(|x|^2 + D eps), whose denominator is the hypotenuse of |x| and sqrt(D eps).
    """
    length = torch.linalg.vector_norm(x, 2, -1, True, dtype=floor.dtype)
    y = (x / length.hypot_(floor)).mul_(factors)
    return y if y.dtype is x.dtype else y.to(x.dtype)


class _LayerNormOnCpu(torch.autograd.Function):
    """LayerNorm of half formats, with statistics and gradients in fp32.

    torch's CPU kernel adds the gradients of weight and bias over the rows in their own format: of 16,384
    rows in bf16 three quarters of the bias's gradient are lost.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        size = weight.shape
        normed, mean, scale = torch.native_layer_norm(x, size, weight.float(), bias.float(), eps)
        ctx.save_for_backward(x, mean, scale, weight, bias)
        return normed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        x, mean, scale, weight, bias = ctx.saved_tensors
        found = torch.ops.aten.native_layer_norm_backward(
            grad.float(), x.float(), weight.shape, mean, scale, weight.float(), bias.float(), [True] * 3
        )
        grad_x, grad_weight, grad_bias = (each.to(x.dtype) for each in found)
        return grad_x, grad_weight, grad_bias, None


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


class RmsNorm(nn.Module):
    """RMSNorm over the last dim, with a weight."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(size))

    def forward(self, x: Tensor) -> Tensor:
        if x.device.type == "cpu":
            if torch.is_grad_enabled():
                return _RmsNormOnCpu.apply(x, self.weight, self.eps)
            return rms_norm_of_few(x, *rms_factors(self.weight, self.eps))
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class LayerNorm(nn.Module):
    """LayerNorm over the last dim, with a weight and a bias."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(size))
        self.bias = nn.Parameter(torch.empty(size))

    def forward(self, x: Tensor) -> Tensor:
        if x.device.type == "cpu" and x.dtype.itemsize < 4:
            return _LayerNormOnCpu.apply(x, self.weight, self.bias, self.eps)
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)


def make_norm(spec: ModelSpec) -> RmsNorm | LayerNorm:
    """The norm of the residual stream that `spec` names."""
    kind = RmsNorm if spec.norm == "rmsnorm" else LayerNorm
    return kind(spec.hidden, spec.norm_eps)
