"""The parts of a step, in the order in which they act: a new one is a line in `parts_of` and in `KINDS`."""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.comm.mesh import Mesh
from meshwright.distil.teacher import Distillation, distillation_of
from meshwright.islands.outer_quorum import Arrivals, QuorumOuter, islands_of
from meshwright.model.soft_targets import SoftTargetSource
from meshwright.optim.clipping import Clipping
from meshwright.optim.ema import ema_of
from meshwright.parallel.delayed_scaling import DelayedScaling, delayed_scaling_of
from meshwright.parallel.expert_buffers import expert_buffers_of
from meshwright.parallel.parallelize import ParallelDecoder
from meshwright.parallel.preference import Preference, preference_of
from meshwright.parallel.router_balance import RouterBalance
from meshwright.parallel.stale_gradients import StaleGradients, due_gradients
from meshwright.parallel.step_part import StepPart
from meshwright.spec import RunSpec


@dataclass(frozen=True)
class Sources:
    """Sources that parts of a step draw on outside of its ranks."""

    soft_targets: SoftTargetSource | None = None
    """Answers about each step's tokens; there if and only if the spec asks for distillation."""
    arrivals: Arrivals | None = None
    """The order in which islands come that exchange by quorum; by default that of a script."""


KINDS: tuple[type[StepPart], ...] = (
    DelayedScaling,
    Clipping,
    QuorumOuter,
    StaleGradients,
    Distillation,
    Preference,
)
"""The classes of parts whose state has fields in a checkpoint."""
COMPONENTS_OF_PARTS = (RouterBalance.component, *(kind.component for kind in KINDS if kind.component))
"""Components of memory, beside the optimiser's, that parts hold."""


def parts_of(
    run: RunSpec, run_mesh: Mesh, mesh: Mesh, built: ParallelDecoder, sources: Sources
) -> list[StepPart]:
    """The parts of a step of the ranks of `mesh`, which step together; `run_mesh` has all of the run."""
    spec, states = run.of_step_group(), built.states
    return [
        *ema_of(spec, states),
        built.balance,
        *expert_buffers_of(built.buffers),
        built.further,
        *delayed_scaling_of(spec, mesh, states, built.products),
        Clipping(spec, states),
        *distillation_of(spec, sources.soft_targets),
        *preference_of(spec, mesh, built),
        due_gradients(spec, states),
        islands_of(run, run_mesh, states, built.balance, sources.arrivals),
    ]
