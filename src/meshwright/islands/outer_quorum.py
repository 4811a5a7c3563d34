"""Islands that exchange by quorum: each as it comes, whatever the others do (asynchronous data parallelism).

An island comes after `outer.every` steps with what it moved by since it last took the anchors. Exchanges have
an order, which all islands follow: the anchors after the n-th are a function of the first n, equal on all
islands to the bit. With a quorum of 1 an exchange is of one island, and a period of one step makes
asynchronous SGD (Dean et al. 2012, DistBelief) on pseudo-gradients; with a larger one an exchange takes the
mean, weighted by tokens, of all that come within `outer.grace_seconds` of the quorum.

What an island moved by is late by the exchanges between its beginning and its end; `outer.staleness_lr`
divides it by them (Zhang et al. 2016, staleness-aware async-SGD).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, NotRequired, Protocol

import torch
from torch import Tensor
from typing_extensions import TypedDict

from meshwright.comm.collectives import start_broadcast
from meshwright.comm.mesh import Mesh
from meshwright.islands.outer import NoIslands, Outer
from meshwright.parallel.data_parallel import DataParallel
from meshwright.parallel.loss_normalization import shares_of_tokens
from meshwright.parallel.router_balance import RouterBalance
from meshwright.parallel.step_part import StepPart
from meshwright.spec import RunSpec
from meshwright.spec.outer import scripted_arrivals
from meshwright.spec.records import Natural


class Contribution(NamedTuple):
    """The part of one island in an exchange."""

    island: int
    base: int
    """Exchanges before the island last took the anchors."""
    tokens: int
    """Tokens that it has trained on since."""


class MergedExchange(NamedTuple):
    """An exchange in the order of all, with what each of its islands moved by, as `QuorumOuter.moved`."""

    contributions: Sequence[Contribution]
    moved_of: Callable[[Contribution], list[Tensor]]


class Arrivals(Protocol):
    """The order in which islands come."""

    def comes(self, step: int, last: bool) -> bool:
        """True if exchanges may follow optimiser step `step`; equal on all ranks of an island."""
        ...

    def exchanges(self, step: int, own: Contribution, moved: list[Tensor]) -> Iterator[MergedExchange]:
        """Exchanges that this island has not followed yet, in order; if it comes now, to that with `own`."""
        ...


class _Fields(TypedDict):
    """Fields of a checkpoint's state."""

    exchanges: NotRequired[list[list[Natural]]]
    merged: NotRequired[Natural]


