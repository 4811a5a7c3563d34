"""Operations that compute and communicate, as one autograd function or as one operator of a compiled block.

Each is written once, as a `FusedCommOp`. Eagerly it runs as an autograd function whose results a
`RecomputeCache` may keep and whose weight gradients a `WeightGradStore` may defer. A compiler can trace
neither messages in flight nor the record of what was sent, so in a compiled block it is an opaque custom
operator: inside runs the same code, with its own overlap, and everything around it is compiled. Policies of
recomputation know these operators by name: `joint_matmul`, `joint_matmul_one`, `joint_attention` and
`joint_exchange`.

A custom operator takes tensors and text only; the text is the name of a `FusedCommOp` of this process, which
knows the axis and the mathematics and lives as long as the model that uses it. One graph serves all blocks,
so a block's own weights are known by their memory alone (`WeightGradStore.parameter_at`): a backward finds
them there, and adds their gradients where they are sent, which the graph then does not return. It is kept in
the graph for the gradient of its first input. Where nobody asks for that, such as in a first block behind a
frozen embedding, the graph returns the gradients of weights, too.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import count
from typing import Any, Literal
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from meshwright.parallel.deferred_wgrad import Gradients, WeightGradStore
from meshwright.parallel.recompute_cache import RecomputeCache

Kind = Literal["matmul", "attention", "exchange"]
Tensors = Sequence[Tensor]
Parameters = Sequence[nn.Parameter]


class FusedCommOp(ABC):
    """An operation that communicates; calling it returns its results, differentiable once.

    With `cache` None it is a custom operator, for compiled blocks; then no result may share memory with an
    input or another result. `results` is the number of results that callers need, all by default; eagerly,
    the others are only saved for the backward.
    """

    kind: Kind
    results: int | None = None

    def __init__(self, cache: RecomputeCache | None, store: WeightGradStore | None = None) -> None:
        self.cache, self.store = cache, store
        if cache is None:
            # Equal in every run of a program, so that compiled code is found in the compiler's cache.
            self.name = f"{type(self).__name__}-{next(_numbers)}"
            _ops[self.name] = self

    def __call__(self, *inputs: Tensor, read_again: bool = True) -> Tensors:
        """The results of `forward`. With `read_again` False no recomputing forward reads their values."""
        if self.cache is None:
            found = _operators[self.kind, self.single](self.name, inputs)
            return [found] if self.single else found
        return _EagerOp.apply(self, read_again, *inputs)

    def run(self, inputs: Tensors, read_again: bool) -> tuple[Tensors, Tensors]:
        """The results, now or from the cache, and the tensors to save for `backward`; eagerly."""
        assert self.cache is not None
        results = self.cache.run(self.kind, lambda: tuple(self.forward(inputs)), read_again)
        return results, self.keep(inputs, results)

    @property
    def single(self) -> bool:
        """True if its operator returns its one result as a tensor, and not in a list."""
        return False

    @abstractmethod
    def forward(self, inputs: Tensors) -> Tensors:
        """Compute the results."""

    def keep(self, inputs: Tensors, results: Tensors) -> Tensors:
        """The tensors to save for `backward`: by default the inputs."""
        return inputs

    @abstractmethod
    def backward(self, saved: Tensors, grads: Tensors, parameters: Parameters = ()) -> Gradients:
        """Gradients of the first inputs, given those of the results; the other inputs have none.

        `parameters` are those of the inputs that are one; `store` takes their gradients where it is open, and
        may know the sum that one was added to, for which None is returned.
        """

    @abstractmethod
    def results_like(self, inputs: Tensors) -> Tensors:
        """Empty tensors with the shapes of `forward`'s results."""

    def gradients_like(self, saved: Tensors, grads: Tensors) -> Tensors:
        """Empty tensors with the shapes of `backward`'s results: by default of what is saved."""
        return [*map(empty, saved)]

    def weights(self, inputs: Tensors) -> range:
        """Places of inputs whose gradients a backward can add where they are sent; by default none."""
        return range(0)

    def parameters_of(self, saved: Tensors) -> dict[int, nn.Parameter]:
        """Place -> parameter, of what is saved, where inputs have such weights."""
        raise NotImplementedError


