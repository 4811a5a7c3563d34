"""Seconds of a step for parameters and gradients between data ranks, and for the optimiser.

Messages that overlap compute cost what compute does not hide: ZeRO-3 gathers parameters unit
by unit under the forward and the backward, and gradients are reduced under the backward that completes them.
The first unit of the forward and the last of the backward have nothing to hide behind. Compute slows down
while it shares the device and its memory with a collective, and a collective that shares a processor with
compute takes longer, so that less of it is done when compute is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
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


class _Messages(NamedTuple):
    """Seconds of a rank's gathers and reductions by axis, and the elements that it updates."""

    gathers: dict[str, float]
    reduces: dict[str, float]
    updated: float


def data_seconds(
    spec: RunSpec, costs: CostModel, held: StoredParameters, forward: float, backward: float
) -> DataSeconds:
    """Seconds of a rank with `held`, whose microbatch takes `forward` and `backward` seconds."""
    found = _data_seconds(spec, costs, held, forward, backward)
    if not costs.counted:
        return found
    each, once = _copies(spec, held)
    names = sorted({*each, *once})
    moved = costs.kernels.moved
    copies = {name: moved(spec.microbatches * each.get(name, 0.0) + once.get(name, 0.0)) for name in names}
    return replace(
        found, copies=copies, copies_each=moved(sum(each.values())), copies_once=moved(sum(once.values()))
    )


def _copies(spec: RunSpec, held: StoredParameters) -> tuple[dict[str, float], dict[str, float]]:
    """Bytes of copies of units by purpose: in each microbatch, and once a step."""
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
    if layout.zero == 3 and layout.pp == 1:
        return gathers, once
    return {}, gathers | once


def _data_seconds(
    spec: RunSpec, costs: CostModel, held: StoredParameters, forward: float, backward: float
) -> DataSeconds:
    """Seconds of messages and of the optimiser."""
    layout, stack, links = spec.layout, costs.stack, costs.links
    gathers, reduces, updated = _all_messages(spec, costs, held)
    optimiser = max(_update_seconds(spec, costs, updated), copy_seconds(spec, costs, updated))
    often = spec.microbatches if layout.pp == 1 else 0
    times = max(1, often) if layout.zero >= 2 else 1  # a pipeline gathers and reduces once a step
    last = reduces["replicate"] if stack.ours and times > 1 else 0.0  # replicas wait for the last microbatch
    gather, reduce, units = sum(gathers.values()), sum(reduces.values()) - last, max(1, held.units)
    contention, slower = stack.numbers.contention, 1.0
    if stack.own and reduce + gather:
        lost = reduce * links.contention(_reduction(spec)) + gather * links.contention("all_gather")
        contention, slower = lost / (reduce + gather), links.slowed
    forward, backward = forward / slower, backward / slower  # seconds of messages that compute can hide
    behind = gather + reduce if layout.zero == 3 else reduce
    hidden_last = min(last, max(0.0, backward - behind)) * stack.overlap("data")
    once = last - hidden_last
    if layout.zero == 3:
        sent = {axis: times * (2 * gathers[axis] + reduces[axis]) for axis in AXES}
        sent["replicate"] -= (times - 1) * last
        hidden = min(gather, forward) * stack.overlap("data")
        hidden_back = min(gather + reduce, backward) * stack.overlap("data")
        exposed = max((gather - hidden) + (gather + reduce - hidden_back), gather / units + reduce / units)
        slowed = contention * (hidden + hidden_back)
        each, slows = exposed + slowed if often else 0.0, times * slowed + contention * hidden_last
        return DataSeconds(
            sent, times * exposed + once, slows, optimiser, each, once + contention * hidden_last
        )
    hidden = min(gather, forward) * stack.overlap("parameters")
    hidden_back = min(reduce, backward) * stack.overlap("data") * (1 - 1 / units)
    exposed = times * (reduce - hidden_back) + gather - hidden + once
    sent = {axis: times * reduces[axis] + gathers[axis] for axis in AXES}
    sent["replicate"] -= (times - 1) * last
    slowed = contention * (times * hidden_back + hidden + hidden_last)
    return DataSeconds(sent, exposed, slowed, optimiser)


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


def _all_messages(spec: RunSpec, costs: CostModel, held: StoredParameters) -> _Messages:
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
    return _Messages(gathers, reduces, updated)


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
