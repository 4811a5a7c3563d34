"""A layout in float64, and then in the run's own precision, against one device."""

from __future__ import annotations

from meshwright.comm.mesh import Mesh
from meshwright.spec import RunSpec
from meshwright.verify.precision import verify_in_own_precision

OWN_STEPS = 2
"""Steps in the run's own precision behind those in float64: what is wrong in the first one's update, or in
copies of it, shows in the second."""


def with_own_precision(
    found: dict[str, object] | None, spec: RunSpec, mesh: Mesh
) -> dict[str, object] | None:
    """Take a few steps in the run's precision if what was `found` in float64, on the first rank, is equal.

    The first rank gets both results, the second as `own` in the first.

    In these steps ranks sum gradients, apply them at once, and learn from data alone; all else is compared in
    float64.
    """
    own = None
    if spec.precision.compute != "fp64" and mesh.control.broadcast(found is None or found["equal"]):
        plain = spec.plain()
        own = verify_in_own_precision(plain, mesh.with_layout(plain.layout), OWN_STEPS, last_only=True)
    if found is None or own is None:
        return found
    told = {key: own[key] for key in ("equal", "first", "differences")}
    return {**found, **told, "own": own}
