"""Tensor parallelism with sequence sharding: the layers' inside is split, and between them the tokens.

Splits        attention by heads, the feed-forward layer by its channels (Shoeybi et al. 2019, §3), embedding
              and head by the vocabulary. With `sequence_parallel` norms, residual stream and their gradients
              by tokens between those regions (Korthikanti et al. 2022, §4.2.2). Of key-value heads fewer than
              ranks, neighbours hold the same one.
Wire          for N tokens of D channels in a microbatch, b bytes to compute in, a block, f = (n-1)/n:
                sequence sharded   forward   2 all-gathers and 2 reduce-scatters of N D b f each
                                   backward  4 all-gathers (2 of them instead of keeping what the forward
                                             gathered) and 2 reduce-scatters
                else               2 all-reduces of 2 N D b f, forward and backward each
              once more around embedding and head; and in the loss 2 numbers a token from each rank. Attention
              over latents has their channels for D where its maps begin, and of the keys' turning part, which
              nothing keeps a rank's tokens of, no second gather.
Saves         1/n of the weights, their gradients and states, of what the layers keep inside; with sequence
              sharding of what they keep between, too.

A column-parallel map sends while it computes: the gather of its input for the weights' gradient runs beside
the product that gives the input's gradient, whose sum then travels beside the weights' gradient (Korthikanti
et al. 2022, §4.2.2). Tokens are cut as they lie in memory, (B, T) flattened, so no collective needs a
transposed copy: a rank's (B, T/n, D) is a name for N/n rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from meshwright.model.attention_mla import LatentAttention
from meshwright.model.decoder import Decoder, Embed, Head
from meshwright.model.linear import Linear, project
from meshwright.model.loss import VocabularyPart, linear_cross_entropy
from meshwright.parallel.collectives import (
    DONE,
    Pending,
    gather_matmul,
    gather_rows,
    matmul_scatter,
    reach_each_other,
    start_all_gather,
    start_all_reduce,
    start_reduce_scatter,
)
from meshwright.parallel.joint import Joint, Tensors, empty
from meshwright.parallel.later import Later
from meshwright.parallel.mesh import Axis
from meshwright.parallel.recompute import Kept
from meshwright.spec.parameters import Piece, parameters, piece_of

# Whole tokens and shards of them ------------------------------------------------------------------------


def _start_gather(x: Tensor, axis: Axis) -> tuple[Tensor, Pending]:
    """(B, T/n, D) -> (B, T, D), on its way."""
    whole = x.new_empty(x.shape[0], x.shape[1] * axis.size, x.shape[2])
    return whole, start_all_gather(whole.view(-1), x.contiguous().view(-1), axis)


def _start_scatter(x: Tensor, axis: Axis) -> tuple[Tensor, Pending]:
    """The sum over the ranks of (B, T, D), cut to (B, T/n, D), on its way; `x` must live until then."""
    part = x.new_empty(x.shape[0], x.shape[1] // axis.size, x.shape[2])
    return part, start_reduce_scatter(part.view(-1), x.view(-1), axis)


def _start_sum(x: Tensor, axis: Axis, sequence: bool) -> tuple[Tensor, Pending]:
    """Contiguous (B, T, D) added over the ranks; cut to tokens with `sequence`, else in place."""
    return _start_scatter(x, axis) if sequence else (x, start_all_reduce(x, axis))


def _add_up(x: Tensor, axis: Axis, sequence: bool) -> Tensor:
    x = x.contiguous()
    found, pending = _start_sum(x, axis, sequence)
    pending.wait()
    return found


def _whole(x: Tensor, axis: Axis, sequence: bool) -> Tensor:
    if not sequence:
        return x
    whole, pending = _start_gather(x, axis)
    pending.wait()
    return whole


class _Enter(torch.autograd.Function):
    """Into a region where each rank has all tokens and computes a part; its gradients are added."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, sequence: bool, kept: Kept | None = None) -> Tensor:
        ctx.axis, ctx.sequence = axis, sequence
        if not sequence:
            return x.view_as(x)
        if kept is None:
            return _whole(x, axis, True)
        (found,) = kept.run("matmul", lambda: (_whole(x, axis, True),))
        return found

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _enter_backward(grad, ctx.axis, ctx.sequence), None, None, None


