"""Seconds that blocks wait for copies of activations over the device's link to its host.

While a block computes, what the block before it saved leaves; in its backward, what the next one needs comes
(`parallel/activation_offload.py`). So a block's pass takes as long as it computes, or as its own copies take,
whichever is longer: blocks are taken to be alike, and the last of a stage, which has no copies, too.
"""

from __future__ import annotations

from meshwright.planner.activations import movable
from meshwright.planner.activations_sizes import Sizes
from meshwright.planner.cost.breakdown import PassSeconds, Seconds
from meshwright.spec import RunSpec
from meshwright.spec.layers import LayerKind


def moved_bytes(spec: RunSpec, kind: LayerKind) -> float:
    """Bytes that a block of this program copies to its host in a microbatch, and back."""
    if spec.train.offload_activations == "none":
        return 0.0
    sizes = Sizes(spec)
    return movable(sizes, sizes.kinds[kind])


def with_copies(passes: PassSeconds, size: float, link: float | None) -> PassSeconds:
    """`passes` of a block with the seconds that it waits for copies of `size` bytes, one way.

    `link` is in bytes/s one way; where it is not known, copies are taken to be hidden.
    """
    if not size or link is None:
        return passes
    copy = size / link
    forward = max(0.0, copy - passes.forward.total)
    backward = max(0.0, copy - (passes.total - passes.forward.total))
    return passes._replace(
        forward=passes.forward.plus(Seconds(offload=forward)),
        input=passes.input.plus(Seconds(offload=backward)),
    )
