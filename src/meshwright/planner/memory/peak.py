"""The moment of a step without a pipeline at which a rank of our own program holds most.

What a step holds beyond its states rises and falls: at the head's backward all activations are there, and of
one microbatch's gradients none; at the embedding's it is the other way round. So a step is followed here as
`parallel/data_parallel.py` runs it: which units are gathered, packed and on the wire, block by block.

Gradients that are stored whole keep their room from step to step: the first step holds less than all others.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from meshwright.planner.memory.activations import (
    Activations,
    Sizes,
    at_attention,
    at_experts,
    at_feed_forward,
    at_mask,
    at_norm,
    everything,
    head_moments,
    of_experts,
)
from meshwright.planner.memory.activations_moe import routed_packed
from meshwright.planner.memory.states import StateShard, packed_width, waits
from meshwright.planner.rank_view import RankView, widths


@dataclass(frozen=True)
class Moment:
    """Bytes at one time, beyond parameters and the optimiser's."""

    gradients: int
    activations: int
    temporaries: int
    buffers: int

    @property
    def total(self) -> int:
        """All of them."""
        return self.gradients + self.activations + self.temporaries + self.buffers


def fullest_moment(at: RankView, listed: Sequence[StateShard], kept: Activations, casts: bool) -> Moment:
    """When a rank with the units `listed` holds most; for `casts` see `activations.head_moments`."""
    step = _Step(at, listed, kept, casts)
    for last in [True] if at.spec.microbatches == 1 else [False, True]:  # others hold no more than these
        step.forward()
        step.backward(last)
    step.finish()
    return step.most


class _Units:
    """The buffers of the units, as they come and go."""

    def __init__(self, at: RankView, listed: Sequence[StateShard]) -> None:
        self.spec, self.width = at.spec, widths(at.spec)
        self.groups: dict[str, list[StateShard]] = {}
        for unit in listed:
            self.groups.setdefault(unit.name, []).append(unit)
        self.activations = self.buffers = 0
        self.packed = {unit for unit in listed if unit.ranks == 1}
        self.packed_width = {unit: packed_width(at, unit) for unit in listed}
        self.gradients = sum(unit.whole * self.packed_width[unit] for unit in self.packed)
        self.waiting = {unit for unit in listed if waits(at.spec, unit)}
        self.summed: set[StateShard] = set()
        self.whole: set[StateShard] = set()
        self.coming: set[StateShard] = set()
        self.reducing: deque[StateShard] = deque()
        """Units whose gradients are being reduced over the ranks that share their states."""
        self.most = Moment(0, 0, 0, 0)

    def look(self, temporaries: int) -> None:
        """See whether more is there than ever."""
        total = self.gradients + self.activations + temporaries + self.buffers
        if total > self.most.total:
            self.most = Moment(self.gradients, self.activations, temporaries, self.buffers)

    # Parameters -------------------------------------------------------------------------------------

    def gather(self, name: str, ahead: str | None) -> None:
        """Wait for a group's units, and begin to gather those of the group `ahead`."""
        for unit in self.groups[name]:
            if unit.zero < 3 or unit.aliased(self.width) or unit in self.whole:
                continue
            self._begin(unit)
            self.buffers += unit.whole * self.width.compute
            self.look(0)
            self.whole.add(unit)
            self.coming.discard(unit)
            if unit.ranks > 1:
                self.buffers -= unit.whole * self.width.compute
        for unit in self.groups[ahead] if ahead else []:
            if unit.zero == 3 and unit not in self.whole:
                self._begin(unit)

    def _begin(self, unit: StateShard) -> None:
        if unit.ranks > 1 and unit not in self.coming:
            self.coming.add(unit)
            self.buffers += unit.whole * self.width.compute

    def release(self, unit: StateShard) -> None:
        """Drop the whole unit."""
        if unit in self.whole:
            self.whole.remove(unit)
            self.buffers -= unit.whole * self.width.compute

    # Gradients --------------------------------------------------------------------------------------

    def pack(self, unit: StateShard) -> None:
        """Make room for a unit's gradients, if there is none."""
        if unit in self.packed:
            return
        self.packed.add(unit)
        if unit in self.waiting:
            self.gradients += unit.whole * self.packed_width[unit]
        else:
            self.buffers += unit.whole * self.packed_width[unit]

    def done(self, unit: StateShard, last: bool, temporaries: int) -> None:
        """All gradients of a unit in a microbatch are there: they are reduced, if they are due."""
        if not self.stays(unit, last):
            self.release(unit)
        if not last and (unit.zero < 2 or unit.ranks == 1):
            return
        self.pack(unit)
        sent, copied = unit.whole * self.width.reduce, self.packed_width[unit] != self.width.reduce
        if unit.ranks > 1:
            self.packed.remove(unit)
            self.buffers += unit.part * self.width.reduce + sent
            self.look(temporaries if copied or unit in self.waiting else temporaries - sent)
            held = unit.whole * self.packed_width[unit]
            if unit in self.waiting:
                self.gradients -= held
            else:
                self.buffers -= held
        else:
            self.buffers += sent if copied and self.sends(unit) else 0
        self.look(temporaries)
        self.reducing.append(unit)
        while len(self.reducing) > len(self.groups[unit.name]):
            self._reduced(self.reducing.popleft())

    def stays(self, unit: StateShard, last: bool) -> bool:
        """True if a unit stays whole after its backward, for the next microbatch's forward."""
        return not last and (unit.name == "blocks.0" or (unit.name == "embed" and "head" not in self.groups))

    def sends(self, unit: StateShard) -> bool:
        """True if other ranks have the whole unit, too, and add up its gradients with this one."""
        layout = self.spec.layout
        ranks = layout.expert_data_ranks if unit.routed else layout.shard_ranks
        return max(layout.replicate, ranks) > 1

    def finish(self) -> None:
        """Wait for all reductions."""
        while self.reducing:
            self._reduced(self.reducing.popleft())
        self.look(0)

    def _reduced(self, unit: StateShard) -> None:
        width, new = self.width, unit not in self.summed
        self.summed.add(unit)
        sent = unit.whole * width.reduce
        if unit.ranks == 1:
            if self.packed_width[unit] != width.master:
                self.gradients += unit.part * width.master if new else 0
            elif width.reduce != width.master and self.sends(unit):
                self.buffers -= sent
            return
        stays = new and width.reduce == width.master  # the part that was on the wire becomes the gradient
        if new:
            self.gradients += unit.part * width.master
        if stays:
            self.buffers -= unit.part * width.reduce
        self.look(0)
        self.buffers -= sent + (0 if stays else unit.part * width.reduce)


