"""Linear layers and region boundaries of the tensor axis, with the messages around them
(`tensor_parallel.py`).

Shapes: B batch, T tokens of which a rank holds T/n where sequences are sharded, D hidden, F outputs of a
layer.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from itertools import takewhile, zip_longest

from torch import Tensor, nn

from meshwright.comm.collectives import (
    DONE,
    gather_matmul,
    matmul_scatter,
    reach_each_other,
    start_all_gather,
    start_all_reduce,
    start_reduce_scatter,
)
from meshwright.comm.mesh import Axis
from meshwright.comm.traffic_counter import Pending
from meshwright.kernels.with_backward import with_backward
from meshwright.model.linear import Linear
from meshwright.model.low_precision_linear import Operand, Products, operand_of
from meshwright.parallel.deferred_wgrad import Gradients, WeightGradStore
from meshwright.parallel.fused_comm_ops import FusedCommOp, Parameters, Tensors, empty, own_parameters
from meshwright.parallel.recompute_cache import RecomputeCache

# Gathering and reducing tokens --------------------------------------------------------------------------


def _start_gather(x: Tensor, axis: Axis) -> tuple[Tensor, Pending]:
    """Start an all-gather of tokens: (B, T/n, D) -> (B, T, D)."""
    whole = x.new_empty(x.shape[0], x.shape[1] * axis.size, x.shape[2])
    return whole, start_all_gather(whole.view(-1), x.contiguous().view(-1), axis)


def _start_sum(x: Tensor, axis: Axis, sequence: bool) -> tuple[Tensor, Pending]:
    """Start to sum contiguous (B, T, D) over the ranks: to (B, T/n, D) with `sequence`, else in place.

    `x` must live until the sum has ended.
    """
    if not sequence:
        return x, start_all_reduce(x, axis)
    part = x.new_empty(x.shape[0], x.shape[1] // axis.size, x.shape[2])
    return part, start_reduce_scatter(part.view(-1), x.view(-1), axis)


def _sum(x: Tensor, axis: Axis, sequence: bool) -> Tensor:
    x = x.contiguous()
    total, pending = _start_sum(x, axis, sequence)
    pending.wait()
    return total


def gather_tokens(x: Tensor, axis: Axis, sequence: bool = True) -> Tensor:
    """All tokens (B, T, D) of ranks that hold (B, T/n, D) each; `x` itself without `sequence`."""
    if not sequence:
        return x
    whole, pending = _start_gather(x, axis)
    pending.wait()
    return whole


def leave_parallel_region(x: Tensor, axis: Axis, sequence: bool) -> Tensor:
    """Sum the ranks' parts (B, T, D), and keep this rank's tokens (B, T/n, D) with `sequence`."""
    return with_backward(
        lambda x: _sum(x if sequence else x.clone(), axis, sequence),
        lambda grad: gather_tokens(grad, axis, sequence),
        x,
    )


class _TensorOp(FusedCommOp):
    def __init__(
        self,
        axis: Axis,
        sequence: bool,
        cache: RecomputeCache | None,
        store: WeightGradStore | None = None,
        products: Products | None = None,
    ) -> None:
        """With `sequence` tokens are sharded outside the parallel region."""
        super().__init__(cache, store)
        self.kind = "matmul"
        self._axis, self._sequence, self._products = axis, sequence, products or Products()
        # Compiled, a product overlaps with its own messages where ranks can read each other's memory.
        self._fused = cache is None and sequence and not self._products.low and reach_each_other(axis)

    def _of_weight(self, grad: Operand, x: Operand, parameter: nn.Parameter | None) -> Tensor | None:
        """The gradient (O, I) of a weight, or None if it was added to the parameter's gradients or the weight
        is not trained."""
        if parameter is not None and not parameter.requires_grad:
            return None
        into = self.store.gradient_sum(parameter) if self.store and parameter is not None else None
        return self._products.of_weight(grad, x, parameter, into)

    def _like(self, x: Tensor, channels: int, gathered: bool) -> Tensor:
        """An empty (B, T, channels) for x (B, T/n or T, D) if `gathered`; else with the lengths reversed."""
        ranks = self._axis.size if self._sequence else 1
        return empty(x, x.shape[0], x.shape[1] * ranks if gathered else x.shape[1] // ranks, channels)


class _LinearOp(_TensorOp):
    """Linear layers of one input, which is kept for the backward as the gradients of the weights take it."""

    @property
    def gathers(self) -> bool:
        """True if ranks hold parts of the input's tokens, which are kept as they are."""
        return False

    @abstractmethod
    def results_of(self, x: Operand, inputs: Tensors) -> Tensors:
        """The results of the input (B, T, I) or, rounded, (N, I)."""

    def run(self, inputs: Tensors, read_again: bool) -> tuple[Tensors, Tensors]:
        if self.gathers or self._fused:
            return super().run(inputs, read_again)
        assert self.cache is not None
        x, *rest = inputs
        needed = not self.cache.serves("matmul")
        operand = self._products.input(x, _parameters(inputs)[0], own_parameters(inputs), needed)
        results = self.cache.run(self.kind, lambda: tuple(self.results_of(operand, inputs)), read_again)
        return results, [*operand.kept, *rest]

    def weights(self, inputs: Tensors) -> range:
        knows = self.store is not None and self.store.parameter_at is not None
        return range(1, 1 + len(_parameters(inputs)[0])) if knows else range(0)

    def parameters_of(self, saved: Tensors) -> dict[int, nn.Parameter]:
        assert self.store is not None and self.store.parameter_at is not None
        return {place: self.store.parameter_at(x) for place, x in enumerate(saved) if place > 0}

    def _again(self, x: Operand, weights: Tensors, parameters: Parameters) -> Operand:
        """An input that was kept, rounded if it was not."""
        if x.plain is None:
            return x
        return self._products.input(x.plain, weights, parameters, product=False)


