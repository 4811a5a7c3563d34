"""The way of tokens to their experts and back.

Shapes: N tokens, k experts of each, C channels, M copies that set out (a token has one for each of its
experts), R rows that the experts compute on: copies in the order of experts, each expert's padded with rows
of weight 0 to a multiple of ALIGN.

There and back are transposes of each other: a token's copies are dealt out, and what comes back of them is
added up, in fp32 at least. So the backward of the one is the other. Each is in two parts, so that a message
that is under way in between has company; here, where all experts are in one place, there is none.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from meshwright.model.experts import Sizes
from meshwright.spec.tiling import ALIGN


class TokenDispatcher:
    """One layer's tokens on their way; `sizes` are the rows of each expert that is here."""

    def __init__(self, experts_Nk: Tensor, admitted_Nk: Tensor | None, experts: int) -> None:
        """`experts_Nk` holds numbers below `experts`; copies that are not `admitted_Nk` stay."""
        self.tokens, self.top_k = experts_Nk.shape
        self.admitted = admitted_Nk
        self.going: Any = None
        self.coming: Any = None
        chosen = experts_Nk if admitted_Nk is None else experts_Nk.masked_fill(~admitted_Nk, experts)
        order = chosen.flatten().argsort(stable=True)
        self.counts = torch.bincount(chosen.flatten(), minlength=experts + 1)[:experts]
        position = torch.empty_like(order)
        position[order] = torch.arange(len(order), device=order.device)
        self._settle(order, position.view(self.tokens, self.top_k))

    def _settle(self, order: Tensor, position_Nk: Tensor) -> None:
        """Lay out the rows, given the copies in the order of experts and the position of each in that."""
        (counts,) = self._read(self.counts.view(1, -1))
        copies = sum(counts)
        place, self.sizes = row_places(self.counts.view(1, -1), [counts])
        rows = sum(self.sizes)
        self.pair = order.new_zeros(rows)
        self.pair[place] = order[:copies]
        self.token = self.pair // self.top_k
        self.place = place
        if copies < len(order):
            position_Nk = position_Nk.clamp(max=max(copies - 1, 0))
        self.home = place[position_Nk] if copies else torch.zeros_like(position_Nk)

    def _read(self, counts_SE: Tensor) -> list[list[int]]:
        """Counts of copies for each expert, from or to S places, on the host; it waits for the device."""
        found: list[list[int]] = counts_SE.tolist()
        return found

    # What moves -------------------------------------------------------------------------------------

    def send(self, x_NC: Tensor, index: Tensor) -> Any:
        """Set out with the rows `index` of `x_NC`."""
        return x_NC.index_select(0, index)

    def receive(self, sent: Any) -> Tensor:
        """(R, C): the rows of the experts that are here; those beyond a group's copies hold anything."""
        found: Tensor = sent
        return found

    def send_back(self, rows_RC: Tensor) -> Any:
        """Set out for home."""
        return rows_RC

    def receive_back(self, sent: Any) -> Tensor:
        """What `home` (N, k or more) numbers the rows of."""
        found: Tensor = sent
        return found

    def added_up(self, rows: Tensor) -> Tensor:
        """(N, C): the sum over each token's copies."""
        if not len(rows):
            return rows.new_zeros(self.tokens, rows.shape[1])
        exact = torch.promote_types(rows.dtype, torch.float32)
        found = rows.new_zeros(self.tokens, rows.shape[1], dtype=exact)
        for copy in range(self.home.shape[1]):
            found += self._only_admitted(rows.index_select(0, self.home[:, copy]), copy)
        return found.to(rows.dtype)

    def each(self, values: Tensor) -> Tensor:
        """(N, k): the value of each copy, of those that came home (their number,); 0 of those that stayed."""
        if not len(values):
            return values.new_zeros(self.tokens, self.top_k)
        found = values[self.home].view(self.tokens, self.top_k, -1).sum(2)
        return found if self.admitted is None else found.masked_fill(~self.admitted, 0)

    def _only_admitted(self, rows: Tensor, copy: int) -> Tensor:
        if self.admitted is None:
            return rows
        stayed = ~self.admitted[:, copy * self.top_k // self.home.shape[1]]
        return rows.masked_fill_(stayed.unsqueeze(1), 0)

    def weights(self, values_R: Tensor) -> Tensor:
        """The same with 0 for the rows that pad."""
        found = torch.zeros_like(values_R)
        found[self.place] = values_R[self.place]
        return found

    # Differentiable ---------------------------------------------------------------------------------

    def depart(self, x_ND: Tensor, weights_Nk: Tensor) -> Tensor:
        """Begin to bring tokens and their weights to the experts; give what this returns to `arrive`."""
        found: Tensor = _Depart.apply(x_ND, weights_Nk, self)
        return found

    def arrive(self, ticket: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens (R, D) and weights (R,) at the experts that are here."""
        found: tuple[Tensor, Tensor] = _Arrive.apply(ticket, self)
        return found

    def turn_back(self, y_RD: Tensor) -> Tensor:
        """Begin to bring home what the experts found; give what this returns to `come_home`."""
        found: Tensor = _TurnBack.apply(y_RD, self)
        return found

    def come_home(self, ticket: Tensor) -> Tensor:
        """(N, D): the sum over each token's experts."""
        found: Tensor = _ComeHome.apply(ticket, self)
        return found


class _Depart(torch.autograd.Function):
    """The ticket stands for what is under way, which a backward brings home under the same ticket."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weights: Tensor, trip: TokenDispatcher) -> Tensor:
        ctx.trip = trip
        trip.going = trip.send(x, trip.token), trip.send(weights.reshape(-1, 1), trip.pair)
        return x.new_empty(())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _grad: Tensor) -> tuple[Tensor, Tensor, None]:
        trip = ctx.trip
        (x, weights), trip.coming = trip.coming, None
        of_weights = trip.each(trip.receive_back(weights).squeeze(1))
        return trip.added_up(trip.receive_back(x)), of_weights, None


class _Arrive(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ticket: Tensor, trip: TokenDispatcher) -> tuple[Tensor, Tensor]:
        ctx.trip = trip
        (x, weights), trip.going = trip.going, None
        return trip.receive(x), trip.weights(trip.receive(weights).squeeze(1))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_x: Tensor, of_weights: Tensor) -> tuple[Tensor, None]:
        trip = ctx.trip
        trip.coming = trip.send_back(of_x), trip.send_back(of_weights.unsqueeze(1))
        return of_x.new_zeros(()), None


class _TurnBack(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, trip: TokenDispatcher) -> Tensor:
        ctx.trip = trip
        trip.coming = trip.send_back(y.detach())  # with its graph, which holds the trip, it would be a cycle
        return y.new_empty(())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _grad: Tensor) -> tuple[Tensor, None]:
        trip = ctx.trip
        going, trip.going = trip.going, None
        return trip.receive(going), None


class _ComeHome(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ticket: Tensor, trip: TokenDispatcher) -> Tensor:
        ctx.trip = trip
        coming, trip.coming = trip.coming, None
        return trip.added_up(trip.receive_back(coming))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        trip = ctx.trip
        trip.going = trip.send(grad, trip.token)
        return grad.new_zeros(()), None


def row_places(counts_SE: Tensor, listed: list[list[int]]) -> tuple[Tensor, Sizes]:
    """Where copies that come from S places, each expert by expert, lie among the rows, and sizes.

    `counts_SE` of them come from each place for each expert, `listed` on the host. Returned are the row of
    each, in the order of coming, and the rows of each expert.
    """
    experts = len(listed[0])
    sums = [sum(row[expert] for row in listed) for expert in range(experts)]
    sizes = tuple(-(-total // ALIGN) * ALIGN for total in sums)
    device = counts_SE.device
    starts_E = torch.tensor([0, *sizes[:-1]], dtype=torch.int64).cumsum(0).to(device)
    before_SE = counts_SE.cumsum(0) - counts_SE  # of the same expert, from places before
    coming_SE = (counts_SE.flatten().cumsum(0) - counts_SE.flatten()).view_as(counts_SE)
    shift = (starts_E + before_SE - coming_SE).flatten()
    copies = sum(sums)
    moved = shift.repeat_interleave(counts_SE.flatten(), output_size=copies)
    return torch.arange(copies, device=device) + moved, sizes
