"""Seconds that a step spends on parameters and gradients between data ranks, and on the optimiser.

What a stack sends beside its compute costs what is left of it: the parameters of ZeRO-3 are gathered unit
by unit under the forward and the backward, gradients are reduced under the backward that completes them.
The first unit of the forward and the last of the backward have nothing to run beside. Compute slows down
while it shares the device and its memory with a collective, and a collective that shares a processor with
compute takes longer, so that less of it is done by the time compute is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from meshwright.planner.cost.collectives import CollectiveCosts
from meshwright.planner.cost.software import SoftwareStack
from meshwright.planner.group_shapes import GroupShape, axes
from meshwright.spec import RunSpec
from meshwright.units import FORMAT_BYTES

AXES = ("shard", "expert_data", "replicate")
"""What the data ranks are divided into, each with messages of its own."""


@dataclass(frozen=True)
class StoredParameters:
    """What a pipeline rank has of the model: parameters, on one tensor rank."""

    dense: float
    routed: float
    units: int
    tensors: int


@dataclass(frozen=True)
class DataSeconds:
    """Of one rank and step."""

    sent: Mapping[str, float]
    """All messages by axis, hidden or not."""
    exposed: float
    """What of them is not hidden."""
    slowed: float
    """What compute loses beside them."""
    optimiser: float
    each_microbatch: float = 0.0
    """Of `exposed` and `slowed`, what every microbatch waits for by itself."""

    @property
    def final(self) -> float:
        """After the last backward."""
        return self.optimiser + (0.0 if self.each_microbatch else self.exposed + self.slowed)


def data_seconds(
    spec: RunSpec,
    stack: SoftwareStack,
    links: CollectiveCosts,
    held: StoredParameters,
    forward: float,
    backward: float,
    update: float,
    unpack: float = 0.0,
) -> DataSeconds:
    """What a rank with `held` spends, where a microbatch's forward and backward take it so many seconds.

    `update` is the optimiser's seconds for each parameter of a rank, `unpack` those in which a gathered one
    is laid out.
    """
    layout, at = spec.layout, axes(spec.layout)
    width = FORMAT_BYTES[spec.precision.compute] if stack.own else stack.gather_bytes
    gathers, reduces, whole = dict.fromkeys(AXES, 0.0), dict.fromkeys(AXES, 0.0), 0.0
    for axis, elements, group in zip(
        AXES, (held.dense, held.routed), (at.shard, at.expert_data), strict=False
    ):
        if not elements:
            continue
        count = held.tensors if stack.by_tensor and layout.zero else held.units
        operation = "reduce_scatter" if layout.zero else "all_reduce"
        reduces[axis] += _messages(links, operation, elements * stack.gradient_bytes, group, count)
        if layout.zero:
            gathers[axis] += _messages(links, "all_gather", elements * width, group, count)
            gathers[axis] += elements * unpack if group.ranks > 1 else 0.0
        mine = elements / (group.ranks if layout.zero else 1)
        reduces["replicate"] += links.collective("all_reduce", mine * stack.gradient_bytes, at.replicate)
        whole += mine
    optimiser = whole * update
    often = spec.microbatches if layout.pp == 1 else 0
    gather, reduce = sum(gathers.values()), sum(reduces.values())
    contention, slower = stack.contention, 1.0
    if stack.own and reduce + gather:
        lost = reduce * links.contention("reduce_scatter" if layout.zero else "all_reduce")
        slower = links.slowed
        contention = (lost + gather * links.contention("all_gather")) / (reduce + gather)
    if layout.zero == 3:
        pace = (contention, slower)
        return _everywhere(stack, gathers, reduces, pace, forward, backward, optimiser, often, held.units)
    times = max(1, often) if layout.zero == 2 else 1
    hidden = min(reduce, backward / slower) * stack.overlap_data * (1 - 1 / max(1, held.units))
    hidden_gather = min(gather, forward / slower) * stack.overlap_gather_parameters
    exposed = times * (reduce - hidden) + gather - hidden_gather
    slowed = contention * (times * hidden + hidden_gather)
    sent = {axis: times * reduces[axis] + gathers[axis] for axis in AXES}
    return DataSeconds(sent, exposed, slowed, optimiser)


def _everywhere(
    stack: SoftwareStack,
    gathers: Mapping[str, float],
    reduces: Mapping[str, float],
    pace: tuple[float, float],
    forward: float,
    backward: float,
    optimiser: float,
    often: int,
    units: int,
) -> DataSeconds:
    """ZeRO-3: gathered for the forward and again for the backward, `often` times a step.

    `pace` is what compute loses beside a message, and how much longer a message takes beside compute.
    """
    gather, reduce = sum(gathers.values()), sum(reduces.values())
    contention, slower = pace
    first = gather / max(1, units)
    hidden = min(gather, forward / slower) * stack.overlap_data
    hidden_back = min(gather + reduce, backward / slower) * stack.overlap_data
    exposed = (gather - hidden) + (gather + reduce - hidden_back)
    exposed = max(exposed, first + reduce / max(1, units))
    slowed = contention * (hidden + hidden_back)
    each = exposed + slowed if often else 0.0  # in a pipeline once a step, and not for each microbatch
    often = often or 1
    sent = {axis: often * (2 * gathers[axis] + reduces[axis]) for axis in AXES}
    return DataSeconds(sent, often * exposed, often * slowed, optimiser, each)


def _messages(links: CollectiveCosts, operation: str, size: float, group: GroupShape, count: int) -> float:
    """Seconds of `size` bytes in `count` messages, one after the other."""
    return count * links.collective(operation, size / count, group)
