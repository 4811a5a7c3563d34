"""Seconds of a step for parameters and gradients between data ranks, and for the optimiser.

Messages that overlap compute cost what compute does not hide: ZeRO-3 gathers parameters unit
by unit under the forward and the backward, and gradients are reduced under the backward that completes them.
The first unit of the forward and the last of the backward have nothing to hide behind. Compute slows down
while it shares the device and its memory with a collective, and a collective that shares a processor with
compute takes longer, so that less of it is done when compute is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from math import inf
from operator import le
from typing import NamedTuple

from meshwright.planner.cost.collectives import CollectiveCosts
from meshwright.planner.cost.model import CostModel
from meshwright.planner.cost.offload import copy_seconds
from meshwright.planner.cost.operator_bytes import unit_copies
from meshwright.planner.cost.precision import PRECISIONS
from meshwright.planner.group_shapes import GroupShape, step_axes
from meshwright.planner.rank_view import saved_by_a_base, widths
from meshwright.spec import RunSpec
from meshwright.spec.low_precision_rules import rounded_parameters

AXES = ("shard", "expert_data", "replicate")
"""Axes of data ranks, each with messages of its own."""
_UPDATE_BYTES = 12.0
"""Bytes per parameter that an optimiser moves in fp32 without moments: it reads the gradient and the master,
and writes the master. Each moment is read and written, 8 bytes more."""
_ROUNDED_BYTES = 106.0
"""Bytes more with weights in bf16, where a chunk is copied to fp32 and back, and rounded by operators that
are not fused. Counted: 52 to make the bits that decide, 34 to round by them, 20 for the copies."""
_EIGHT_BIT_BYTES = 258.0
"""Bytes per parameter that AdamW with moments in 8 bits moves in operators that are not fused, instead of the
28 of AdamW. Counted: 33 to dequantise and update a moment, 68 to quantise it, 8 for squares of gradients, 48
for the update (`optim/adamw_8bit.py`). Programs with one kernel for all read and write two codes."""
_EMA_BYTES = 12.0
"""Bytes per parameter of a moving average in fp32: it is read and written, the master is read."""
_AROUND_BYTES = 10.0
"""Bytes per parameter of a step besides: the copy that computes is written, the norm reads gradients again,
and they are cleared."""


@dataclass(frozen=True)
class StoredParameters:
    """Parameters of a pipeline rank, on one tensor rank, and the messages that they travel in."""

    dense: float
    routed: float
    units: int
    tensors: int
    ends: float = 0.0
    """Those of `dense` in the embedding and the head, of which one pass of a microbatch has need."""
    frozen: float = 0.0
    """Those of `dense` that are not trained."""
    frozen_routed: float = 0.0
    quantised: float = 0.0
    """Those of `frozen` that are stored and gathered in fewer bits."""

    @property
    def trained(self) -> StoredParameters:
        """Those that are trained."""
        dense, routed = self.dense - self.frozen, self.routed - self.frozen_routed
        return StoredParameters(dense, routed, self.units, self.tensors)


@dataclass(frozen=True)
class DataSeconds:
    """Seconds of one rank in one step."""

    sent: Mapping[str, float]
    """All messages by axis, hidden or not."""
    exposed: float
    """Messages that compute does not hide."""
    slowed: float
    """Slowdown of compute by messages that it hides."""
    optimiser: float
    each_microbatch: float = 0.0
    """The part of `exposed` and `slowed` that each microbatch waits for, if they do."""
    once: float = 0.0
    """The part of both that follows the last of these."""
    copies: Mapping[str, float] = field(default_factory=dict)
    """Seconds of a step in which a GPU copies units, by purpose; of other programs messages have them."""
    copies_each: float = 0.0
    """The part of `copies` that each microbatch takes."""
    copies_once: float = 0.0

    @property
    def microbatch(self) -> float:
        """Seconds that each microbatch takes beside its operators."""
        return self.each_microbatch + self.copies_each

    @property
    def final(self) -> float:
        """Seconds after the last backward."""
        once = self.once if self.each_microbatch else self.exposed + self.slowed
        return self.optimiser + once + self.copies_once


class DataMessages(NamedTuple):
    """Seconds of a rank's gathers and reductions by axis, and the elements that it updates."""

    gathers: dict[str, float]
    reduces: dict[str, float]
    updated: float


class _UnitCopies(NamedTuple):
    """Bytes that a GPU copies of units, by purpose."""

    each: dict[str, float]
    """In each microbatch."""
    once: dict[str, float]
    more: float
    """Bytes that another microbatch of a pipeline adds to `once`, of all purposes."""


def data_seconds(
    spec: RunSpec, costs: CostModel, held: StoredParameters, forward: float, backward: float
) -> DataSeconds:
    """Seconds of a rank with `held`, whose microbatch takes `forward` and `backward` seconds."""
    return DataAxis(spec, costs, held).beside(forward, backward)