def _enter_backward(grad: Tensor, axis: Axis, sequence: bool) -> Tensor:
    # The incoming gradient may be shared, so a sum in place works on a copy.
    return _add_up(grad if sequence else grad.clone(), axis, sequence)


class _Leave(torch.autograd.Function):
    """Out of such a region: the parts are added, and cut to tokens when those are sharded outside."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, sequence: bool) -> Tensor:
        ctx.axis, ctx.sequence = axis, sequence
        return _add_up(x if sequence else x.clone(), axis, sequence)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _whole(grad, ctx.axis, ctx.sequence), None, None


class _Columns(torch.autograd.Function):
    """Several linear maps of one input, each with its outputs split; keeps the rank's tokens of the input."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, axis: Axis, sequence: bool, kept: Kept, later: Later, *maps: nn.Parameter | None
    ) -> tuple[Tensor, ...]:
        weights, biases = maps[::2], maps[1::2]
        ctx.axis, ctx.sequence, ctx.biased = axis, sequence, [bias is not None for bias in biases]
        ctx.later, ctx.maps = later, maps
        ctx.save_for_backward(x, *weights)
        return kept.run("matmul", lambda: _columns(x, weights, biases, axis, sequence))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        if ctx.later.open:
            flat = [grad.flatten(0, -2) for grad in grads]
            found = _add_up(_input_gradient(flat, weights, grads[0]), ctx.axis, ctx.sequence)
            ctx.later.put(
                ctx.maps, lambda: _in_turn(_of_maps(flat, _whole(x, ctx.axis, ctx.sequence), ctx.biased))
            )
            return found, *[None] * (4 + len(ctx.maps))
        grad_x, of_maps = _columns_backward(x, weights, ctx.biased, grads, ctx.axis, ctx.sequence)
        return grad_x, *[None] * 4, *_in_turn(of_maps)


OfMaps = tuple[list[Tensor], list[Tensor | None]]
"""The gradient of each map's weight, and of its bias if it has one."""


def _in_turn(of_maps: OfMaps) -> list[Tensor | None]:
    """Each map's weight and bias, one after the other."""
    return [grad for pair in zip(*of_maps, strict=True) for grad in pair]


def _columns(
    x: Tensor, weights: Sequence[Tensor | None], biases: Sequence[Tensor | None], axis: Axis, sequence: bool
) -> tuple[Tensor, ...]:
    whole = _whole(x, axis, sequence)
    return tuple(
        F.linear(whole, weight, bias)  # type: ignore[arg-type]
        for weight, bias in zip(weights, biases, strict=True)
    )


def _columns_backward(
    x: Tensor,
    weights: Sequence[Tensor],
    biased: Sequence[bool],
    grads: Sequence[Tensor],
    axis: Axis,
    sequence: bool,
) -> tuple[Tensor, OfMaps]:
    """The gradients of the input, and of the maps."""
    whole, arriving = _start_gather(x, axis) if sequence else (x, DONE)
    flat = [grad.flatten(0, -2) for grad in grads]
    grad_x = _input_gradient(flat, weights, grads[0])
    arriving.wait()
    found, leaving = _start_sum(grad_x, axis, sequence)
    of_maps = _of_maps(flat, whole, biased)
    leaving.wait()
    return found, of_maps


def _input_gradient(flat: Sequence[Tensor], weights: Sequence[Tensor], like_BTF: Tensor) -> Tensor:
    """(B, T, D): the sum of the maps' gradients (N, F) times their weights (F, D)."""
    found = flat[0] @ weights[0]
    for grad, weight in zip(flat[1:], weights[1:], strict=True):
        found.addmm_(grad, weight)
    return found.view(*like_BTF.shape[:-1], -1)


def _of_maps(flat: Sequence[Tensor], whole: Tensor, biased: Sequence[bool]) -> OfMaps:
    inputs = whole.flatten(0, -2)
    of_biases = [grad.sum(0) if has_bias else None for grad, has_bias in zip(flat, biased, strict=True)]
    return [grad.T @ inputs for grad in flat], of_biases


