"""Many layouts of one world against one device, in the order in which they are given."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from itertools import islice
from typing import Any

import torch

from meshwright.comm.control import Control
from meshwright.comm.mesh import Mesh
from meshwright.spec import RunSpec
from meshwright.verify.precision import verify_in_own_precision
from meshwright.verify.reference.steps import ReferenceStep
from meshwright.verify.sweep_layouts import describe
from meshwright.verify.uneven import empty_slots
from meshwright.verify.verify import one_device, verify

Row = dict[str, Any]
"""Result of one layout: its description, verdict, largest difference, seconds and sentence."""


class KnownReferences:
    """The first `steps` steps of one device, computed once for all layouts that have equal batches.

    Of the layout only the slots count that have no targets, the step groups, and the ranks that cut rows
    which fp8-rowwise scales. An object is called as `one_device` is.
    """

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self._known: dict[str, list[ReferenceStep]] = {}

    def __call__(self, spec: RunSpec, device: torch.device) -> Iterator[ReferenceStep]:
        """Return the steps of a run on one device."""
        tree = spec.to_json()
        parts = [tree[part] for part in tree if part not in ("layout", "recompute", "checkpoint", "recovery")]
        parts += [empty_slots(spec), spec.step_groups]
        if spec.precision.compute == "fp8-rowwise":
            parts += [spec.layout.tp, spec.layout.etp]
        key = json.dumps(parts, sort_keys=True)
        if key not in self._known:
            self._known[key] = list(islice(one_device(spec, device), self.steps))
        return iter(self._known[key])


def check_layouts(
    runs: Sequence[RunSpec],
    steps: int,
    precision: str,
    until: float,
    control: Control,
    mesh_of: Callable[[RunSpec], AbstractContextManager[Mesh]],
    note: Callable[[Row | None], None],
) -> None:
    """Compare each run with one device, and begin none after the time `until` (`time.time`) of rank 0.

    With `precision` "run" each computes in its own formats, else in float64. `mesh_of` makes the mesh of a
    run over all ranks that `control` joins. Rank 0 notes None as a run begins, and then its row.
    """
    references = KnownReferences(steps)
    for run in runs:
        if not control.broadcast(time.time() < until):
            return
        if control.rank == 0:
            note(None)
        began = time.monotonic()
        with mesh_of(run) as mesh:
            if precision == "run":
                found = verify_in_own_precision(run, mesh, steps)
                if run.train.compile:  # a function is compiled a few times at most: those of one layout
                    torch.compiler.reset()
            else:
                found = verify(run, mesh, steps, references)
        if found is not None:
            note(row_of(run, found, time.monotonic() - began))


def row_of(run: RunSpec, found: dict[str, Any], seconds: float) -> Row:
    """Return the row of a run that was compared."""
    first = found["first"]
    return {
        "layout": describe(run),
        "verdict": "equal" if found["equal"] else "UNEQUAL",
        "worst": found["worst_relative"],
        "seconds": round(seconds, 3),
        "sentence": None if first is None else first["sentence"],
    }
