"""Operators that send: what computes and sends as one operator, so that a block stays one compiled graph.

A compiler can trace neither messages under way nor the record of what was sent. So in a compiled block each
map and attention that sends is one operator, opaque to it: inside runs the same code as without a compiler,
with its own overlap of sending and computing, and everything around it is compiled. As operators they are
saved or recomputed by name, too: `joint_matmul`, `joint_attention` and `joint_exchange`.

An operator takes tensors and text only. The text is the name of a `FusedCommOp` of this process, which knows
the axis and the mathematics; it lives as long as the model that uses it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import count
from typing import Any, ClassVar, Literal
from weakref import WeakValueDictionary

import torch
from torch import Tensor

Kind = Literal["matmul", "attention", "exchange"]
Tensors = Sequence[Tensor]


class FusedCommOp(ABC):
    """One operation with the messages in it; calling it runs it as an operator, differentiable once.

    No result may share memory with an input or with another result.
    """

    kind: ClassVar[Kind]

    def __init__(self) -> None:
        # Equal in every run of one program, so that compiled code is found again.
        self.name = f"{type(self).__name__}-{next(_numbers)}"
        _joints[self.name] = self

    def __call__(self, *inputs: Tensor) -> list[Tensor]:
        """The results of `forward`."""
        found: list[Tensor] = _operators[self.kind](self.name, inputs)
        return found

    @abstractmethod
    def forward(self, inputs: Tensors) -> Tensors:
        """What the operator returns."""

    @abstractmethod
    def keep(self, inputs: Tensors, results: Tensors) -> Tensors:
        """What `backward` needs of them."""

    @abstractmethod
    def backward(self, kept: Tensors, grads: Tensors, inputs: int) -> Tensors:
        """The gradients of the first of `inputs` inputs, given those of all results; the others have none."""

    @abstractmethod
    def results_like(self, inputs: Tensors) -> Tensors:
        """Empty tensors shaped as `forward`'s results."""

    @abstractmethod
    def gradients_like(self, kept: Tensors, grads: Tensors, inputs: int) -> Tensors:
        """Empty tensors shaped as `backward`'s."""


_joints: WeakValueDictionary[str, FusedCommOp] = WeakValueDictionary()
_numbers = count()


def empty(like: Tensor, *shape: int) -> Tensor:
    """An empty contiguous tensor in the format and on the device of another, by default in its shape."""
    return like.new_empty(shape or like.shape)


def _define(kind: Kind) -> Any:
    """Register the operator of a kind and its backward; returns the former."""
    schema = "(str name, Tensor[] inputs) -> Tensor[]"
    schema_backward = "(str name, Tensor[] kept, Tensor[] grads, int inputs) -> Tensor[]"

    @torch.library.custom_op(f"meshwright::joint_{kind}", mutates_args=(), schema=schema)
    def joint(name: str, inputs: list[Tensor]) -> list[Tensor]:
        return list(_joints[name].forward(inputs))

    @torch.library.custom_op(f"meshwright::joint_{kind}_backward", mutates_args=(), schema=schema_backward)
    def backward(name: str, kept: list[Tensor], grads: list[Tensor], inputs: int) -> list[Tensor]:
        return list(_joints[name].backward(kept, grads, inputs))

    @joint.register_fake
    def _(name: str, inputs: list[Tensor]) -> list[Tensor]:
        return list(_joints[name].results_like(inputs))

    @backward.register_fake
    def _(name: str, kept: list[Tensor], grads: list[Tensor], inputs: int) -> list[Tensor]:
        return list(_joints[name].gradients_like(kept, grads, inputs))

    def remember(ctx: Any, inputs: tuple[str, list[Tensor]], output: list[Tensor]) -> None:
        ctx.name, ctx.inputs = inputs[0], len(inputs[1])
        ctx.save_for_backward(*_joints[ctx.name].keep(inputs[1], output))

    def differentiate(ctx: Any, grads: list[Tensor]) -> tuple[None, list[Tensor | None]]:
        found = backward(ctx.name, list(ctx.saved_tensors), grads, ctx.inputs)
        return None, [*found, *[None] * (ctx.inputs - len(found))]

    joint.register_autograd(differentiate, setup_context=remember)
    return getattr(torch.ops.meshwright, f"joint_{kind}").default


_operators: dict[Kind, Any] = {kind: _define(kind) for kind in ("matmul", "attention", "exchange")}
