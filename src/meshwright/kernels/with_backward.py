"""An autograd function made of a function and its backward, neither of which saves tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


class _WithBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, forward: Callable[..., Any], backward: Callable[..., Any], *inputs: Tensor) -> Any:
        ctx.run_backward = backward
        return forward(*inputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        found = ctx.run_backward(*grads)
        return None, None, *(found if isinstance(found, tuple) else (found,))


def with_backward(forward: Callable[..., Any], backward: Callable[..., Any], *inputs: Tensor) -> Any:
    """`forward(*inputs)`, a tensor or a tuple, whose gradient `backward` computes.

    `backward` takes the gradients of the results and returns those of the inputs. It runs once.
    """
    return _WithBackward.apply(forward, backward, *inputs)