class DataAxis:
    """The messages, the optimiser and the copies of a rank with `held`, whatever its microbatches take.

    `messages` are `data_messages`, where they are known.
    """

    def __init__(
        self, spec: RunSpec, costs: CostModel, held: StoredParameters, messages: DataMessages | None = None
    ) -> None:
        layout, stack, links = spec.layout, costs.stack, costs.links
        messages = messages or data_messages(spec, costs, held)
        self._gathers, self._reduces, updated = messages
        self._optimiser = max(_update_seconds(spec, costs, updated), copy_seconds(spec, costs, updated))
        self._count, self._often = spec.microbatches, layout.pp == 1 and spec.microbatches > 0
        # A pipeline gathers and reduces once a step.
        self._times = self._count if self._often and layout.zero >= 2 else 1
        # Replicas wait for the last microbatch.
        self._last = self._reduces["replicate"] if stack.ours and self._times > 1 else 0.0
        self._gather, self._reduce = sum(self._gathers.values()), sum(self._reduces.values()) - self._last
        self._units, self._sharded = max(1, held.units), layout.zero == 3
        self._contention, self._slower = costs.contention, 1.0
        if stack.own and self._reduce + self._gather:
            lost = self._reduce * links.contention(_reduction(spec))
            lost += self._gather * links.contention("all_gather")
            self._contention, self._slower = lost / (self._reduce + self._gather), links.slowed
        self._overlap, self._ahead = stack.overlap("data"), stack.overlap("parameters")
        self._moved = costs.kernels.moved
        self._copies = _copies(spec, held) if costs.counted else _UnitCopies({}, {}, 0.0)
        self._copied_each = self._moved(sum(self._copies.each.values()))
        self._copied_once = self._moved(sum(self._copies.once.values()))

    def beside(self, forward: float, backward: float) -> DataSeconds:
        """Seconds beside microbatches of `forward` and `backward` seconds."""
        times, gathers, reduces = self._times, self._gathers, self._reduces
        if self._sharded:
            sent = {axis: times * (2 * gathers[axis] + reduces[axis]) for axis in AXES}
        else:
            sent = {axis: times * reduces[axis] + gathers[axis] for axis in AXES}
        sent["replicate"] -= (times - 1) * self._last
        exposed = self._exposed(forward, backward)
        return DataSeconds(sent, *exposed, self._by_purpose(), self._copied_each, self._copied_once)

    def _by_purpose(self) -> dict[str, float]:
        """Seconds of a step in which a GPU copies units."""
        each, once, _ = self._copies
        sizes = {name: self._count * each.get(name, 0.0) + once.get(name, 0.0) for name in {*each, *once}}
        return {name: self._moved(sizes[name]) for name in sorted(sizes)}

    def seconds(self, forward: float, backward: float, microbatches: int, enough: float = inf) -> float:
        """Seconds of a step beside microbatches of `forward` and `backward` seconds; in a pipeline also for
        another number of them than the run's. Where they are at least `enough`, any number that is."""
        more = (microbatches - self._count) * self._moved(self._copies.more)
        least = self._optimiser + self._copied_once + more + microbatches * self._copied_each
        if least >= enough:
            return least
        exposed, slowed, _, each, once = self._exposed(forward, backward)
        return least + (once if each else exposed + slowed) + microbatches * each

    def within(self, other: DataAxis) -> bool:
        """True if `seconds` are never above those of another rank with as much of the same model, if
        contention is at most 1."""
        if (self._sharded, self._times) != (other._sharded, other._times):
            return False
        return all(map(le, self._loads, other._loads))

    @cached_property
    def _loads(self) -> tuple[float, ...]:
        rest = self._optimiser + self._copied_once + self._count * self._copied_each
        return self._gather, self._reduce, self._last, rest

    def _exposed(self, forward: float, backward: float) -> tuple[float, float, float, float, float]:
        """The fields of `DataSeconds` from `exposed` to `once`."""
        forward, backward = forward / self._slower, backward / self._slower  # of messages that they can hide
        gather, reduce, times, contention = self._gather, self._reduce, self._times, self._contention
        behind = gather + reduce if self._sharded else reduce
        hidden_last = min(self._last, max(0.0, backward - behind)) * self._overlap
        once = self._last - hidden_last
        if not self._sharded:
            hidden = min(gather, forward) * self._ahead
            hidden_back = min(reduce, backward) * self._overlap * (1 - 1 / self._units)
            exposed = times * (reduce - hidden_back) + gather - hidden + once
            slowed = contention * (times * hidden_back + hidden + hidden_last)
            return exposed, slowed, self._optimiser, 0.0, 0.0
        hidden = min(gather, forward) * self._overlap
        hidden_back = min(gather + reduce, backward) * self._overlap
        exposed = max(
            (gather - hidden) + (gather + reduce - hidden_back), gather / self._units + reduce / self._units
        )
        slowed = contention * (hidden + hidden_back)
        each, after = exposed + slowed if self._often else 0.0, contention * hidden_last
        return times * exposed + once, times * slowed + after, self._optimiser, each, once + after


