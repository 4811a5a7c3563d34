"""DeepSpeed-Ulysses (Jacobs et al. 2023): ranks exchange all heads of some tokens for all tokens of some
heads.

`context_parallel.py` lists what is sent. Shapes: B batch, T local tokens, H heads, d channels, u ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from meshwright.comm.collectives import start_all_to_all
from meshwright.comm.mesh import Axis
from meshwright.parallel.fused_comm_ops import FusedCommOp, Parameters, Tensors, empty
from meshwright.parallel.recompute_cache import RecomputeCache

Run = tuple[int, slice]
"""(rank, slice of its rows) of consecutive positions."""


class HeadExchange:
    """The two exchanges over `axis`, whose rank r holds the positions `places[r]` (T,), ascending.

    Each is the other's inverse and transpose. `heads` are in the order of positions.
    """

    def __init__(self, axis: Axis, places: Sequence[Tensor]) -> None:
        self.axis = axis
        self._runs = runs_of(places)

    def to_heads(self, tokens: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """(B, T, H, d) each, H a multiple of u -> (B, u T, H / u, d) each, in one message."""
        u = self.axis.size
        sent = torch.cat([x.unflatten(2, (u, -1)).movedim(2, 0) for x in tokens], 3)  # (u, B, T, h, d)
        received = torch.empty_like(sent, memory_format=torch.contiguous_format)
        start_all_to_all(received, sent.contiguous(), self.axis).wait()
        split = received.split([x.shape[2] // u for x in tokens], 3)
        return tuple(torch.cat([x[rank][:, rows] for rank, rows in self._runs], 1) for x in split)

    def to_tokens(self, heads: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """(B, u T, H / u, d) each -> (B, T, H, d) each, in one message."""
        u, counts = self.axis.size, [x.shape[2] for x in heads]
        batch, length, _, dim = heads[0].shape
        sent = heads[0].new_empty(u, batch, length // u, sum(counts), dim)
        for x, into in zip(heads, sent.split(counts, 3), strict=True):
            first = 0
            for rank, rows in self._runs:
                last = first + rows.stop - rows.start
                into[rank][:, rows] = x[:, first:last]
                first = last
        received = torch.empty_like(sent)
        start_all_to_all(received, sent, self.axis).wait()
        return tuple(x.movedim(0, 2).flatten(2, 3) for x in received.split(counts, 3))


class ExchangeOp(FusedCommOp):
    """`HeadExchange.to_heads` of any number of tensors, or else `HeadExchange.to_tokens`."""

    kind = "exchange"

    def __init__(
        self,
        axis: Axis,
        exchange: Callable[[int], HeadExchange],
        to_heads: bool,
        cache: RecomputeCache | None,
    ) -> None:
        """`exchange` maps the number of this rank's tokens to the exchange of their sequences."""
        super().__init__(cache)
        self._axis, self._exchange, self._to_heads = axis, exchange, to_heads

    def forward(self, inputs: Tensors) -> Tensors:
        return self._run(inputs, self._to_heads)

    def keep(self, inputs: Tensors, results: Tensors) -> Tensors:
        return []

    def backward(self, saved: Tensors, grads: Tensors, parameters: Parameters = ()) -> Tensors:
        return self._run(grads, not self._to_heads)

    def results_like(self, inputs: Tensors) -> Tensors:
        return self._like(inputs, self._to_heads)

    def gradients_like(self, saved: Tensors, grads: Tensors) -> Tensors:
        return self._like(grads, not self._to_heads)

    def _run(self, tensors: Tensors, to_heads: bool) -> Tensors:
        if to_heads:
            return self._exchange(tensors[0].shape[1]).to_heads(tensors)
        found = self._exchange(tensors[0].shape[1] // self._axis.size).to_tokens(tensors)
        # With one head a rank they are views of one message, which an operator may not return.
        return [x.contiguous() for x in found] if self.cache is None else found

    def _like(self, tensors: Tensors, to_heads: bool) -> Tensors:
        u = self._axis.size
        if to_heads:
            return [empty(x, x.shape[0], x.shape[1] * u, x.shape[2] // u, x.shape[3]) for x in tensors]
        return [empty(x, x.shape[0], x.shape[1] // u, x.shape[2] * u, x.shape[3]) for x in tensors]


def runs_of(places: Sequence[Tensor]) -> list[Run]:
    """The runs of consecutive positions, in the order of the sequence."""
    runs: list[tuple[int, int, slice]] = []
    for rank, at in enumerate(places):
        ends = (torch.nonzero(at.diff() != 1).flatten() + 1).tolist()
        for begin, end in zip([0, *ends], [*ends, len(at)], strict=True):
            runs.append((int(at[begin]), rank, slice(begin, end)))
    return [(rank, rows) for _, rank, rows in sorted(runs, key=lambda run: run[0])]