class QuorumOuter(Outer):
    """The exchanges of one rank of an island; `number` is the island's."""

    Fields = _Fields

    def __init__(
        self,
        spec: RunSpec,
        mesh: Mesh,
        states: DataParallel,
        balance: RouterBalance,
        number: int,
        arrivals: Arrivals,
    ) -> None:
        super().__init__(spec, mesh, states, balance)
        self.number, self.arrivals, self._train = number, arrivals, spec.of_step_group().train
        self.merged = self.base = self.tokens = 0
        """Exchanges that the anchors have followed; those before the island took them last, and the tokens
        that it had trained on by then."""
        self.lateness: Counter[int] = Counter()
        """How often this island's part came so many exchanges late."""
        self._began: list[Tensor] | None = None
        """The anchors that the island took last, where other exchanges have moved them since."""

    def begin(self) -> None:
        """Set the anchors to the parameters, which are equal on all islands, and drop momentum."""
        super().begin()
        self.merged = self.base = 0

    def moved(self) -> list[Tensor]:
        """How far each part of the model has moved from the anchors that the island took last."""
        began = self._began or [part.anchor for part in self._every_part]
        return [start - part.value for start, part in zip(began, self._every_part, strict=True)]

    @torch.no_grad()
    def after(self, step: int, stops: int) -> int:
        """Follow the exchanges that are due after optimiser step `step`; returns `stops`, as islands stop by
        themselves."""
        if not self.arrivals.comes(step, step == self._last):
            return stops
        seen = self._train.tokens_after(step)
        own, came = Contribution(self.number, self.base, seen - self.tokens), False
        for exchange in self.arrivals.exchanges(step, own, self.moved()):
            if own in exchange.contributions:
                self.lateness[self.merged - self.base] += 1
                came = True
            elif self._began is None and not came:
                self._began = [part.anchor.clone() for part in self._every_part]
            self.follow(exchange)
        if came:
            self.take_anchors(step)
        return stops

    @torch.no_grad()
    def follow(self, exchange: MergedExchange) -> None:
        """Move the anchors by an exchange."""
        contributions, means = exchange.contributions, list[Tensor]()
        shares = shares_of_tokens([each.tokens for each in contributions])
        for each, share in zip(contributions, shares, strict=True):
            moved = [
                delta if part.momentum is not None else delta.double()  # biases have no exact format
                for part, delta in zip(self._every_part, exchange.moved_of(each), strict=True)
            ]
            share *= self.outer.lateness_factor(self.merged - each.base)
            if not means:
                means = [delta.mul(share) for delta in moved]
            else:
                torch._foreach_add_(means, moved, alpha=share)
        for part, delta in zip(self._every_part, means, strict=True):
            self._move_anchor(part, delta)
        self.merged += 1

    @torch.no_grad()
    def take_anchors(self, step: int) -> None:
        """Go on from the anchors after optimiser step `step`."""
        self._began, self.base, self.tokens = None, self.merged, self._train.tokens_after(step)
        for part in self._every_part:
            part.value.copy_(part.anchor)
            if part.unit is not None:
                part.unit.expire()

    def state(self) -> dict[str, Any]:
        """The exchanges that the anchors have followed, and those under way."""
        return {**super().state(), "merged": self.merged}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a checkpoint, whose anchors were loaded."""
        super().restore(state)
        self.merged = int(state.get("merged", 0))

    def agreed_tensors(self) -> list[Tensor]:
        """The anchors and the outer momentum: all that an island needs to go on after exchange `merged`."""
        return [flat for _, _, flat in self.agreed()]


class ScriptedArrivals:
    """Islands of one world that come in the order of a script, which `verify` and its reference share."""

    def __init__(self, spec: RunSpec, mesh: Mesh) -> None:
        self._spec, self._mesh = spec, mesh

    def comes(self, step: int, last: bool) -> bool:
        """True at each step at which an island comes: all of them follow its exchange at once."""
        return bool(scripted_arrivals(step, self._spec.step_groups, self._spec.outer))

    def exchanges(self, step: int, own: Contribution, moved: list[Tensor]) -> Iterator[MergedExchange]:
        """The exchanges of the script after a step."""
        axis = self._mesh.replicate
        every = self._mesh.control.gather([self._mesh.rank, axis.rank, *own])
        listed = {row[1]: Contribution(*row[2:]) for row in self._mesh.control.broadcast(every)}

        def moved_of(contribution: Contribution) -> list[Tensor]:
            sent = [delta.clone() for delta in moved]
            for delta in sent:
                start_broadcast(delta, contribution.island, axis).wait()
            return sent

        for islands in scripted_arrivals(step, self._spec.step_groups, self._spec.outer):
            yield MergedExchange([listed[island] for island in islands], moved_of)


def islands_of(
    spec: RunSpec, mesh: Mesh, states: DataParallel, balance: RouterBalance, arrivals: Arrivals | None
) -> StepPart:
    """The exchanges of this rank's island.

    `arrivals` is the order in which islands come that exchange by quorum, by default that of a script.
    """
    if spec.step_groups == 1:
        return NoIslands()
    if spec.outer.quorum is None:
        return Outer(spec, mesh, states, balance)
    number = mesh.replicate.rank if spec.outer.island is None else spec.outer.island
    return QuorumOuter(spec, mesh, states, balance, number, arrivals or ScriptedArrivals(spec, mesh))
