"""Activations of routed experts, with a routing weight for each row: forward, and backward by hand.

Shapes: R rows, F channels of an expert. What `gate` and `up` return is saved for the backward, and nothing
else.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from meshwright.kernels import elementwise_cpu
from meshwright.spec.moe_mla import CLAMPED_ALPHA, CLAMPED_LIMIT


class ExpertActivation(NamedTuple):
    """An activation of gate x and up x (R, F), times the rows' weights (R,)."""

    weighted: Callable[[Tensor, Tensor, Tensor], Tensor]
    """(gate x, up x, weight) -> the input of `down` (R, F)."""
    backward_: Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor, Tensor]]
    """(gradient, gate x, up x, weight) -> the gradients of gate x, up x and weight from that of `weighted`,
    which is overwritten; and the result of `weighted`."""


def _swiglu(gate_x: Tensor, up_x: Tensor, weight: Tensor) -> Tensor:
    """silu(gate x) * up x * weight."""
    if weight.dtype == torch.float32 and elementwise_cpu.takes(gate_x, up_x):
        return elementwise_cpu.weighted_swiglu(gate_x, up_x, weight.contiguous())
    return F.silu(gate_x).mul_(up_x).mul_(weight.to(up_x.dtype).unsqueeze(1))


def _swiglu_backward_(
    grad: Tensor, gate_x: Tensor, up_x: Tensor, weight: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    if weight.dtype == torch.float32 and elementwise_cpu.takes(grad, gate_x, up_x):
        found = elementwise_cpu.weighted_swiglu_backward_(grad, gate_x, up_x, weight.contiguous())
        return *found, grad
    scale, silu = weight.to(grad.dtype).unsqueeze(1), F.silu(gate_x)
    product = silu * up_x
    grad_weight = (grad * product).sum(1, dtype=weight.dtype)
    grad_up = silu.mul_(grad.mul_(scale))
    grad_gate = torch.ops.aten.silu_backward(grad.mul_(up_x), gate_x)
    return grad_gate, grad_up, grad_weight, product.mul_(scale)


def _clamped_swiglu(gate_x: Tensor, up_x: Tensor, weight: Tensor) -> Tensor:
    """(clamp(up x) + 1) * g * sigmoid(alpha g) * weight with g = min(gate x, limit) (OpenAI 2025)."""
    gate = gate_x.clamp(max=CLAMPED_LIMIT)
    raised = up_x.clamp(-CLAMPED_LIMIT, CLAMPED_LIMIT).add_(1)
    glu = (gate * CLAMPED_ALPHA).sigmoid_().mul_(gate)
    return glu.mul_(raised).mul_(weight.to(up_x.dtype).unsqueeze(1))


def _clamped_swiglu_backward_(
    grad: Tensor, gate_x: Tensor, up_x: Tensor, weight: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Channels beyond a limit have no gradient."""
    scale, gate = weight.to(grad.dtype).unsqueeze(1), gate_x.clamp(max=CLAMPED_LIMIT)
    raised = up_x.clamp(-CLAMPED_LIMIT, CLAMPED_LIMIT).add_(1)
    sigmoid = (gate * CLAMPED_ALPHA).sigmoid_()
    glu = gate * sigmoid
    product = glu * raised
    grad_weight = (grad * product).sum(1, dtype=weight.dtype)
    grad_up = glu.mul_(grad.mul_(scale)).masked_fill_(up_x.abs() > CLAMPED_LIMIT, 0)
    # The derivative of g sigmoid(alpha g) is sigmoid (1 + alpha g (1 - sigmoid)).
    slope = gate.mul_(CLAMPED_ALPHA).mul_(1 - sigmoid).add_(1).mul_(sigmoid)
    grad_gate = slope.mul_(grad.mul_(raised)).masked_fill_(gate_x > CLAMPED_LIMIT, 0)
    return grad_gate, grad_up, grad_weight, product.mul_(scale)


ACTIVATIONS = {
    "swiglu": ExpertActivation(_swiglu, _swiglu_backward_),
    "clamped_swiglu": ExpertActivation(_clamped_swiglu, _clamped_swiglu_backward_),
}
"""`MoeSpec.activation` -> its functions."""