class _EagerOp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, op: FusedCommOp, read_again: bool, *inputs: Tensor) -> tuple[Tensor, ...]:
        results, kept = op.run(inputs, read_again)
        ctx.op, ctx.inputs = op, len(inputs)
        ctx.parameters = own_parameters(inputs)
        ctx.save_for_backward(*kept)
        return tuple(results[: op.results])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        found = ctx.op.backward(ctx.saved_tensors, grads, ctx.parameters)
        return None, None, *found, *[None] * (ctx.inputs - len(found))


_ops: WeakValueDictionary[str, FusedCommOp] = WeakValueDictionary()
_numbers = count()


def own_parameters(inputs: Tensors) -> list[nn.Parameter]:
    """The inputs that are parameters; none of them is in compiled blocks."""
    return [x for x in inputs if isinstance(x, nn.Parameter)]


def empty(like: Tensor, *shape: int) -> Tensor:
    """An empty contiguous tensor with the dtype and device of `like`, and its shape unless one is given."""
    return like.new_empty(shape or like.shape)


def _backward(
    name: str, saved: list[Tensor], grads: list[Tensor], returned: list[int], adds: bool
) -> list[Tensor]:
    """Gradients of the inputs in the places `returned`.

    If it `adds`, it knows the parameters of what is saved, and adds the gradients of weights in other places.
    """
    op = _ops[name]
    known = op.parameters_of(saved) if adds else {}
    found = op.backward(saved, grads, [*known.values()])
    for place, parameter in known.items():
        if place not in returned and found[place] is not None:
            parameter.grad = found[place]  # it was added nowhere: the parameter's hook takes it
    due = [grad for place in returned if (grad := found[place]) is not None]
    assert len(due) == len(returned)
    return due


def _backward_like(
    name: str, saved: list[Tensor], grads: list[Tensor], returned: list[int], adds: bool
) -> list[Tensor]:
    """Empty tensors like those of `_backward`."""
    found = _ops[name].gradients_like(saved, grads)
    return [found[place] for place in returned]


def _define(kind: Kind, single: bool) -> Any:
    """Register a custom operator of a kind, whose result may be a `single` one, and its backward; returns
    the former."""
    schema = f"(str name, Tensor[] inputs) -> {'Tensor' if single else 'Tensor[]'}"
    short = f"joint_{kind}_one" if single else f"joint_{kind}"
    operator = f"meshwright::{short}"

    def results(found: Tensors) -> Any:
        return found[0] if single else list(found)

    def forward(name: str, inputs: list[Tensor]) -> Any:
        return results(_ops[name].forward(inputs))

    joint = torch.library.custom_op(operator, forward, mutates_args=(), schema=schema)
    backward = torch.library.custom_op(
        f"{operator}_backward", _backward, mutates_args=(), schema=SCHEMA_OF_BACKWARD
    )
    backward.register_fake(_backward_like)

    @joint.register_fake
    def _(name: str, inputs: list[Tensor]) -> Any:
        return results(_ops[name].results_like(inputs))

    def save(ctx: Any, inputs: tuple[str, list[Tensor]], output: Any) -> None:
        ctx.name, ctx.inputs = inputs[0], len(inputs[1])
        ctx.weights = _ops[ctx.name].weights(inputs[1])
        ctx.save_for_backward(*_ops[ctx.name].keep(inputs[1], [output] if single else output))

    def differentiate(ctx: Any, given: Any) -> tuple[None, list[Tensor | None]]:
        needed = [place for place, needs in enumerate(ctx.needs_input_grad[1]) if needs]
        adds = bool(ctx.weights) and 0 in needed
        returned = [place for place in needed if not (adds and place in ctx.weights)]
        found = backward(ctx.name, list(ctx.saved_tensors), [given] if single else given, returned, adds)
        by_place = dict(zip(returned, found, strict=True))
        return None, [by_place.get(place) for place in range(ctx.inputs)]

    joint.register_autograd(differentiate, setup_context=save)
    namespace = torch.ops.meshwright
    BODIES[getattr(namespace, f"{short}_backward").default] = _backward
    own = getattr(namespace, short).default
    BODIES[own] = forward
    return own


SCHEMA_OF_BACKWARD = "(str name, Tensor[] saved, Tensor[] grads, int[] returned, bool adds) -> Tensor[]"
BODIES: dict[Any, Any] = {}
"""Operator -> what it computes and sends, as a function of its arguments."""
_operators: dict[tuple[Kind, bool], Any] = {
    ("matmul", False): _define("matmul", False),
    ("matmul", True): _define("matmul", True),
    ("attention", False): _define("attention", False),
    ("exchange", False): _define("exchange", False),
}