class _Rows(torch.autograd.Function):
    """A linear map whose inputs are split: its products are added over the ranks."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: nn.Parameter,
        axis: Axis,
        sequence: bool,
        kept: Kept,
        read_again: bool,
        later: Later,
    ) -> Tensor:
        ctx.axis, ctx.sequence, ctx.later, ctx.weight = axis, sequence, later, weight
        ctx.save_for_backward(x, weight)
        (found,) = kept.run("matmul", lambda: (_rows(x, weight, axis, sequence),), read_again)
        return found

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        if ctx.later.open:
            whole = _whole(grad, ctx.axis, ctx.sequence).flatten(0, -2)
            ctx.later.put((ctx.weight,), lambda: [whole.T @ x.flatten(0, -2)])
            return (whole @ weight).view(x.shape), *[None] * 6
        return *_rows_backward(x, weight, grad, ctx.axis, ctx.sequence), *[None] * 5


def _rows(x: Tensor, weight: Tensor, axis: Axis, sequence: bool) -> Tensor:
    return _add_up(F.linear(x, weight), axis, sequence)


def _rows_backward(
    x: Tensor, weight: Tensor, grad: Tensor, axis: Axis, sequence: bool
) -> tuple[Tensor, Tensor]:
    whole = _whole(grad, axis, sequence).flatten(0, -2)
    return (whole @ weight).view(x.shape), whole.T @ x.flatten(0, -2)


# The same maps as operators of a compiled block ---------------------------------------------------------


class _JointMap(Joint):
    kind = "matmul"

    def __init__(self, axis: Axis, sequence: bool, fused: bool) -> None:
        """`fused`: products overlap with their own messages where they can; else with each other's."""
        super().__init__()
        self._axis, self._sequence, self._fused = axis, sequence, fused


class JointColumns(_JointMap):
    """`_Columns` of (x, weight of each map, bias of each map or none)."""

    def forward(self, inputs: Tensors) -> Tensors:
        weights, biases = self._maps(inputs)
        if self._fused:
            x = inputs[0]
            _, products = gather_matmul(x.flatten(0, 1), [weight.T for weight in weights], self._axis)
            wholes = [product.view(x.shape[0], -1, product.shape[1]) for product in products]
            return [whole + bias for whole, bias in zip(wholes, biases, strict=True)] if biases else wholes
        return _columns(inputs[0], weights, biases or [None] * len(weights), self._axis, self._sequence)

    def keep(self, inputs: Tensors, results: Tensors) -> Tensors:
        return inputs[: 1 + len(results)]

    def backward(self, kept: Tensors, grads: Tensors, inputs: int) -> Tensors:
        x, *weights = kept
        biased = [inputs > len(kept)] * len(weights)
        grad_x, (of_weights, of_biases) = _columns_backward(
            x, weights, biased, grads, self._axis, self._sequence
        )
        return [grad_x, *of_weights, *(grad for grad in of_biases if grad is not None)]

    def results_like(self, inputs: Tensors) -> Tensors:
        batch, length, _ = inputs[0].shape
        length = length * self._axis.size if self._sequence else length
        return [empty(inputs[0], batch, length, weight.shape[0]) for weight in self._maps(inputs)[0]]

    def gradients_like(self, kept: Tensors, grads: Tensors, inputs: int) -> Tensors:
        biases = [empty(weight, weight.shape[0]) for weight in kept[1:]] if inputs > len(kept) else []
        return [*map(empty, kept), *biases]

    def _maps(self, inputs: Tensors) -> tuple[list[Tensor], list[Tensor]]:
        """Weights, and biases if there are any."""
        return [x for x in inputs[1:] if x.ndim == 2], [x for x in inputs[1:] if x.ndim == 1]


