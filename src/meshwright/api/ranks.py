"""A call on all ranks of a layout: as one of them, in this process alone, or in processes of their own."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from meshwright.profile.machine import has_gpu_driver
from meshwright.rank.env import worker
from meshwright.rank.scratch import scratch_folder
from meshwright.spec import RunSpec

if TYPE_CHECKING:
    from meshwright.chaos.faults import FaultPlan
    from meshwright.launch.start import ProbedRun, Tell

T = TypeVar("T")
Result = dict[str, Any]

RESULT = "result"
"""File that the first rank leaves beside the call."""
COMPILER = ("torch._inductor.compile_fx",)
"""Modules that torch.compile imports when it is first used, which takes seconds."""
DYNAMO = ("torch._dynamo",)
"""Torch's checkpointing, and custom operators such as attention on GPUs, import it at their first call."""


def run_on_ranks(
    call: Callable[[], T],
    ranks: int,
    *,
    spec: RunSpec | None = None,
    modules: Sequence[str] = (),
    again: Callable[[], T] | None = None,
    tell: Tell | None = None,
    faults: FaultPlan | None = None,
    health: ProbedRun | None = None,
) -> T:
    """Make a call, such as a `partial` of a module's function, on all ranks; return the first one's result.

    A process that is a rank already, of a torchrun, makes the call and returns its own result. Else one rank
    is this process, and several are processes that import `modules` before they make the call. `spec` is
    their run, whose recovery and stages their supervisor needs.

    With `again` one rank is a process, too, and ranks that fail make that call when they are started again
    (`recovery.max_restarts`); `tell` hears of each failure. `faults` are injected into the ranks, and this
    host's `health` is probed before a restart.
    """
    if worker() is not None or (ranks == 1 and again is None):
        return call()
    from meshwright.launch.supervisor import Restarts, run_ranks

    with scratch_folder() as folder:
        argv, restarts = write_call(call, folder / "call"), None
        if again is not None and tell is not None:
            restarts = Restarts(write_call(again, folder / "again"), tell)
        run_ranks(
            argv,
            ranks,
            preload=preload(modules, spec),
            restarts=restarts,
            recovery=None if spec is None else spec.recovery,
            stages=1 if spec is None else spec.layout.pp,
            faults=faults,
            health=health,
        ).raise_for_failure()
        found: T = pickle.loads((folder / RESULT).read_bytes())
        return found


def write_call(call: Callable[[], object], file: Path) -> list[str]:
    """Write a call to a file; return the arguments of ranks that make it, and leave its result beside it."""
    file.write_bytes(pickle.dumps(call))
    return [str(file), str(file.with_name(RESULT))]


def preload(modules: Sequence[str], spec: RunSpec | None) -> tuple[str, ...]:
    """Modules that are imported before the ranks of a run are forked: these, and those that torch imports."""
    if spec is None:
        return tuple(modules)
    if spec.train.compile:
        return (*modules, *COMPILER)
    return (*modules, *(DYNAMO if spec.recompute.policy != "none" or has_gpu_driver() else ()))
