"""A rank that gets no memory ends with one sentence, which says what needs less."""

from __future__ import annotations

import errno
import re
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from meshwright.planner.explain.explanation import describe
from meshwright.planner.plan import estimate
from meshwright.rank.auto_layout import leaner, present
from meshwright.rank.env import worker
from meshwright.spec import RunSpec, UserError
from meshwright.units import gigabytes

LEANER = 0.75
"""Most memory that a proposal may need, as a share of what the run needs that did not fit."""

_PHRASES = ("can't allocate memory", "Cannot allocate memory", "bad_alloc", "out of memory")
_ASKED = re.compile(r"(?:tried to|Unable to) allocate ([\d.]+) (\w+)", re.IGNORECASE)


@contextmanager
def memory_errors_told(spec: RunSpec) -> Iterator[None]:
    """Raise `UserError` where a run is refused memory, on its device or on the host, and pass on the rest.

    The sentence names a layout and recomputation that need clearly less by the plan. What the kernel kills
    for want of memory raises nothing (`profile/cgroup.py` reports that).
    """
    try:
        yield
    except (MemoryError, RuntimeError, OSError) as error:
        if not is_out_of_memory(error):
            raise
        asked = _asked(str(error))
        traceback.clear_frames(error.__traceback__)  # they hold the run's tensors, and planning needs memory
        raise UserError(_sentence(spec, asked)) from error


def is_out_of_memory(error: BaseException) -> bool:
    """Return True if torch, numpy, Python or the system say by this error that no memory is left."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, RuntimeError) and any(phrase in str(error) for phrase in _PHRASES)


def _asked(message: str) -> str:
    """Return how much an allocator's message says that it was asked for, or nothing."""
    found = _ASKED.search(message)
    if found is None:
        return ""
    amount, unit = found.groups()
    return gigabytes(int(amount)) if unit == "bytes" else f"{amount} {unit}"


def _sentence(spec: RunSpec, asked: str) -> str:
    place = worker()
    who = f"rank {place.rank} of {place.world_size}" if place else "this process"
    more = f" (it asked for {asked} more)" if asked else ""
    try:
        need = estimate(spec, present().resized(spec.layout.world_size)).memory.device
    except UserError:  # a device that is not in the catalogue
        return (
            f"layout: {who} ran out of memory{more}; recompute.policy = 'full' or shorter sequences need less"
        )
    return (
        f"layout: {who} ran out of memory{more}: {describe(spec)} needs {gigabytes(need)} a rank by the plan "
        f"and the program itself some more; {leaner(spec, LEANER * need)}"
    )