class JointRows(_JointMap):
    """`_Rows` of (x, weight)."""

    def forward(self, inputs: Tensors) -> Tensors:
        x, weight = inputs
        if self._fused:
            part = matmul_scatter(x.flatten(0, 1), weight.T, self._axis)
            return [part.view(x.shape[0], -1, part.shape[1])]
        return [_rows(x, weight, self._axis, self._sequence)]

    def keep(self, inputs: Tensors, results: Tensors) -> Tensors:
        return inputs

    def backward(self, kept: Tensors, grads: Tensors, inputs: int) -> Tensors:
        x, weight = kept
        if self._fused:
            whole, (grad_x,) = gather_matmul(grads[0].flatten(0, 1), [weight], self._axis, keep=True)
            assert whole is not None
            return grad_x.view(x.shape), whole.T @ x.flatten(0, 1)
        return _rows_backward(x, weight, grads[0], self._axis, self._sequence)

    def results_like(self, inputs: Tensors) -> Tensors:
        batch, length, _ = inputs[0].shape
        length = length // self._axis.size if self._sequence else length
        return [empty(inputs[0], batch, length, inputs[1].shape[0])]

    def gradients_like(self, kept: Tensors, grads: Tensors, inputs: int) -> Tensors:
        return [*map(empty, kept)]


