"""Expert parallelism: each rank has some of the experts, and tokens travel to theirs and back.

Splits        the routed experts of every layer over ep ranks (Lepikhin et al. 2021, GShard), which are folded
              out of dp x cp x tp, apart from how attention uses these (Liu et al. 2025, parallel folding);
              and each expert's channels over etp neighbours. A slice of an expert is an expert of fewer
              channels that the same tokens take, so both are one all-to-all over ep x etp ranks.
Wire          for each copy of a token that has an expert on another rank, D channels of b bytes to compute
              in, a of sums (4; 8 for fp64), each layer and microbatch, with etp copies for the slices:
                forward   all_to_all   there D b + a (its weight), back D b
                backward  all_to_all   there D b, back D b + a
              and before, 8 bytes for each expert on another rank (times etp): how many copies come.
              With even routing a copy leaves with f = (n-1)/n. A second forward sends again what it needs,
              and nothing where products are kept.
Saves         all but 1/(ep etp) of the experts' weights, gradients and states, and ZeRO shards those over
              the ranks that hold the same ones.

Messages are in the format to compute in, and what comes home is added up in fp32 at least. One part's
messages run beside another's products (`layout.expert_parts`), and all beside the shared experts'.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from meshwright.model.decoder import Decoder
from meshwright.model.experts import Results
from meshwright.model.token_dispatcher import TokenDispatcher, row_places
from meshwright.parallel.collectives import start_all_gather, start_all_to_all, start_all_to_all_rows
from meshwright.parallel.deferred_wgrad import WeightGradStore
from meshwright.parallel.mesh import Axis, Mesh, Pending
from meshwright.parallel.recompute import RecomputeCache


@dataclass(frozen=True)
class _Sent:
    """Rows under way; `sent` must live until they have arrived."""

    pending: Pending
    received: Tensor
    sent: Tensor


class AllToAllDispatcher(TokenDispatcher):
    """A trip to experts on ep x etp ranks; one of R rows comes from each that sends to this one."""

    def __init__(
        self,
        axis: Axis,
        slices: int,
        kept: RecomputeCache,
        experts: int,
        experts_Nk: Tensor,
        room_Nk: Tensor | None,
    ) -> None:
        self._axis, self._slices, self._kept = axis, slices, kept
        super().__init__(experts_Nk, room_Nk, experts)

    def _settle(self, order: Tensor, position_Nk: Tensor) -> None:
        ranks, slices = self._axis.size, self._slices
        by_owner = self.counts.view(ranks // slices, 1, -1)
        leaving = by_owner.expand(-1, slices, -1).reshape(ranks, -1)
        (coming,) = self._kept.run(None, lambda: (self._exchanged(leaving),))
        listed = self._read(torch.cat([leaving, coming]))
        self._leaving = [sum(row) for row in listed[:ranks]]
        self._coming = [sum(row) for row in listed[ranks:]]
        self.place, self.sizes = row_places(coming, listed[ranks:])
        self._source = order.new_zeros(sum(self.sizes))
        self._source[self.place] = torch.arange(len(self.place), device=order.device)
        blocks = self._leaving[::slices]
        sorted_pairs = order[: sum(blocks)].split(blocks)
        self.pair = torch.cat([block for block in sorted_pairs for _ in range(slices)])
        self.token = self.pair // self.top_k
        self.home = self._homes(position_Nk, by_owner)

    def _exchanged(self, leaving: Tensor) -> Tensor:
        coming = torch.empty_like(leaving)
        start_all_to_all(coming, leaving.contiguous(), self._axis).wait()
        return coming

    def _homes(self, position_Nk: Tensor, by_owner: Tensor) -> Tensor:
        """(N, k slices): the places of a copy's slices among all that this rank sent."""
        sizes = by_owner.sum((1, 2))
        ends = sizes.cumsum(0)
        last = max(int(sum(self._leaving)) // self._slices - 1, 0)
        position = position_Nk.clamp(max=last)  # of those that stayed anywhere
        owner = torch.bucketize(position, ends, right=True).clamp(max=len(sizes) - 1)
        first = position + (ends - sizes)[owner] * (self._slices - 1)
        slices = torch.arange(self._slices, device=position.device)
        return (first.unsqueeze(2) + slices * sizes[owner].unsqueeze(2)).flatten(1)

    def send(self, x_NC: Tensor, index: Tensor) -> _Sent | None:
        if self._kept.serves("matmul"):
            return None
        return self._under_way(x_NC.index_select(0, index), self._coming, self._leaving)

    def receive(self, sent: _Sent | None) -> Tensor:
        (rows,) = self._kept.run("matmul", lambda: (self._arrived(sent).index_select(0, self._source),))
        return rows

    def send_back(self, rows_RC: Tensor) -> _Sent | None:
        if self._kept.second:
            return None
        return self._under_way(rows_RC.index_select(0, self.place), self._leaving, self._coming)

    def receive_back(self, sent: _Sent | None) -> Tensor:
        (rows,) = self._kept.run("matmul", lambda: (self._arrived(sent),), False)
        return rows

    def _under_way(self, sent: Tensor, coming: list[int], leaving: list[int]) -> _Sent:
        received = sent.new_empty(sum(coming), sent.shape[1])
        return _Sent(start_all_to_all_rows(received, sent, coming, leaving, self._axis), received, sent)

    def _arrived(self, sent: Any) -> Tensor:
        sent.pending.wait()
        received: Tensor = sent.received
        return received


class _OwnRows(torch.autograd.Function):
    """This tensor rank's rows of a stream that all of them have whole: (B, T, D) -> (B, T/n, D)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return _own(x, axis)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _everyones(grad, ctx.axis), None


class _AllRows(torch.autograd.Function):
    """The way back: (B, T/n, D) -> (B, T, D)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return _everyones(x, axis)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _own(grad, ctx.axis), None


def _own(x: Tensor, axis: Axis) -> Tensor:
    batch, length, channels = x.shape
    return x.reshape(axis.size, batch, length // axis.size, channels)[axis.rank]


def _everyones(x: Tensor, axis: Axis) -> Tensor:
    whole = x.new_empty(x.shape[0], x.shape[1] * axis.size, x.shape[2])
    start_all_gather(whole.view(-1), x.contiguous().view(-1), axis).wait()
    return whole


def split_experts(decoder: Decoder, mesh: Mesh, kept: RecomputeCache, later: WeightGradStore | None) -> None:
    """Let the decoder's routed experts (already cut, on `meta`) be reached across the expert axis.

    `kept` remembers results for a second forward; `later` takes gradients of weights where they are put off.
    Each rank routes its own tokens, also where tensor ranks have them all.
    """
    layout, moe = mesh.layout, decoder.spec.moe
    if moe is None:
        return
    tensor = mesh.tensor

    def put_off(parameters: Any, compute: Any) -> bool:
        if later is None or not later.open:
            return False
        later.put(parameters, compute)
        return True

    def keep(compute: Any, read_again: bool) -> Results:
        return kept.run("matmul", compute, read_again)

    for _, mixture in decoder.each_mixture():
        mixture.parts = layout.expert_parts
        mixture.experts.keep, mixture.experts.put_off = keep, put_off
        if mesh.expert.size > 1:
            mixture.sort = partial(AllToAllDispatcher, mesh.expert, layout.etp, kept, moe.experts)
        if tensor.size > 1 and not layout.sequence_parallel:
            mixture.enter = lambda x: _OwnRows.apply(x, tensor)
            mixture.leave = lambda x: _AllRows.apply(x, tensor)