def _parameters(tensors: Tensors) -> tuple[list[Tensor], list[Tensor]]:
    """Weights, and biases if there are any, of tensors that end with them, behind one or more."""
    biases = list(takewhile(lambda x: x.ndim == 1, reversed(tensors)))[::-1]
    others = tensors[1 : len(tensors) - len(biases)]
    return [x for x in others if x.ndim == 2], biases


class EnterParallelRegion(_TensorOp):
    """x (B, T/n or T, D) -> (B, T, D), for ranks that each compute a part; their gradients are summed."""

    def __init__(self, axis: Axis, sequence: bool, cache: RecomputeCache | None) -> None:
        super().__init__(axis, sequence, cache)
        if not sequence:
            self.kind = "exchange"  # nothing is computed that a policy could save

    def forward(self, inputs: Tensors) -> Tensors:
        (x,) = inputs
        if self._sequence:
            return [gather_tokens(x, self._axis)]
        return [x.clone() if self.cache is None else x.view_as(x)]

    def keep(self, inputs: Tensors, results: Tensors) -> Tensors:
        return []

    def backward(self, saved: Tensors, grads: Tensors, parameters: Parameters = ()) -> Tensors:
        # The incoming gradient may be shared, so a sum in place works on a copy.
        return [_sum(grads[0] if self._sequence else grads[0].clone(), self._axis, self._sequence)]

    def results_like(self, inputs: Tensors) -> Tensors:
        return [self._like(inputs[0], inputs[0].shape[2], True)]

    def gradients_like(self, saved: Tensors, grads: Tensors) -> Tensors:
        return [self._like(grads[0], grads[0].shape[2], False)]


class ColumnParallel(_LinearOp):
    """Several linear layers of one input, each with its outputs split; saves this rank's tokens of the input.

    Inputs: x (B, T/n or T, D), the weight (F/n, D) of each layer, the bias (F/n,) of each layer or of none.
    Results: (B, T, F/n) for each layer.
    """

    @property
    def gathers(self) -> bool:
        return self._sequence

    def forward(self, inputs: Tensors) -> Tensors:
        x, (weights, biases) = inputs[0], _parameters(inputs)
        if self._fused:
            _, products = gather_matmul(x.flatten(0, 1), [weight.T for weight in weights], self._axis)
            wholes = [product.view(x.shape[0], -1, product.shape[1]) for product in products]
            return [whole + bias for whole, bias in zip(wholes, biases, strict=True)] if biases else wholes
        whole = gather_tokens(x, self._axis, self._sequence)
        operand = self._products.input(whole, weights, own_parameters(inputs), gradient=False)
        return self.results_of(operand, inputs)

    def results_of(self, x: Operand, inputs: Tensors) -> Tensors:
        weights, biases = _parameters(inputs)
        found = self._products.forward(x, weights, biases, own_parameters(inputs))
        return [each.view(inputs[0].shape[0], -1, each.shape[-1]) for each in found]

    def backward(self, saved: Tensors, grads: Tensors, parameters: Parameters = ()) -> Gradients:
        own = len(grads) * (2 if saved[-1].ndim == 1 else 1)
        kept, (weights, biases) = operand_of(saved[:-own]), _parameters(saved[-own - 1 :])
        axis, sequence = self._axis, self._sequence
        flat = [grad.flatten(0, -2) for grad in grads]
        trained = not parameters or any(parameter.requires_grad for parameter in parameters)
        operands = self._products.gradients(flat, weights, parameters)
        biased = flat if biases else []

        def input_gradient() -> Tensor:
            total = self._products.of_input(operands, weights, parameters)
            return total.view(*grads[0].shape[:-1], -1)

        def weight_grads(x: Operand, operands: Sequence[Operand]) -> Gradients:
            of_biases = [grad.sum(0) if trained else None for grad in biased]
            x = self._again(x, weights, parameters) if trained else x
            pairs = zip_longest(operands, parameters[: len(operands)])
            return [*(self._of_weight(grad, x, each) for grad, each in pairs), *of_biases]

        if self.store is not None and self.store.open:
            grad_x = _sum(input_gradient(), axis, sequence)
            # With the graph behind it the stage's input would stay alive, too.
            x, later = _detached(kept), [operand_of(each.kept) for each in operands]
            self.store.put(
                parameters,
                lambda: weight_grads(self._gathered(x) if sequence else x, later),
            )
            return [grad_x]
        whole, gathering = kept, DONE
        if sequence and trained:
            tensor, gathering = _start_gather(kept.whole, axis)
            whole = Operand(tensor)
        partial_x = input_gradient()
        gathering.wait()
        grad_x, summing = _start_sum(partial_x, axis, sequence)
        of_weights = weight_grads(whole, operands)
        summing.wait()
        return [grad_x, *of_weights]

    def _gathered(self, x: Operand) -> Operand:
        return Operand(gather_tokens(x.whole, self._axis))

    def results_like(self, inputs: Tensors) -> Tensors:
        return [self._like(inputs[0], weight.shape[0], True) for weight in _parameters(inputs)[0]]


