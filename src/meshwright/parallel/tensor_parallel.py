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
from torch import Tensor, nn

from meshwright.model.attention_mla import LatentAttention
from meshwright.model.chunked_cross_entropy import VocabularyPart, linear_cross_entropy
from meshwright.model.decoder import Decoder, Embed, Head
from meshwright.model.embedding import embedding
from meshwright.model.linear import Linear, project
from meshwright.model.moe import Moe
from meshwright.parallel.collectives import gather_rows, reach_each_other
from meshwright.parallel.deferred_wgrad import WeightGradStore
from meshwright.parallel.mesh import Axis, Mesh
from meshwright.parallel.recompute import RecomputeCache
from meshwright.parallel.tensor_linears import (
    ColumnParallel,
    EnterParallelRegion,
    FusedColumnParallel,
    FusedEnterParallelRegion,
    FusedRowParallel,
    LeaveParallelRegion,
    RowParallel,
)
from meshwright.spec.parameters import Piece, expert_piece, parameters, piece_of


class TensorParallel:
    """The parts of a decoder that one rank of the tensor axis computes; of an axis of one rank, all."""

    def __init__(
        self, axis: Axis, sequence: bool, kept: RecomputeCache | None, later: WeightGradStore
    ) -> None:
        self.axis, self.sequence = axis, sequence and axis.size > 1
        self._kept, self._later = kept, later
        fused = kept is None and self.sequence and reach_each_other(axis)
        self._columns = FusedColumnParallel(axis, self.sequence, fused)
        self._rows = FusedRowParallel(axis, self.sequence, fused)
        self._enter = FusedEnterParallelRegion(axis, self.sequence, fused)

    def project(self, x_BTD: Tensor, linears: Sequence[Linear]) -> tuple[Tensor, ...]:
        """Column-parallel maps of one input: (B, T/n or T, D) -> (B, T, F/n) each."""
        if self._kept is None:
            biases = [linear.bias for linear in linears if linear.bias is not None]
            return tuple(self._columns(x_BTD, *(linear.weight for linear in linears), *biases))
        maps = [tensor for linear in linears for tensor in (linear.weight, linear.bias)]
        found: tuple[Tensor, ...] = ColumnParallel.apply(
            x_BTD, self.axis, self.sequence, self._kept, self._later, *maps
        )
        return found

    def share(self, x_BTD: Tensor) -> Tensor:
        """What every rank needs of all tokens, unchanged: (B, T/n or T, D) -> (B, T, D)."""
        if self._kept is None:
            return self._enter(x_BTD)[0]
        whole: Tensor = EnterParallelRegion.apply(x_BTD, self.axis, self.sequence, self._kept)
        return whole

    def leave(self, x_BTF: Tensor, linear: Linear, last: bool = False) -> Tensor:
        """A row-parallel map: (B, T, F/n) -> (B, T/n or T, D); the bias is added once, to the sum.

        What the `last` map of a block gives is read by no second forward of that block.
        """
        if self._kept is None:
            (x_BTD,) = self._rows(x_BTF, linear.weight)
        else:
            x_BTD = RowParallel.apply(
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
        found = embedding(row.masked_fill(elsewhere, 0), embed.weight)
        found = found.masked_fill(elsewhere.unsqueeze(-1), 0)
        x_BTD: Tensor = LeaveParallelRegion.apply(found, self.axis, self.sequence)
        if embed.positions is None:
            return x_BTD
        return x_BTD + embedding(self._own(positions.expand(tokens_BT.shape)), embed.positions)

    def _own(self, whole_BT: Tensor) -> Tensor:
        """This rank's tokens: (B, T) -> (B, T/n)."""
        if not self.sequence:
            return whole_BT
        batch, length = whole_BT.shape
        return whole_BT.reshape(self.axis.size, batch, length // self.axis.size)[self.axis.rank]

    def head(
        self, head: Head, piece: Piece, x_BTD: Tensor, targets_BT: Tensor | None = None, scale: float = 1.0
    ) -> Tensor:
        """`scale` times the summed loss over a split vocabulary; no rank gathers the logits of another."""
        if targets_BT is None:
            raise ValueError("a decoder that is split over tensor ranks gives the loss, not the logits")
        x_BTD = EnterParallelRegion.apply(head.norm(x_BTD), self.axis, self.sequence)
        part = VocabularyPart(piece.first, piece.size - piece.padding, self._combine)
        tokens, targets = x_BTD.flatten(0, 1), targets_BT.flatten()
        return linear_cross_entropy(tokens, head.weight, targets, part=part, scale=scale)

    def _combine(self, mine_2N: Tensor) -> Tensor:
        everyone = gather_rows(mine_2N, self.axis)
        return torch.stack([everyone[:, 0].logsumexp(0), everyone[:, 1].sum(0)])


def split_tensors(
    decoder: Decoder,
    mesh: Mesh,
    sequence_parallel: bool,
    kept: RecomputeCache | None,
    later: WeightGradStore | None,
) -> dict[str, Piece]:
    """Cut the decoder's parameters (on `meta`) to this rank's pieces, and let its modules compute on those.

    `kept` is what a policy of recomputation decides over; without it the blocks' maps are operators
    (`joint.py`), as a compiler needs them. `later` takes gradients of the blocks' weights where a schedule
    puts them off. Returns every parameter's piece, by name.
    """
    model = decoder.spec
    axis, layout = mesh.tensor, mesh.layout
    pieces = {
        parameter.name: expert_piece(parameter, layout.ep, layout.etp, mesh.expert.rank)
        if parameter.expert
        else piece_of(parameter, model, axis.size, axis.rank, sequence_parallel)
        for unit in parameters(model).values()
        for parameter in unit
    }
    tensor = TensorParallel(axis, sequence_parallel, kept, later or WeightGradStore())
    alone = TensorParallel(replace(axis, size=1, rank=0), False, kept, later or WeightGradStore())
    if max(axis.size, mesh.expert.size) > 1:
        _cut(decoder, pieces)
    if axis.size > 1:
        embed, head = decoder.embed, decoder.head
        _replace(embed, tensor.embed, embed, pieces["embed.weight"])
        _replace(head, tensor.head, head, pieces["embed.weight" if model.tied else "head.weight"])
    if axis.size > 1 or later is not None:
        for block in decoder.each_block():
            block.attn.project, block.attn.leave = tensor.project, tensor.leave
            dense = block.mlp.shared if isinstance(block.mlp, Moe) else block.mlp
            if dense is not None:
                dense.project, dense.leave = tensor.project, tensor.leave_last
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
