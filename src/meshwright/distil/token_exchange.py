"""Rows about the tokens of a batch, moved from the ranks of one layout to those of another of one world.

Splits        nothing: a rank has the rows of some samples, of all tokens or of a context rank's, and wants
              those of others. Equal shares of several ranks are copies, of which one is sent.
Wire          one all-to-all over the world: each rank receives the rows that it wants, but those that it has
              itself. N tokens of C numbers of b bytes are N C b.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from meshwright.comm.collectives import start_all_to_all
from meshwright.comm.mesh import Axis, rank_grid
from meshwright.parallel.context_parallel import zigzag
from meshwright.schedule import schedule_of
from meshwright.spec.layout import Layout


class Share(NamedTuple):
    """Tokens that a rank has: of samples [first, end) those of one of `contexts` context ranks."""

    first: int
    end: int
    context: int
    contexts: int


class Coordinates(NamedTuple):
    """A rank's place on the axes of a layout."""

    pipeline: int
    data: int
    context: int
    tensor: int


def coordinates(layout: Layout) -> list[Coordinates]:
    """The places of all ranks, in their order."""
    grid = rank_grid(layout)
    found = [Coordinates(0, 0, 0, 0)] * layout.world_size
    for place, rank in zip(torch.cartesian_prod(*map(torch.arange, grid.shape)), grid.flatten(), strict=True):
        pipeline, replicate, shard, tensor = place.tolist()
        data, context = divmod(shard, layout.cp)
        found[int(rank)] = Coordinates(pipeline, replicate * layout.dp + data, context, tensor)
    return found


def whole_samples(layout: Layout, samples: int) -> list[Share | None]:
    """The samples that each rank reads, of so many in the batch."""
    each = samples // layout.data_ranks
    return [Share(at.data * each, (at.data + 1) * each, 0, 1) for at in coordinates(layout)]


def tokens_at_the_end(layout: Layout, samples: int) -> list[Share | None]:
    """The tokens whose logits each rank computes; None for ranks without the last stage."""
    each, last = samples // layout.data_ranks, schedule_of(layout, 1).rank_of[-1]
    return [
        Share(at.data * each, (at.data + 1) * each, at.context, layout.cp) if at.pipeline == last else None
        for at in coordinates(layout)
    ]


class TokenExchange:
    """Moves rows of the tokens that ranks have to the ranks that want them, `length` tokens a sample."""

    def __init__(
        self, held: Sequence[Share | None], wanted: Sequence[Share | None], length: int, axis: Axis
    ) -> None:
        self._axis, own = axis, axis.rank
        copies: dict[Share, list[int]] = {}
        for rank, share in enumerate(held):
            if share is not None:
                copies.setdefault(share, []).append(rank)

        def source(share: Share, to: int) -> int:
            return to if held[to] == share else copies[share][to % len(copies[share])]

        def rows(share: Share | None, other: Share | None, sender: int, receiver: int, of: str) -> Tensor:
            if share is None or other is None or source(share, receiver) != sender:
                return torch.empty(0, dtype=torch.int64)
            return _common(share, other, length, of == "sender")

        self.sent = [rows(held[own], want, own, to, "sender") for to, want in enumerate(wanted)]
        self.received = [rows(have, wanted[own], by, own, "receiver") for by, have in enumerate(held)]

    def __call__(self, rows_NC: Tensor, select: Callable[[int, Tensor], Tensor] | None = None) -> Tensor:
        """Rows (N, C) of this rank's tokens -> those that it wants, by sample and then position.

        `select` takes a rank, and the rows (n, C) that it gets, and returns the columns for it, as many for
        each.
        """
        device = rows_NC.device
        parts = [rows_NC[index.to(device, non_blocking=True)] for index in self.sent]
        if select is not None:
            parts = [select(to, part) for to, part in enumerate(parts)]
        sent = torch.cat(parts)
        places = torch.cat(self.received).to(device, non_blocking=True)
        received = sent.new_empty(len(places), sent.shape[1])
        counts = [[len(index) for index in each] for each in (self.received, self.sent)]
        start_all_to_all(received, sent, self._axis, *counts).wait()
        found = torch.empty_like(received)
        found[places] = received
        return found


def _common(held: Share, wanted: Share, length: int, of_held: bool) -> Tensor:
    """Places of the tokens of both shares, in order, among those of one of them."""
    first, end = max(held.first, wanted.first), min(held.end, wanted.end)
    mine, other = (held, wanted) if of_held else (wanted, held)
    own, theirs = (zigzag(length, share.contexts, share.context) for share in (mine, other))
    places = torch.isin(own, theirs).nonzero().squeeze(1)
    samples = torch.arange(first - mine.first, max(first, end) - mine.first)
    return (samples.unsqueeze(1) * len(own) + places).flatten()