class RowParallel(_LinearOp):
    """A linear layer whose inputs are split: x (B, T, F/n), weight (D, F/n) -> the sum (B, T/n or T, D)."""

    @property
    def single(self) -> bool:
        """True on one rank.

        A compiler saves a tensor that an operator returns, and of one from a list its sum with the residual
        stream. In the first case the gradients of a block's norms take one kernel less; in the second one
        the kernels beside them read less, which is more than that where ranks share the tokens.
        """
        return self._axis.size == 1

    def forward(self, inputs: Tensors) -> Tensors:
        x, weight = inputs
        if self._fused:
            part = matmul_scatter(x.flatten(0, 1), weight.T, self._axis)
            return [part.view(x.shape[0], -1, part.shape[1])]
        operand = self._products.input(x, [weight], own_parameters(inputs), gradient=False)
        return self.results_of(operand, inputs)

    def results_of(self, x: Operand, inputs: Tensors) -> Tensors:
        (part,) = self._products.forward(x, inputs[1:], [], own_parameters(inputs))
        return [_sum(part.view(*inputs[0].shape[:-1], -1), self._axis, self._sequence)]

    def backward(self, saved: Tensors, grads: Tensors, parameters: Parameters = ()) -> Gradients:
        *kept, weight = saved
        parameter = parameters[0] if parameters else None
        if self._fused:
            gathered, (grad_x,) = gather_matmul(grads[0].flatten(0, 1), [weight], self._axis, keep=True)
            assert gathered is not None
            of_weight = self._of_weight(Operand(gathered), Operand(kept[0]), parameter)
            return [grad_x.view(kept[0].shape), of_weight]
        whole = gather_tokens(grads[0], self._axis, self._sequence)
        (grad,) = self._products.gradients([whole.flatten(0, -2)], [weight], parameters)
        grad_x = self._products.of_input([grad], [weight], parameters).view(*whole.shape[:-1], -1)
        x, later = _detached(operand_of(kept)), operand_of(grad.kept)

        def weight_grad() -> Gradients:
            trained = parameter is None or parameter.requires_grad
            return [self._of_weight(later, self._again(x, [weight], parameters) if trained else x, parameter)]

        if self.store is not None and self.store.open:
            self.store.put(parameters, weight_grad)
            return [grad_x]
        del grad
        return [grad_x, *weight_grad()]

    def results_like(self, inputs: Tensors) -> Tensors:
        return [self._like(inputs[0], inputs[1].shape[0], False)]


def _detached(x: Operand) -> Operand:
    """A kept operand without the graph behind it."""
    return operand_of([each.detach() for each in x.kept])


class TensorLinears:
    """Column- and row-parallel linear layers of the blocks on one rank of the tensor axis.

    With `cache` None they are operators of compiled blocks. `store` takes deferred weight gradients, and
    knows the sums of others.
    """

    def __init__(
        self,
        axis: Axis,
        sequence: bool,
        cache: RecomputeCache | None,
        store: WeightGradStore,
        products: Products,
    ) -> None:
        sequence = sequence and axis.size > 1
        self._columns = ColumnParallel(axis, sequence, cache, store, products)
        self._rows = RowParallel(axis, sequence, cache, store, products)
        self._enter = EnterParallelRegion(axis, sequence, cache)

    def project(self, x_BTD: Tensor, linears: Sequence[Linear]) -> tuple[Tensor, ...]:
        """Column-parallel layers of one input: (B, T/n or T, D) -> (B, T, F/n) each."""
        biases = [linear.bias for linear in linears if linear.bias is not None]
        return tuple(self._columns(x_BTD, *(linear.weight for linear in linears), *biases))

    def gather(self, x_BTD: Tensor) -> Tensor:
        """Activations of all tokens, which every rank uses: (B, T/n or T, D) -> (B, T, D)."""
        return self._enter(x_BTD)[0]

    def output(self, x_BTF: Tensor, linear: Linear, read_again: bool = True) -> Tensor:
        """A row-parallel layer: (B, T, F/n) -> (B, T/n or T, D); the bias is added once, to the sum."""
        (x_BTD,) = self._rows(x_BTF, linear.weight, read_again=read_again)
        return x_BTD if linear.bias is None else x_BTD + linear.bias

    def last_output(self, x_BTF: Tensor, linear: Linear) -> Tensor:
        """`output` for the last layer of a block, whose result no recomputing forward of the block reads."""
        return self.output(x_BTF, linear, read_again=False)