def _copies(spec: RunSpec, held: StoredParameters) -> _UnitCopies:
    layout, groups, copies = spec.layout, step_axes(spec), unit_copies(spec)
    gathers = dict.fromkeys(("casts", "gathered units"), 0.0)
    summed, added, packed, later = 0.0, 0.0, 0.0, spec.microbatches - 1
    stored = (
        (held.dense, held.frozen, held.ends, groups.shard.ranks, False),
        (held.routed, held.frozen_routed, 0.0, groups.expert_data.ranks, True),
    )
    often = layout.pp == 1 and spec.microbatches > 1
    for every, frozen, ends, ranks, routed in stored:
        shards, trained = ranks if layout.zero else 1, every - frozen
        again = layout.zero == 3 and layout.pp == 1 and (shards > 1 or routed)
        times = 2 * every - ends if again else every
        gathers["casts"] += copies.cast * times / shards
        gathers["gathered units"] += copies.unpacked * times if shards > 1 else 0.0
        if often and layout.zero >= 2 and not (routed and shards == 1):
            summed += copies.summed * trained / shards
            packed += copies.packed * trained * spec.microbatches * routed
        elif routed:  # products of experts add to no sum
            packed += copies.packed * trained * spec.microbatches
            added += copies.added * trained
        else:
            added += copies.added * ends + copies.added_block * (trained - ends)
    once = {"gradient sums": later * (summed + added), "gradients of experts": packed}
    more = summed + added + packed / spec.microbatches
    if layout.zero == 3 and layout.pp == 1:
        return _UnitCopies(gathers, once, more)
    return _UnitCopies({}, gathers | once, more)


def _reduction(spec: RunSpec) -> str:
    """The collective that sums gradients over the ranks of an axis."""
    return "reduce_scatter" if spec.layout.zero else "all_reduce"


def _sent_bytes(spec: RunSpec, costs: CostModel) -> tuple[float, float]:
    """Bytes of a parameter as it is gathered, and of a gradient as it is reduced."""
    stack, formats = costs.stack, widths(spec)
    width, gradient = float(stack.gather_bytes), float(stack.gradient_bytes)
    if stack.ours:
        width, gradient = formats.compute, formats.reduce
        if spec.precision.fp8_gather:
            rounded = sum(parameter.size for parameter in rounded_parameters(spec))
            width -= (width - 1) * rounded / spec.model.parameters
    if stack.low_states and costs.format in PRECISIONS:
        width = PRECISIONS[costs.format].gathered
    return width, gradient


def data_messages(spec: RunSpec, costs: CostModel, held: StoredParameters) -> DataMessages:
    """The messages of a rank with `held`, and the elements that it updates."""
    layout, groups, stack, links = spec.layout, step_axes(spec), costs.stack, costs.links
    width, gradient = _sent_bytes(spec, costs)
    unpack = costs.kernels.moved(stack.unpacked)
    gathers, reduces, updated = dict.fromkeys(AXES, 0.0), dict.fromkeys(AXES, 0.0), 0.0
    stored = (
        ("shard", held.dense, held.frozen, groups.shard),
        ("expert_data", held.routed, held.frozen_routed, groups.expert_data),
    )
    for axis, every, frozen, group in stored:
        count = held.tensors if stack.by_tensor and layout.zero else held.units
        gathered, elements = every if layout.shards(False) else every - frozen, every - frozen
        if layout.zero and gathered:
            narrower = held.quantised if axis == "shard" and layout.shards(False) else 0.0
            size = gathered * width - narrower * saved_by_a_base(spec)
            gathers[axis] += _messages(links, "all_gather", size, group, count)
            gathers[axis] += gathered * unpack if group.ranks > 1 else 0.0
        if not elements:
            continue
        reduces[axis] += _messages(links, _reduction(spec), elements * gradient, group, count)
        mine = elements / (group.ranks if layout.zero else 1)
        across = widths(spec).exact if stack.ours and layout.zero and group.ranks > 1 else gradient
        reduces["replicate"] += links.collective("all_reduce", mine * across, groups.replicate)
        updated += mine
    return DataMessages(gathers, reduces, updated)


def _update_seconds(spec: RunSpec, costs: CostModel, elements: float) -> float:
    """Seconds of the optimiser's update of `elements`, without what it copies."""
    ours, kind = costs.stack.ours, spec.train.optimiser_kind
    moved = _UPDATE_BYTES + 8 * len(kind.matrix_moments)
    if kind.eight_bit:
        moved = _EIGHT_BIT_BYTES if ours else _UPDATE_BYTES + 4
    moved += _ROUNDED_BYTES if ours and spec.precision.master == "bf16" else 0
    moved += _EMA_BYTES if spec.train.ema is not None else 0
    return elements * costs.kernels.updated(moved + _AROUND_BYTES, _AROUND_BYTES)


def _messages(links: CollectiveCosts, operation: str, size: float, group: GroupShape, count: int) -> float:
    """Seconds of `size` bytes in `count` messages, one after the other."""
    return count * links.collective(operation, size / count, group)
