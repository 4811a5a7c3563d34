"""Expert parallelism: each rank holds some of the experts, and tokens are sent to theirs and back.

Splits        the routed experts of every layer over ep ranks (Lepikhin et al. 2021, GShard), which are folded
              out of dp x cp x tp, independently of attention's use of these (Liu et al. 2025, parallel
              folding); and each expert's channels over etp neighbours. A slice of an expert is an expert of
              fewer channels that processes the same tokens, so both are one all-to-all over ep x etp ranks.
Wire          for each copy of a token that has an expert on another rank, D channels of b bytes to compute
              in, a of sums (4; 8 for fp64), each layer and microbatch, with etp copies for the slices:
                forward   all_to_all   dispatch D b + a (its weight), combine D b
                backward  all_to_all   dispatch D b, combine D b + a
              one message for each of the four, with a row and its weight (or the gradient) side by side,
              also its token's key, of 8 bytes, where adapters of experts drop some of what it brings; and
              before that the number of copies, 8 bytes for each expert on another rank (times etp).
              With even routing (n-1)/n of the copies are sent. A recomputing forward sends again what it
              needs, which is nothing where matmuls are saved.
Saves         all but 1/(ep etp) of the experts' weights, gradients and states; ZeRO shards those over the
              ranks that hold the same experts.

Messages are in the compute format, and copies are summed in at least fp32. Messages of one chunk of tokens
overlap with matmuls of another (`layout.expert_parts`), and all with the shared experts'.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from meshwright.comm.collectives import start_all_to_all
from meshwright.comm.mesh import Axis, Mesh
from meshwright.comm.traffic_counter import Pending
from meshwright.kernels import expert_rows
from meshwright.kernels.with_backward import with_backward
from meshwright.model.hooks import Admit, ExpertsHooks, MoeHooks
from meshwright.model.low_precision_linear import Products
from meshwright.model.token_dispatcher import (
    Column,
    RowGroups,
    TokenDispatcher,
    assign_rows,
    padded_sizes,
    place_rows,
)
from meshwright.parallel.deferred_wgrad import WeightGradStore
from meshwright.parallel.expert_buffers import ExpertBuffers
from meshwright.parallel.recompute_cache import RecomputeCache
from meshwright.parallel.tensor_linears import gather_tokens


class _Sent(NamedTuple):
    """Rows in flight, those of all columns side by side; `sent` must live until they have arrived."""

    pending: Pending
    received: Tensor
    sent: Tensor
    columns: list[tuple[torch.dtype, int]]
    """The format of each column, and how many elements of the first one's it takes."""

    def arrived(self, index: Tensor | None = None, holes: bool = False) -> tuple[Tensor, ...]:
        """The columns, or the rows `index` of them, among which may be `holes`."""
        self.pending.wait()
        widths, rows = [width for _, width in self.columns], self.received
        parts = rows.split(widths, 1) if index is None else expert_rows.separate(rows, widths, index, holes)
        return tuple(
            part if part.dtype == dtype else part.contiguous().view(dtype)
            for part, (dtype, _) in zip(parts, self.columns, strict=True)
        )


