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
              once more around embedding and head; and in the loss 2 numbers a token from each rank.
Saves         1/n of the weights, their gradients and states, of what the layers keep inside; with sequence
              sharding of what they keep between, too.

A column-parallel map sends while it computes: the gather of its input for the weights' gradient runs beside
the product that gives the input's gradient, whose sum then travels beside the weights' gradient (Korthikanti
et al. 2022, §4.2.2). Tokens are cut as they lie in memory, (B, T) flattened, so no collective needs a
transposed copy: a rank's (B, T/n, D) is a name for N/n rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from meshwright.model.decoder import Decoder, Embed, Head
from meshwright.model.linear import Linear
from meshwright.model.loss import VocabularyPart, linear_cross_entropy
from meshwright.parallel.collectives import (
    DONE,
    Pending,
    gather_rows,
    start_all_gather,
    start_all_reduce,
    start_reduce_scatter,
)
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
    def forward(ctx: Any, x: Tensor, axis: Axis, sequence: bool) -> Tensor:
        ctx.axis, ctx.sequence = axis, sequence
        return _whole(x, axis, sequence) if sequence else x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        # The incoming gradient may be shared, so a sum in place works on a copy.
        mine = grad if ctx.sequence else grad.clone()
        return _add_up(mine, ctx.axis, ctx.sequence), None, None


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
        ctx: Any, x: Tensor, axis: Axis, sequence: bool, kept: Kept, *maps: Tensor | None
    ) -> tuple[Tensor, ...]:
        weights, biases = maps[::2], maps[1::2]
        ctx.axis, ctx.sequence, ctx.biased = axis, sequence, [bias is not None for bias in biases]
        ctx.save_for_backward(x, *weights)

        def compute() -> tuple[Tensor, ...]:
            whole = _whole(x, axis, sequence)
            return tuple(
                F.linear(whole, weight, bias)  # type: ignore[arg-type]
                for weight, bias in zip(weights, biases, strict=True)
            )

        return kept.run("matmul", compute)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        whole, arriving = _start_gather(x, ctx.axis) if ctx.sequence else (x, DONE)
        flat = [grad.flatten(0, -2) for grad in grads]
        grad_x = flat[0] @ weights[0]
        for grad, weight in zip(flat[1:], weights[1:], strict=True):
            grad_x.addmm_(grad, weight)
        arriving.wait()
        whole_grad = grad_x.view(whole.shape)
        found, leaving = _start_sum(whole_grad, ctx.axis, ctx.sequence)
        inputs = whole.flatten(0, -2)
        of_maps: list[Tensor | None] = []
        for grad, biased in zip(flat, ctx.biased, strict=True):
            of_maps += [grad.T @ inputs, grad.sum(0) if biased else None]
        leaving.wait()
        return found, None, None, None, *of_maps


class _Rows(torch.autograd.Function):
    """A linear map whose inputs are split: its products are added over the ranks."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, axis: Axis, sequence: bool, kept: Kept, read_again: bool
    ) -> Tensor:
        ctx.axis, ctx.sequence = axis, sequence
        ctx.save_for_backward(x, weight)
        (found,) = kept.run("matmul", lambda: (_add_up(F.linear(x, weight), axis, sequence),), read_again)
        return found

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        whole = _whole(grad, ctx.axis, ctx.sequence).flatten(0, -2)
        return (whole @ weight).view(x.shape), whole.T @ x.flatten(0, -2), *[None] * 4


# The decoder's maps on one rank -------------------------------------------------------------------------


class TensorParallel:
    """The parts of a decoder that one rank of the tensor axis computes. With one rank nothing is changed."""

    def __init__(self, axis: Axis, sequence: bool, kept: Kept) -> None:
        self.axis, self.sequence, self._kept = axis, sequence and axis.size > 1, kept

    def project(self, x_BTD: Tensor, linears: Sequence[Linear]) -> tuple[Tensor, ...]:
        """Column-parallel maps of one input: (B, T/n or T, D) -> (B, T, F/n) each."""
        maps = [tensor for linear in linears for tensor in (linear.weight, linear.bias)]
        found: tuple[Tensor, ...] = _Columns.apply(x_BTD, self.axis, self.sequence, self._kept, *maps)
        return found

    def leave(self, linear: Linear, last: bool, x_BTF: Tensor) -> Tensor:
        """A row-parallel map: (B, T, F/n) -> (B, T/n or T, D); the bias is added once, to the sum.

        What the `last` map of a block gives is read by no second forward of that block.
        """
        x_BTD: Tensor = _Rows.apply(x_BTF, linear.weight, self.axis, self.sequence, self._kept, not last)
        return x_BTD if linear.bias is None else x_BTD + linear.bias

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


def split_tensors(decoder: Decoder, axis: Axis, sequence_parallel: bool, kept: Kept) -> dict[str, Piece]:
    """Cut the decoder's parameters (on `meta`) to this rank's pieces, and let its modules compute on those.

    `kept` is what a policy of recomputation decides over. Returns every parameter's piece, by name.
    """
    model = decoder.spec
    pieces = {
        parameter.name: piece_of(parameter, model, axis.size, axis.rank, sequence_parallel)
        for unit in parameters(model).values()
        for parameter in unit
    }
    if axis.size == 1:
        return pieces
    _cut(decoder, pieces)
    tensor = TensorParallel(axis, sequence_parallel, kept)
    embed, head = decoder.embed, decoder.head
    _replace(embed, tensor.embed, embed, pieces["embed.weight"])
    _replace(head, tensor.head, head, pieces["embed.weight" if model.tied else "head.weight"])
    for block in decoder.each_block():
        block.attn.project = block.mlp.project = tensor.project
        _replace(block.attn.o, tensor.leave, block.attn.o, False)
        _replace(block.mlp.down, tensor.leave, block.mlp.down, True)
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
