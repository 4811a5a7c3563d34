"""Routing that sends equally many tokens to every expert, since that of real data is not known."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from meshwright.dryrun.kernel_shapes import EVEN_ROWS
from meshwright.model.decoder import Decoder
from meshwright.model.hooks import Dispatch
from meshwright.model.token_dispatcher import TokenDispatcher, padded_sizes
from meshwright.parallel.expert_parallel import AllToAllDispatcher, BoundedDispatcher, ExpertDispatch
from meshwright.planner.traffic.layer_shape import admitted
from meshwright.spec import RunSpec


def route_evenly(decoder: Decoder, spec: RunSpec) -> None:
    """Let every router of a decoder send equally many tokens to each expert."""
    if (moe := spec.model.moe) is None:
        return
    share = admitted(spec, moe)
    for _, mixture in decoder.each_mixture():
        dispatch: Dispatch = partial(_EvenDispatcher, share)
        if isinstance(own := mixture.hooks.dispatch, ExpertDispatch):
            exact, bounded = partial(_EvenAllToAllDispatcher, share), partial(_EvenBoundedDispatcher, share)
            dispatch = replace(own, exact=exact, bounded=bounded)
        mixture.hooks = replace(mixture.hooks, dispatch=dispatch)


class _EvenDispatcher(TokenDispatcher):
    """Routes equally many copies to every expert; the fraction `share` of all copies is admitted."""

    def __init__(self, share: float, *routing: Any) -> None:
        self._share = share
        super().__init__(*routing)

    def _even(self, experts: int) -> list[int]:
        copies = round(self.tokens * self.top_k * self._share)
        return [copies // experts + (expert < copies % experts) for expert in range(experts)]

    def _to_host(self, counts_SE: Tensor) -> Tensor:
        super()._to_host(counts_SE)  # for the count of waits
        return torch.tensor(self._listed(counts_SE.shape[1]))

    def _listed(self, here: int) -> list[list[int]]:
        """Copies for each of the `here` experts of this rank, from or to each rank."""
        return [self._even(here)]


class _EvenAllToAllDispatcher(_EvenDispatcher, AllToAllDispatcher):
    """Routes equally many copies of every rank to every expert."""

    def _listed(self, here: int) -> list[list[int]]:
        ranks = self._axis.size
        counts = self._even(here * ranks // self._slices)
        owners = [rank // self._slices for rank in range(ranks)]
        leaving = [counts[owner * here : (owner + 1) * here] for owner in owners]
        return [*leaving, *[leaving[self._axis.rank]] * ranks]


class _EvenBoundedDispatcher(_EvenAllToAllDispatcher, BoundedDispatcher):
    """Routes so in messages of a fixed size; the trace is told how many rows hold copies."""

    def _plan(self, order: Tensor, position_Nk: Tensor) -> None:
        super()._plan(order, position_Nk)
        arriving = self._listed(len(self.groups.ends))[self._axis.size :]
        setattr(self.groups.ends, EVEN_ROWS, sum(padded_sizes(arriving)))
