"""Islands: replicas that train by themselves, and exchange how far they moved every `outer.every` steps.

Splits        samples over replicate, as data parallelism does; an island is one replica: the ranks that
              differ in the other axes only. Its loss, gradient norm, clipping and optimiser are its own.
Wire          for P parameters of a rank (P/n with ZeRO), R islands, b bytes of an exact number, each
              `outer.every` steps: an all-reduce of 2 P b (R-1)/R over replicate, a fragment at a time, and
              with it two numbers. Nothing in the other steps. Compressed: `outer_compression.py`.
Saves         all but one of `outer.every` sums of gradients over replicate; costs two more buffers of P exact
              numbers, and with a delay one for each fragment that is under way.

With a the parameters after the last exchange (the anchor) and x_i those of island i, an exchange is a step of
SGD with momentum on the mean of a - x_i, the pseudo-gradient, from a (DiLoCo: Douillard et al. 2023; Reddi et
al. 2021). All islands take it alike, so the anchors are equal on all of them to the bit: a run's model are
its anchors. Fragments are exchanged at steps of their own, and a result may come some steps after its
exchange has begun; then an island goes on with a mixture of it and its own parameters (Streaming DiLoCo:
Douillard et al. 2025).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple, NotRequired

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate
from typing_extensions import TypedDict

from meshwright.comm.collectives import DONE, start_all_reduce, start_broadcast
from meshwright.comm.mesh import Axis, Mesh
from meshwright.islands.outer_compression import Compression, ExactSum, Sum
from meshwright.parallel.data_parallel import DataParallel
from meshwright.parallel.flat_param import Stored, dtensor, stored
from meshwright.parallel.fsdp_unit import Unit
from meshwright.parallel.loss_normalization import share_of_a_replica
from meshwright.parallel.router_balance import RouterBalance
from meshwright.parallel.step_part import StepEnd, StepPart
from meshwright.spec import RunSpec
from meshwright.spec.eight_bit import blocks_of
from meshwright.spec.outer import OuterSpec
from meshwright.spec.records import Natural


class Anchored(NamedTuple):
    """Tensors of one message of an exchange: the parameters of a unit, or the bias of a router.

    The outer optimiser takes no step with a bias, which has no momentum: its anchor is the islands' mean.
    """

    unit: Unit | None
    name: str
    """Name of the bias; empty for a unit."""
    value: Tensor
    """The parameters, flat, or the bias, as this island trains them."""
    anchor: Tensor
    """`value` after the last exchange, in the format of exact sums."""
    momentum: Tensor | None
    compression: Compression | None = None
    """By which it is sent, but for exact numbers."""

    def start(self, axis: Axis) -> Sum:
        """Begin to sum over islands how far it moved from its anchor."""
        delta = self.anchor - self.value
        if self.compression is not None:
            return self.compression.start(delta, axis)
        return ExactSum(delta, start_all_reduce(delta, axis))


@dataclass
class Exchange:
    """An exchange of a fragment under way."""

    fragment: int
    due: int
    """The step after which its result is used."""
    deltas: list[Sum]
    """How far parts of the fragment moved from their anchors, summed over islands."""
    asked: Sum
    """Ranks that were asked to stop, a scalar."""


class NoIslands(StepPart):
    """The replicas of a run that all train together: there is nothing to exchange between steps."""

    def names_in(self, state: Mapping[str, Any], tensors: dict[str, Stored]) -> dict[str, Stored]:
        """`tensors`, of `named`, by the names that they have in a checkpoint of this state.

        Of islands in a run before, all ranks take the run's model, and what the first island had.
        """
        if not islands_in(state):
            return tensors
        return {f"island.0/{n}" if n.startswith("optim/") else n: tensor for n, tensor in tensors.items()}


class _Fields(TypedDict):
    """Fields of a checkpoint's state."""

    exchanges: NotRequired[list[list[Natural]]]


