"""A layout in float64, and then in the run's own precision, against one device."""

from __future__ import annotations

from meshwright.parallel.mesh import Mesh
from meshwright.spec import RunSpec
from meshwright.verify.precision import verify_in_own_precision
from meshwright.verify.verify import verify

OWN_STEPS = 2
"""Steps in the run's own precision behind those in float64: what is wrong in the first one's update, or in
copies of it, shows in the second."""


def verify_in_both(spec: RunSpec, mesh: Mesh, steps: int) -> dict[str, object] | None:
    """Run `steps` steps in float64 and, if these are equal, a few in the run's precision; the first rank gets
    the result, with that of the second part as `own`.

    The second part is of gradients that are summed in each step, without islands, late gradients or a
    teacher, which are compared in float64.
    """
    found = verify(spec, mesh, steps)
    own = None
    if spec.precision.compute != "fp64" and mesh.control.broadcast(found is None or found["equal"]):
        own = verify_in_own_precision(_plain(spec), mesh, OWN_STEPS, last_only=True)
    if found is None or own is None:
        return found
    return {
        **found,
        "equal": own["equal"],
        "first": own["first"],
        "differences": own["differences"],
        "own": own,
    }


def _plain(spec: RunSpec) -> RunSpec:
    """The run with gradients that are summed and applied in each step, and no teacher."""
    return RunSpec.model_validate({**spec.to_json(), "outer": {}, "distil": None})
