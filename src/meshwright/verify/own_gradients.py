"""One device's updates by the layout's own gradients, where these differ from its own by rounding.

AdamW divides a gradient by its root mean square and eps. Where an element of it is about as small as eps, the
rounding of float64 becomes a visible part of the update, above all of a parameter that begins at 0. Gradients
are compared by themselves; which update is due follows from the gradient that was found.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from meshwright.spec import RunSpec
from meshwright.verify.compare import TOLERANCE, sizes_of
from meshwright.verify.kinds import ByKind
from meshwright.verify.reference.groups import is_frozen
from meshwright.verify.reference.updates import ReferenceUpdates

ROUNDING = TOLERANCE / 100
"""Most that counts as rounding of a gradient's element, as a share of what the gradient is measured by."""


class OwnGradients:
    """Takes the steps of one device from the initial `weights`, with the gradients that a layout finds.

    It follows parameters with a second moment. Islands, and gradients that are applied late, it leaves alone.
    """

    def __init__(self, spec: RunSpec, weights: Mapping[str, Tensor]) -> None:
        plain = spec.step_groups == 1 and not spec.staleness
        followed = {
            name: weight.clone()
            for name, weight in weights.items()
            if plain
            and "exp_avg_sq" in spec.train.moments_of(name, weight.ndim)
            and not is_frozen(spec, name)
        }
        self._updates = ReferenceUpdates(spec, followed)

    def step(self, number: int, found: ByKind, wanted: ByKind) -> dict[str, Mapping[str, Tensor]]:
        """Take step `number`; returns what is `wanted` of a layout that has `found` its gradients."""
        due, updates = wanted["gradient"], self._updates
        if not updates.parameters:
            return dict(wanted)
        sizes = sizes_of(due)
        updates.take(
            number, {name: _nearest(found["gradient"].get(name), due[name], sizes[name]) for name in due}
        )
        follows = {"parameter": updates.parameters, "ema": updates.averages}
        return {**wanted, **{kind: {**wanted[kind], **follows[kind]} for kind in follows if kind in wanted}}


def _nearest(found: Tensor | None, due: Tensor, size: float) -> Tensor:
    """The gradient that is due, with the rounding of the one that was found."""
    if found is None or found.shape != due.shape:
        return due
    most = ROUNDING * size
    return found.clamp(due - most, due + most)