class JointEnter(_JointMap):
    """`_Enter` of (x,)."""

    def forward(self, inputs: Tensors) -> Tensors:
        (x,) = inputs
        return [_whole(x, self._axis, True) if self._sequence else x.clone()]

    def keep(self, inputs: Tensors, results: Tensors) -> Tensors:
        return []

    def backward(self, kept: Tensors, grads: Tensors, inputs: int) -> Tensors:
        return [_enter_backward(grads[0], self._axis, self._sequence)]

    def results_like(self, inputs: Tensors) -> Tensors:
        batch, length, channels = inputs[0].shape
        return [empty(inputs[0], batch, length * self._axis.size if self._sequence else length, channels)]

    def gradients_like(self, kept: Tensors, grads: Tensors, inputs: int) -> Tensors:
        batch, length, channels = grads[0].shape
        return [empty(grads[0], batch, length // self._axis.size if self._sequence else length, channels)]


# The decoder's maps on one rank -------------------------------------------------------------------------


class TensorParallel:
    """The parts of a decoder that one rank of the tensor axis computes; of an axis of one rank, all."""

    def __init__(self, axis: Axis, sequence: bool, kept: Kept | None, later: Later) -> None:
        self.axis, self.sequence = axis, sequence and axis.size > 1
        self._kept, self._later = kept, later
        fused = kept is None and self.sequence and reach_each_other(axis)
        self._columns = JointColumns(axis, self.sequence, fused)
        self._rows = JointRows(axis, self.sequence, fused)
        self._enter = JointEnter(axis, self.sequence, fused)

    def project(self, x_BTD: Tensor, linears: Sequence[Linear]) -> tuple[Tensor, ...]:
        """Column-parallel maps of one input: (B, T/n or T, D) -> (B, T, F/n) each."""
        if self._kept is None:
            biases = [linear.bias for linear in linears if linear.bias is not None]
            return tuple(self._columns(x_BTD, *(linear.weight for linear in linears), *biases))
        maps = [tensor for linear in linears for tensor in (linear.weight, linear.bias)]
        found: tuple[Tensor, ...] = _Columns.apply(
            x_BTD, self.axis, self.sequence, self._kept, self._later, *maps
        )
        return found

    def share(self, x_BTD: Tensor) -> Tensor:
        """What every rank needs of all tokens, unchanged: (B, T/n or T, D) -> (B, T, D)."""
        if self._kept is None:
            return self._enter(x_BTD)[0]
        whole: Tensor = _Enter.apply(x_BTD, self.axis, self.sequence, self._kept)
        return whole

    def leave(self, x_BTF: Tensor, linear: Linear, last: bool = False) -> Tensor:
        """A row-parallel map: (B, T, F/n) -> (B, T/n or T, D); the bias is added once, to the sum.

        What the `last` map of a block gives is read by no second forward of that block.
        """
        if self._kept is None:
            (x_BTD,) = self._rows(x_BTF, linear.weight)
        else:
            x_BTD = _Rows.apply(
                x_BTF, linear.weight, self.axis, self.sequence, self._kept, not last, self._later
            )
        return x_BTD if linear.bias is None else x_BTD + linear.bias

    def leave_last(self, x_BTF: Tensor, linear: Linear) -> Tensor:
        """`leave` for the last map of a block."""
        return self.leave(x_BTF, linear, last=True)

    def embed(self, embed: Embed, piece: Piece, tokens_BT: Tensor, positions: Tensor) -> Tensor:
        """Vocabulary-parallel rows: those of other ranks are zeros here, and added."""
        row = tokens_BT - piece.first
        elsewhere = (row < 0) | (row >= piece.size)
        found = F.embedding(row.masked_fill(elsewhere, 0), embed.weight)
        found = found.masked_fill(elsewhere.unsqueeze(-1), 0)
        x_BTD: Tensor = _Leave.apply(found, self.axis, self.sequence)
        if embed.positions is None:
            return x_BTD
        return x_BTD + F.embedding(self._own(positions.expand(tokens_BT.shape)), embed.positions)

    def _own(self, whole_BT: Tensor) -> Tensor:
        """This rank's tokens: (B, T) -> (B, T/n)."""
        if not self.sequence:
            return whole_BT
        batch, length = whole_BT.shape
        return whole_BT.reshape(self.axis.size, batch, length // self.axis.size)[self.axis.rank]

    def head(self, head: Head, piece: Piece, x_BTD: Tensor, targets_BT: Tensor | None = None) -> Tensor:
        """The summed loss over a split vocabulary; no rank has, or gathers, the logits of another."""
        if targets_BT is None:
            raise ValueError("a decoder that is split over tensor ranks gives the loss, not the logits")
        x_BTD = _Enter.apply(head.norm(x_BTD), self.axis, self.sequence)
        part = VocabularyPart(piece.first, piece.size - piece.padding, self._combine)
        return linear_cross_entropy(x_BTD.flatten(0, 1), head.weight, targets_BT.flatten(), part=part)

    def _combine(self, mine_2N: Tensor) -> Tensor:
        everyone = gather_rows(mine_2N, self.axis)
        return torch.stack([everyone[:, 0].logsumexp(0), everyone[:, 1].sum(0)])


def split_tensors(
    decoder: Decoder, axis: Axis, sequence_parallel: bool, kept: Kept | None, later: Later | None
) -> dict[str, Piece]:
    """Cut the decoder's parameters (on `meta`) to this rank's pieces, and let its modules compute on those.

    `kept` is what a policy of recomputation decides over; without it the blocks' maps are operators
    (`joint.py`), as a compiler needs them. `later` takes gradients of the blocks' weights where a schedule
    puts them off. Returns every parameter's piece, by name.
    """
    model = decoder.spec
    pieces = {
        parameter.name: piece_of(parameter, model, axis.size, axis.rank, sequence_parallel)
        for unit in parameters(model).values()
        for parameter in unit
    }
    tensor = TensorParallel(axis, sequence_parallel, kept, later or Later())
    alone = TensorParallel(replace(axis, size=1, rank=0), False, kept, later or Later())
    if axis.size > 1:
        _cut(decoder, pieces)
        embed, head = decoder.embed, decoder.head
        _replace(embed, tensor.embed, embed, pieces["embed.weight"])
        _replace(head, tensor.head, head, pieces["embed.weight" if model.tied else "head.weight"])
    if axis.size > 1 or later is not None:
        for block in decoder.each_block():
            block.attn.project = block.mlp.project = tensor.project
            block.attn.leave, block.mlp.leave = tensor.leave, tensor.leave_last
            if isinstance(block.attn, LatentAttention):
                block.attn.share = tensor.share
                block.attn.narrow = alone.project if kept is not None else project
    return pieces


def _replace(module: nn.Module, forward: Callable[..., Tensor], *bound: Any) -> None:
    """Let a module compute `forward(*bound, *inputs)`; its hooks stay."""
    module.forward = partial(forward, *bound)


def _cut(decoder: Decoder, pieces: dict[str, Piece]) -> None:
    """Give every module a parameter of its piece's shape; tied ends share theirs."""
    made: dict[nn.Parameter, nn.Parameter] = {}
    names = {parameter: name for name, parameter in decoder.named_parameters()}
    for module in decoder.modules():
        for attribute, whole in list(module.named_parameters(recurse=False)):
            if whole not in made:
                made[whole] = nn.Parameter(whole.new_empty(pieces[names[whole]].shape))
            setattr(module, attribute, made[whole])