class AllToAllDispatcher(TokenDispatcher):
    """Dispatches tokens to experts on ep x etp ranks; its R rows come from all ranks that send to this
    one."""

    _uneven = True
    """True if numbers of rows differ between ranks, so that the host has to know them."""

    def __init__(self, axis: Axis, slices: int, cache: RecomputeCache, *routing: Any) -> None:
        """`routing` are the arguments of `TokenDispatcher`."""
        self._axis, self._slices, self._cache = axis, slices, cache
        super().__init__(*routing)

    def _plan(self, order: Tensor, position_Nk: Tensor) -> None:
        ranks, slices = self._axis.size, self._slices
        by_owner = self.counts.view(ranks // slices, 1, -1)
        sent = by_owner.expand(-1, slices, -1).reshape(ranks, -1)
        received, on_host = self._cache.run(None, lambda: self._exchange_counts(sent))
        listed = on_host.tolist()
        self._sent_rows = [sum(row) for row in listed[:ranks]]
        self._received_rows = [sum(row) for row in listed[ranks:]]
        self.row, ends = assign_rows(received, sum(self._received_rows))
        sizes = padded_sizes(listed[ranks:])
        self.groups = RowGroups(ends, sizes)
        self._source = order.new_zeros(sum(sizes))
        self._source[self.row] = torch.arange(len(self.row), device=order.device)
        blocks = self._sent_rows[::slices]
        sorted_copies = order[: sum(blocks)].split(blocks)
        self.copy = torch.cat([block for block in sorted_copies for _ in range(slices)])
        self.token = self.copy // self.top_k
        self.copy_rows = self._rows_of_copies(position_Nk, by_owner)

    def _exchange_counts(self, sent: Tensor) -> tuple[Tensor, Tensor]:
        """Copies from each rank, and those to and from each on the host: a recomputing forward reads both."""
        received = self._received_counts(sent)
        return received, self._to_host(torch.cat([sent, received]))

    def _received_counts(self, sent: Tensor) -> Tensor:
        """Copies from each rank for each expert (S, E), given those that this rank sends to each."""
        received = torch.empty_like(sent)
        start_all_to_all(received, sent.contiguous(), self._axis).wait()
        return received

    def _rows_of_copies(self, position_Nk: Tensor, by_owner: Tensor) -> Tensor:
        """(N, k slices): positions of each copy's slices among all rows that this rank sends."""
        last = max(sum(self._sent_rows) // self._slices - 1, 0)
        position = position_Nk.clamp(max=last)  # any row for dropped copies, which are masked later
        if self._slices == 1:
            return position
        sizes = by_owner.sum((1, 2))
        ends = sizes.cumsum(0)
        owner = torch.bucketize(position, ends, right=True).clamp(max=len(sizes) - 1)
        first = position + (ends - sizes)[owner] * (self._slices - 1)
        slices = torch.arange(self._slices, device=position.device)
        return (first.unsqueeze(2) + slices * sizes[owner].unsqueeze(2)).flatten(1)

    def send(self, *columns: Column) -> _Sent | None:
        if self._cache.serves("matmul"):
            return None
        return self._start(columns, self._received_rows, self._sent_rows)

    def receive(self, sent: Any) -> Sequence[Tensor]:
        return self._cache.run("matmul", lambda: sent.arrived(self._source, self.holes))

    def send_back(self, *columns_R: Tensor) -> _Sent | None:
        if self._cache.recomputing:
            return None
        columns = [(rows, self.row) for rows in columns_R]
        return self._start(columns, self._sent_rows, self._received_rows)

    def receive_back(self, sent: Any) -> Sequence[Tensor]:
        return self._cache.run("matmul", lambda: sent.arrived(), False)

    def _start(self, columns: Sequence[Column], received_rows: list[int], sent_rows: list[int]) -> _Sent:
        """Start one message with the bytes of all columns, each row's next to each other."""
        first = columns[0][0].dtype
        parts = [(values.contiguous().view(first), index) for values, index in columns]
        sent = expert_rows.join(parts, self.holes)
        received = sent.new_empty(sum(received_rows), sent.shape[1])
        rows = (received_rows, sent_rows) if self._uneven else ()
        pending = start_all_to_all(received, sent, self._axis, *rows)
        widths = [values.shape[1] for values, _ in parts]
        formats = [values.dtype for values, _ in columns]
        return _Sent(pending, received, sent, list(zip(formats, widths, strict=True)))


class BoundedDispatcher(AllToAllDispatcher):
    """Dispatches in messages of `rows` rows for each rank, whose numbers of copies stay on the device.

    Rows that hold no copy are sent as zeros.
    """

    _uneven = False

    def __init__(self, buffers: ExpertBuffers, rows: int, *dispatch: Any) -> None:
        """`dispatch` are the arguments of `AllToAllDispatcher`."""
        self._buffers, self._rows = buffers, rows
        super().__init__(*dispatch)

    def _plan(self, order: Tensor, position_Nk: Tensor) -> None:
        self.holes = True
        ranks, slices, rows = self._axis.size, self._slices, self._rows
        self._sent_rows = self._received_rows = [rows] * ranks
        by_owner = self.counts.view(ranks // slices, -1)
        due = by_owner.sum(1)
        if not self._cache.recomputing:
            self._buffers.note(due, rows, self.tokens * self.top_k * slices / ranks)
        ends = by_owner.cumsum(1).clamp_(max=rows)
        sent = torch.diff(ends, prepend=torch.zeros_like(ends[:, :1])).repeat_interleave(slices, 0)
        self.row, self._source, ends_E, sizes = self._arriving(sent)
        self.groups = RowGroups(ends_E, sizes)
        place = torch.arange(rows, device=order.device)
        first = due.cumsum(0) - due
        copies = order[(first.unsqueeze(1) + place).clamp_(max=len(order) - 1)]
        copies = copies.masked_fill_(place >= due.unsqueeze(1), -1)
        self.copy = copies.repeat_interleave(slices, 0).flatten()
        self.token = self.copy.div(self.top_k, rounding_mode="floor")
        self.copy_rows = self._rows_of(position_Nk, first, due)

    def _arriving(self, sent: Tensor) -> tuple[Tensor, Tensor, Tensor, tuple[int, ...] | None]:
        """The row at the experts of each that arrives, its inverse, and the experts' `RowGroups`."""
        ranks, sizes = self._axis.size, None
        if self.takes_ends:
            (received,) = self._cache.run(None, lambda: (self._received_counts(sent),))
        else:
            received, on_host = self._cache.run(None, lambda: self._exchange_counts(sent))
            sizes = padded_sizes(on_host.tolist()[ranks:])
        return *place_rows(received, self._rows), sizes

    def _rows_of(self, position_Nk: Tensor, first: Tensor, due: Tensor) -> Tensor:
        """(N, k slices): positions of each copy's slices among all rows that this rank sends, -1 for none."""
        slices, rows = self._slices, self._rows
        owner = torch.bucketize(position_Nk, first + due, right=True).clamp_(max=len(due) - 1)
        place = position_Nk - first[owner]
        absent = (place >= due[owner]) | (place >= rows)
        each = (owner * slices).unsqueeze(2) + torch.arange(slices, device=owner.device)
        found = each * rows + place.unsqueeze(2)
        return found.masked_fill_(absent.unsqueeze(2), -1).flatten(1)


@dataclass(frozen=True)
class ExpertDispatch:
    """Makes the dispatcher of a layer's tokens over the expert axis, whose messages may be bounded."""

    axis: Axis
    slices: int
    cache: RecomputeCache
    buffers: ExpertBuffers
    exact: Callable[..., AllToAllDispatcher] = AllToAllDispatcher
    bounded: Callable[..., AllToAllDispatcher] = BoundedDispatcher

    def __call__(
        self, experts_Nk: Tensor, admitted_Nk: Tensor | None, experts: int, takes_ends: bool
    ) -> TokenDispatcher:
        """The arguments are those of `TokenDispatcher`."""
        routing = self.axis, self.slices, self.cache, experts_Nk, admitted_Nk, experts, takes_ends
        rows = self.buffers.rows(len(experts_Nk))
        return self.exact(*routing) if rows is None else self.bounded(self.buffers, rows, *routing)


def _own_tokens(x: Tensor, axis: Axis) -> Tensor:
    """This tensor rank's tokens of activations that all of them hold: (B, T, D) -> (B, T/n, D)."""
    batch, length, channels = x.shape
    return x.reshape(axis.size, batch, length // axis.size, channels)[axis.rank]


def expert_parallel_hooks(
    mesh: Mesh,
    admit: Admit,
    cache: RecomputeCache,
    store: WeightGradStore,
    products: Products,
    buffers: ExpertBuffers,
) -> MoeHooks:
    """Hooks of the MoE layers on one rank: dispatch over the expert axis, with `admit` of the load balancer.

    `buffers` say how many rows a message has, where that is bounded. `cache` keeps results for a recomputing
    forward; `store` takes deferred weight gradients, and says where any are written. Each rank routes its own
    tokens, even where tensor ranks hold them all.
    """
    layout, tensor = mesh.layout, mesh.tensor

    def defer(parameters: Any, compute: Any) -> bool:
        if not store.open:
            return False
        store.put(parameters, compute)
        return True

    experts = ExpertsHooks(
        cached=lambda compute, read_again: cache.run("matmul", compute, read_again),
        defer=defer,
        gradient_sum=lambda parameter: store.gradient_sum(parameter),
        products=products,
        slice=mesh.expert.rank % layout.etp,
        group=mesh.expert.rank // layout.etp,
    )
    hooks = MoeHooks(admit=admit, chunks=layout.expert_parts, shard=tensor.rank, experts=experts)
    if mesh.expert.size > 1:
        hooks = replace(hooks, dispatch=ExpertDispatch(mesh.expert, layout.etp, cache, buffers))
    if tensor.size > 1 and not layout.sequence_parallel:
        scatter, gather = partial(_own_tokens, axis=tensor), partial(gather_tokens, axis=tensor)
        hooks = replace(
            hooks,
            scatter_tokens=partial(with_backward, scatter, gather),
            gather_tokens=partial(with_backward, gather, scatter),
        )
    return hooks
