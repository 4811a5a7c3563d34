"""Root-mean-square normalisation (Zhang and Sennrich 2019) and layer normalisation (Ba et al. 2016)."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from meshwright.kernels import elementwise_cpu
from meshwright.spec import ModelSpec


class _RmsNormOnCpu(torch.autograd.Function):
    """y = w * x / sqrt(mean(x^2) + eps), accumulated in fp32 at least.

    torch's CPU `rms_norm` is a chain of six operators that keeps several fp32 copies for its backward;
    this one keeps x and one number a row. It takes half the time by operators, and less by kernels in C++.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        if weight.shape == x.shape[-1:] and elementwise_cpu.takes(x, weight):
            y, scale = elementwise_cpu.rms_norm(x, weight, eps)
            ctx.save_for_backward(x, weight, scale)
            return y
        wide = _wide(x)
        length = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        scale = torch.addcmul(length.new_full((), eps), length, length, value=1 / x.shape[-1]).rsqrt_()
        ctx.save_for_backward(x, weight, scale)
        wide = wide * scale if wide is x else wide.mul_(scale)
        return wide.mul_(weight).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, scale = ctx.saved_tensors
        if weight.shape == x.shape[-1:] and elementwise_cpu.takes(x, weight, grad):
            grad_x, grad_weight = elementwise_cpu.rms_norm_backward(grad, x, weight, scale)
            return grad_x, grad_weight.to(weight.dtype), None
        wide, grad_wide, wide_weight = _wide(x), _wide(grad), _wide(weight)
        product = grad_wide * wide
        rows, scales = product.flatten(0, -2), scale.view(-1, 1)
        grad_weight = scales.squeeze(1) @ rows
        along = torch.addmm(scales, rows, wide_weight.unsqueeze(1), beta=0, alpha=-1 / x.shape[-1])
        along = along.mul_(scales.square()).view_as(scale)
        # The gradient may be shared, so only what was made of it here is written to.
        grad_x = torch.mul(grad_wide, wide_weight, out=product if grad_wide is grad else grad_wide)
        return grad_x.addcmul_(wide, along).mul_(scale).to(x.dtype), grad_weight.to(weight.dtype), None


def _rms_norm_of_few(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm on the CPU without a backward, in the fewest operators: few rows take as long as their
    number."""
    exact = torch.promote_types(x.dtype, torch.float32)
    length = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=exact)
    scale = length.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
    return (x * scale).mul_(weight).to(x.dtype)


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
    """RMSNorm over the last dim, with a weight, to which `offset` is added."""

    def __init__(self, size: int, eps: float, offset: float = 0.0) -> None:
        super().__init__()
        self.eps, self.offset = eps, offset
        self.weight = nn.Parameter(torch.empty(size))

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight + self.offset if self.offset else self.weight
        if x.device.type == "cpu":
            if torch.is_grad_enabled():
                return _RmsNormOnCpu.apply(x, weight, self.eps)
            return _rms_norm_of_few(x, weight, self.eps)
        return F.rms_norm(x, weight.shape, weight, self.eps)


class LayerNorm(nn.Module):
    """LayerNorm over the last dim, with a weight, and a bias if it is asked for."""

    def __init__(self, size: int, eps: float, bias: bool = True) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(size))
        self.bias = nn.Parameter(torch.empty(size)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        if x.device.type == "cpu" and x.dtype.itemsize < 4:
            bias = torch.zeros_like(self.weight) if self.bias is None else self.bias
            return _LayerNormOnCpu.apply(x, self.weight, bias, self.eps)
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)


def make_norm(spec: ModelSpec) -> RmsNorm | LayerNorm:
    """The norm of the residual stream that `spec` names."""
    if spec.norm == "layernorm":
        return LayerNorm(spec.hidden, spec.norm_eps, spec.norm_bias)
    return rms_norm(spec, spec.hidden)


def rms_norm(spec: ModelSpec, size: int) -> RmsNorm:
    """An RMSNorm of `size` channels, with the weight that `spec` names."""
    return RmsNorm(size, spec.norm_eps, 1.0 if spec.norm_unit_offset else 0.0)