class _Step(_Units):
    """A microbatch's forward, and its backward."""

    def __init__(self, at: RankView, listed: Sequence[StateShard], kept: Activations, casts: bool) -> None:
        super().__init__(at, listed)
        self.sizes, self.kept = Sizes(at.spec), kept
        self.casts = casts
        self.stream = self.width.compute * self.sizes.stream
        self.weight = self.sizes.rows * at.spec.model.hidden
        self.head = head_moments(self.sizes, casts)
        self.tied = "head" not in self.groups
        self.blocks = [f"blocks.{layer}" for layer in range(at.spec.model.layers)]
        self.working = {
            routed: _Working(self.sizes, layer)
            for layer, routed in enumerate(map(at.spec.model.has_experts, range(len(self.blocks))))
        }

    def forward(self) -> None:
        """Up to the loss."""
        kept, blocks = self.kept, self.blocks
        self.activations += kept.shared + kept.embed
        self.gather("embed", blocks[0])
        if not self.tied:
            self._release("embed")
        self.look(at_mask(self.sizes))
        for layer, name in enumerate(blocks):
            after = blocks[layer + 1] if name != blocks[-1] else None if self.tied else "head"
            self.gather(name, after)
            if name != blocks[-1]:  # its backward comes next but for the head's, so it stays whole
                self._release(name)
            self.activations += kept.by_block[layer]
        self.gather("embed" if self.tied else "head", None)
        self.activations += kept.head
        self.look(self.head[0])

    def _release(self, name: str) -> None:
        for unit in self.groups[name]:
            self.release(unit)

    def backward(self, last: bool) -> None:
        """From the loss to the embedding."""
        self._head(last)
        for layer in reversed(range(len(self.blocks))):
            self._block(layer, last)
        self._embedding(last)
        self.activations -= self.kept.shared + self.kept.embed

    def _head(self, last: bool) -> None:
        (unit,) = self.groups["embed" if self.tied else "head"]
        exact, packed = self.width.exact * self.weight, self.width.compute * self.weight
        self.look(self.head[1])
        self.activations -= exact
        if not self.tied:
            self.pack(unit)
        self.look(packed)
        self.pack(unit)
        held = packed if self.tied else 0  # until the embedding's gradient is added
        self.look(self.head[2] + exact + held)
        self.activations -= self.kept.head - exact - held
        if not self.tied:
            self.done(unit, last, self.stream)

    def _block(self, layer: int, last: bool) -> None:
        *routed, unit = reversed(self.groups[name := self.blocks[layer]])  # the backward finds routed first
        working = self.working[bool(routed)]
        self.gather(name, self.blocks[layer - 1] if layer else None if last else "embed")
        more = working.more - self.kept.by_block[layer]
        if self.sizes.channels(layer):
            self.pack(unit)
            self.look(more + working.feed_forward)
        for each in routed:
            self.look(more + working.experts)
            self.pack(each)
            self.look(more + working.packed)
            self.done(each, last, 0)
        self.pack(unit)
        self.look(more + working.attention)
        self.activations -= self.kept.by_block[layer]
        self.done(unit, last, self.stream)

    def _embedding(self, last: bool) -> None:
        (unit,) = self.groups["embed"]
        width, sizes = self.width, self.sizes
        found = width.compute * self.weight
        added = found  # and what it is made of, where a CPU adds up in wider numbers
        if self.casts and width.exact != width.compute:
            added = width.exact * self.weight + max(found, width.exact * sizes.whole)
        self.look(max(self.stream, width.compute * sizes.whole) + added)
        self.pack(unit)
        self.look(found * (2 if self.tied else 1))
        if self.tied:
            self.activations -= found
        self.done(unit, last, 0)


class _Working:
    """The most beyond what a block keeps, at moments of its backward, and all that it computes again."""

    def __init__(self, s: Sizes, layer: int) -> None:
        self.more = everything(s, layer)
        self.feed_forward = at_feed_forward(s, layer)
        self.experts = at_experts(s, layer)
        self.packed = s.width.compute * s.stream + of_experts(s, layer, routed_packed)
        self.attention = max(at_norm(s, layer), at_attention(s, layer))