class Outer(NoIslands):
    """The exchanges of one rank; `states` and `balance` are its island's, `mesh` is that of the run."""

    component = "outer"
    Fields = _Fields

    def __init__(self, spec: RunSpec, mesh: Mesh, states: DataParallel, balance: RouterBalance) -> None:
        self.mesh, self.outer, self._states = mesh, spec.outer, states
        self._spec, self.prefix = spec, f"island.{mesh.replicate.rank}/"
        self._last, exact, blocks = spec.train.total_steps, states.formats.exact, blocks_of(spec)
        self._parts: list[list[Anchored]] = [[] for _ in range(self.outer.fragments)]
        for unit in states.trained:
            anchor, momentum = (torch.zeros_like(unit.stored, dtype=exact) for _ in range(2))
            fragment = self.outer.fragment_of(unit.slots[0].key, spec.model.head_embeds)
            compression = Compression(self.outer, unit, blocks, exact) if self.outer.compressed else None
            self._parts[fragment].append(Anchored(unit, "", unit.stored, anchor, momentum, compression))
        for name, bias in balance.biases().items():
            value, fragment = bias.to_local(), self.outer.fragment_of(name, spec.model.head_embeds)
            self._parts[fragment].append(Anchored(None, name, value, torch.zeros_like(value), None))
        self._under_way: list[Exchange] = []
        self._asked = 0
        self.updates = self._replicated(torch.zeros(1, dtype=torch.int64, device=mesh.device), states.mesh)
        """Room for the number of updates of this island's optimiser, in checkpoints."""

    @torch.no_grad()
    def begin(self) -> None:
        """Set the anchors to the parameters, which are equal on all islands, and drop all other states."""
        for part in self._every_part:
            part.anchor.copy_(part.value)
            if part.momentum is not None:
                part.momentum.zero_()
        for _, error in self._errors:
            error.zero_()
        self._under_way.clear()

    def after_step(self, end: StepEnd) -> None:
        """Exchange what is due after a step; `end.stops` become those of all islands that are known of."""
        end.stops = self.after(end.number, end.stops)

    @torch.no_grad()
    def after(self, step: int, stops: int) -> int:
        """Exchange what is due after optimiser step `step`, from 1; all islands call this.

        Given the ranks of this island that were asked to stop, returns those of all islands that an exchange
        has told of.
        """
        self._asked += stops
        last, told = step == self._last, 0
        while self._under_way and (last or self._under_way[0].due <= step):
            told += self._end(self._under_way.pop(0), self.outer.own_share)
        due = step if last else step + self.outer.delay
        self._under_way += [self._start(fragment, due) for fragment in self.outer.begins(step, self._last)]
        while self._under_way and self._under_way[0].due <= step:
            told += self._end(self._under_way.pop(0), 0.0 if last else self.outer.own_share)
        return told

    def _start(self, fragment: int, due: int) -> Exchange:
        axis = self.mesh.replicate
        deltas = [part.start(axis) for part in self._parts[fragment]]
        asked = torch.tensor(float(self._asked), dtype=torch.float64, device=self.mesh.device)
        self._asked = 0
        return Exchange(fragment, due, deltas, ExactSum(asked, start_all_reduce(asked, axis, "scalars")))

    def _end(self, exchange: Exchange, own_share: float) -> int:
        """Take the outer step of a fragment; returns how many ranks were asked to stop."""
        share = share_of_a_replica(self.mesh.replicate.size)
        for part, summed in zip(self._parts[exchange.fragment], exchange.deltas, strict=True):
            delta = summed.total()
            self._agree_on_ends(part, delta)
            self._move_anchor(part, delta.mul_(share))
            part.value.lerp_(part.anchor, 1 - own_share)
            if part.unit is not None:
                part.unit.expire()
        return int(exchange.asked.total())

    def _move_anchor(self, part: Anchored, delta: Tensor) -> None:
        """Take the outer step of a part from the mean of what islands moved by, which is used up."""
        outer = self.outer
        if part.momentum is None:
            part.anchor.sub_(delta)
            return
        part.momentum.mul_(outer.momentum).add_(delta)
        if outer.nesterov:
            delta.add_(part.momentum, alpha=outer.momentum)
        part.anchor.sub_(delta if outer.nesterov else part.momentum, alpha=outer.lr)

    def _agree_on_ends(self, part: Anchored, delta: Tensor) -> None:
        """Give both ranks that hold tied embeddings apart one sum: theirs may be added in other orders."""
        ends = self.mesh.ends
        if part.unit is None or ends is None:
            return
        for slot in part.unit.slots:
            if slot.key == self._states.apart:
                start_broadcast(delta[slot.start : slot.start + slot.padded], 0, ends).wait()

    @property
    def _every_part(self) -> Iterator[Anchored]:
        return chain.from_iterable(self._parts)

    def agreed(self) -> Iterator[tuple[str, Unit | None, Tensor]]:
        """(words and name, unit, tensor) of anchors and outer momentum, equal on all islands."""
        for part in self._every_part:
            yield f"the anchor of {part.name}", part.unit, part.anchor
            if part.momentum is not None:
                yield f"the outer momentum of {part.name}", part.unit, part.momentum

    # Evaluation and checkpoints -----------------------------------------------------------------------

    @contextmanager
    def model(self) -> Iterator[None]:
        """Compute with the anchors, the run's model; each island's own parameters come back at the end."""
        kept = [part.value.clone() for part in self._every_part]
        try:
            self._store([part.anchor for part in self._every_part])
            yield
        finally:
            self._store(kept)

    @torch.no_grad()
    def _store(self, values: list[Tensor]) -> None:
        for part, value in zip(self._every_part, values, strict=True):
            if part.unit is not None:
                part.unit.expire()
            part.value.copy_(value)

    def named(self, tensors: dict[str, Stored], updates: int) -> dict[str, Stored]:
        """Tensors of this island alone, under its prefix, and those that all islands share."""
        self.updates.to_local().fill_(updates)
        own = {**tensors, "updates": self.updates}
        return {
            **{f"{self.prefix}{name}": tensor for name, tensor in own.items()},
            **dict(self.shared_tensors()),
        }

    def names_in(self, state: Mapping[str, Any], tensors: dict[str, Stored]) -> dict[str, Stored]:
        """`tensors`, of `named`, by the names that they have in a checkpoint of this state.

        Island k takes what island k mod n of n had; where there were none, what all ranks had.
        """
        saved = islands_in(state)
        return {
            name.replace(self.prefix, self._prefix_in(state), 1)
            if name.startswith(self.prefix)
            else name: tensor
            for name, tensor in tensors.items()
            if saved or (name.startswith(self.prefix) and name != f"{self.prefix}updates")
        }

    def _prefix_in(self, state: Mapping[str, Any]) -> str:
        """The prefix, in a checkpoint of this state, of what this island takes."""
        saved = islands_in(state)
        return f"island.{self.mesh.replicate.rank % saved}/" if saved else ""

    def updates_in(self, state: Mapping[str, Any], updates: int) -> int:
        """Updates of this island's optimiser in a checkpoint whose tensors were loaded."""
        return int(self.updates.to_local()) if islands_in(state) else updates

    def shared_tensors(self) -> Iterator[tuple[str, Stored]]:
        """(name, tensor) of the run's model, of the outer momentum, and of sums that exchanges under way have
        brought; equal on all islands."""
        for part in self._every_part:
            yield from self._stored("model", part, part.anchor)
            if part.momentum is not None:
                yield from self._stored("outer/momentum", part, part.momentum)
        for exchange in self._under_way:
            exchange.deltas = [ExactSum(summed.total(), DONE) for summed in exchange.deltas]
            for part, summed in zip(self._parts[exchange.fragment], exchange.deltas, strict=True):
                yield from self._stored("outer/delta", part, summed.total())

    def tensors(self) -> Iterator[tuple[str, Stored]]:
        """(name, tensor) of what this island's messages left out, where that is sent later."""
        for part, error in self._errors:
            assert part.unit is not None
            yield from ((f"outer/error/{name}", each) for name, each in part.unit.tensors(error))

    @property
    def _errors(self) -> Iterator[tuple[Anchored, Tensor]]:
        for part in self._every_part:
            if part.compression is not None and part.compression.error is not None:
                yield part, part.compression.error

    def held(self) -> Iterator[tuple[Unit | None, Tensor]]:
        """Tensors that live across steps, each with its unit: anchors, outer momentum, errors, messages of
        exchanges under way, and the number of updates."""
        for part in self._every_part:
            yield part.unit, part.anchor
            if part.momentum is not None:
                yield part.unit, part.momentum
        for part, error in self._errors:
            yield part.unit, error
        for exchange in self._under_way:
            parts = self._parts[exchange.fragment]
            for part, sums in zip(parts, exchange.deltas, strict=True):
                yield from ((part.unit, tensor) for tensor in sums.tensors)
        yield None, self.updates.to_local()

    def _stored(self, kind: str, part: Anchored, flat: Tensor) -> Iterator[tuple[str, Stored]]:
        if part.unit is None:
            yield f"{kind}/{part.name}", self._replicated(flat, self.mesh)
            return
        unit = part.unit
        for slot in unit.slots:
            whole = stored(slot, unit.local(flat, slot), self.mesh, unit.shards is not None)
            yield f"{kind}/{slot.key}", whole

    @staticmethod
    def _replicated(local: Tensor, mesh: Mesh) -> DTensor:
        storage = mesh.storage
        return dtensor(local, storage, [Replicate()] * storage.ndim)

    def state(self) -> dict[str, Any]:
        """(fragment, the step after which its result is due) of each exchange under way, as JSON."""
        return {"exchanges": [[exchange.fragment, exchange.due] for exchange in self._under_way]}

    def form(self) -> object:
        """The fragments under way."""
        return [exchange.fragment for exchange in self._under_way]

    def missing(self, state: Mapping[str, Any]) -> tuple[str, ...]:
        """Errors of compression are absent where none is kept, and where messages are sent anew."""
        anew = islands_in(state) and state["exchanges"] and not self._same(state)
        kept = islands_in(state) and OuterSpec.model_validate(state["spec"]["outer"]).kept_error > 0
        return () if kept and not anew else (f"{self._prefix_in(state)}outer/error/",)

    def restore(self, state: Mapping[str, Any]) -> None:
        """Begin with the model of a checkpoint of a run without islands."""
        if not islands_in(state):
            self.begin()

    def _same(self, state: Mapping[str, Any]) -> bool:
        """True if the run of a checkpoint exchanged as this one does."""
        return islands_in(state) > 0 and state["spec"]["outer"] == self._spec.outer.model_dump(mode="json")

    @torch.no_grad()
    def assume(self, number: int) -> None:
        """Begin the exchanges that step `number` finds under way: for dry runs."""
        self._under_way = [self._start(fragment, due) for fragment, due in self.outer.under_way(number)]

    def expect(self, state: Mapping[str, Any]) -> None:
        """Make room for the exchanges under way of a checkpoint of this `state`, whose sums are loaded next.

        They are dropped where islands exchange in another way now.

        Where fragments are others now they are dropped: the next exchange is of all that islands moved by.
        Errors are zeros until they are loaded; some checkpoints have none.
        """
        for _, error in self._errors:
            error.zero_()
        exchanges = state["exchanges"] if self._same(state) else []
        known = all(fragment < self.outer.fragments for fragment, _ in exchanges)
        self._under_way = [
            Exchange(
                fragment,
                due,
                [ExactSum(torch.zeros_like(part.anchor), DONE) for part in self._parts[fragment]],
                ExactSum(torch.zeros((), dtype=torch.float64), DONE),
            )
            for fragment, due in (exchanges if known else [])
        ]


def islands_in(state: Mapping[str, Any]) -> int:
    """Islands whose states a checkpoint of this state has; 0 where its run had none."""
    outer, layout = state["spec"].get("outer", {}), state["spec"]["layout"]
    if not outer.get("every"):
        return 0
    return int(layout["replicate"]) if outer.get("island") is None else 1
