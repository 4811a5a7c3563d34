"""Is a run that is saved and loaded again equal to one device that never stops?

`save_part` trains some steps and saves, with the training loop of `meshwright train`. `load_part` goes on
from there, in ranks that know nothing of the first: on the same layout or another one, or from the HF folder
that the checkpoint was exported to. Each is compared with the reference after each step, the second also as
soon as it has loaded.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from meshwright.parallel.mesh import Mesh
from meshwright.parallel.waiting import while_others_wait
from meshwright.spec import RunSpec, UserError
from meshwright.spec.tiling import Tiling, tiled
from meshwright.train.callbacks import Observers
from meshwright.train.loop import TrainingRun
from meshwright.verify.compare import Comparison, Difference, axes_of
from meshwright.verify.gather_state import State, gather_state
from meshwright.verify.narrow import narrow
from meshwright.verify.reference import ReferenceStep, reference_steps
from meshwright.verify.reference_data import batches
from meshwright.verify.reference_weights import initial_weights
from meshwright.verify.tiles import small_tiles
from meshwright.verify.verify import exact

RUN = "run.json"


def save_part(spec: RunSpec, mesh: Mesh, steps: int, folder: Path) -> dict[str, Any] | None:
    """Train the first half of 2 `steps` steps, and save in `folder`; the first rank gets the result."""
    whole, note = narrow(exact(spec, 2 * steps))
    tree = whole.to_json()
    tree["train"] |= {"stop_at": steps, "log_every": 1, "eval_every": 0, "eval_tokens": whole.data.seq_len}
    tree["train"]["trackers"] = []
    tree["checkpoint"] |= {"dir": None, "every": 0}
    part = RunSpec.model_validate(tree)
    record = json.dumps({"spec": part.to_json(), "narrowed": note})
    mesh.control.on_first(lambda: (folder / RUN).write_text(record, encoding="utf-8"))
    return _run(part, mesh, folder, _Watch(part, mesh, 0), note)


def load_part(spec: RunSpec, mesh: Mesh, saved: Path, folder: Path) -> dict[str, Any] | None:
    """Take as many steps again as `save_part` has taken in `saved`, on the layout of `spec`.

    `folder` holds the run to go on from: `saved`, or what was exported from it and imported again, where
    moments and steps begin anew. The first rank gets the result.
    """
    record = json.loads((saved / RUN).read_text(encoding="utf-8"))
    if "narrowed" not in record:
        raise UserError(
            f"--load: {saved} was not written by `meshwright verify --save`; give a folder that was"
        )
    before = RunSpec.model_validate(record["spec"])
    steps = before.train.last_step
    imported = folder != saved
    tree = before.to_json()
    tree["layout"] = spec.to_json()["layout"]
    tree["train"]["stop_at"] = steps if imported else 2 * steps
    after = RunSpec.model_validate(tree)
    return _run(after, mesh, folder, _Watch(after, mesh, steps, imported), record["narrowed"], "auto")


def tiles_of(saved: Path) -> Tiling:
    """Return the sizes of pieces that `save_part` has used in `saved`."""
    record = json.loads((saved / RUN).read_text(encoding="utf-8"))
    return small_tiles(RunSpec.model_validate(record["spec"]))


def _run(
    spec: RunSpec, mesh: Mesh, folder: Path, watch: _Watch, note: str | None, resume: str | None = None
) -> dict[str, Any] | None:
    with tiled(small_tiles(spec)):
        watch.run = TrainingRun(spec, mesh, folder, watch)
        watch.run.execute(resume)
    if mesh.rank:
        return None
    verdict = watch.comparison.result(axes_of(spec.layout, spec.microbatches))
    steps = len({step for step, kind in watch.comparison.kinds if kind == "loss"})
    return {**verdict, "narrowed": note, "layout": spec.layout.describe(), "steps": steps}


class _Watch(Observers):
    """Compares a run with the reference as it trains; every rank has one, and errors are not swallowed.

    `saved` is the number of steps after which the run was saved, 0 for one that begins.
    """

    def __init__(self, spec: RunSpec, mesh: Mesh, saved: int, imported: bool = False) -> None:
        super().__init__([])
        self.spec, self.mesh, self.saved, self.imported = spec, mesh, saved, imported
        self.comparison = Comparison()
        self.run: TrainingRun | None = None
        self._reference: Iterator[ReferenceStep] = iter(())
        if mesh.rank == 0:
            initial = initial_weights(spec.model, spec.train.seed, spec.precision.master)
            weights = {name: weight.to(mesh.device) for name, weight in initial.items()}
            self._reference = reference_steps(spec, weights, batches(spec))

    def on_start(self, info: dict[str, Any]) -> None:
        """Compare what was loaded."""
        if not self.saved:
            return
        found = self._state()
        wanted = self._reference_after(self.saved)
        if wanted is None:
            return
        missed = math.inf if info["step"] != (0 if self.imported else self.saved) else 0.0
        reached = Difference(self.saved, "loaded step", str(info["step"]), missed)
        self.comparison.note(self.saved, "loaded step", [reached])
        for kind, tensors in found.items():
            if self.imported and kind in self.spec.train.moments:
                wanted[kind] = {name: torch.zeros_like(moment) for name, moment in wanted[kind].items()}
            if self.imported and kind == "ema":
                wanted[kind] = wanted["parameter"]
            self.comparison.add(self.saved, f"loaded {kind}", tensors, wanted[kind])
        if self.imported:
            weights = wanted["parameter"] | wanted["router bias"]
            self._reference = reference_steps(self.spec, weights, batches(self.spec))

    def on_step(self, row: dict[str, Any]) -> None:
        """Compare a step."""
        found, step = self._state(), int(row["step"])
        wanted = self._reference_after(1)
        if wanted is None:
            return
        for kind, name in (("loss", "loss"), ("grad norm", "grad_norm")):
            number = torch.tensor(row[name], dtype=torch.float64)
            self.comparison.add(step, kind, {kind: number}, wanted[kind])
        for kind, tensors in found.items():
            self.comparison.add(step, kind, tensors, wanted[kind])

    def _state(self) -> State:
        assert self.run is not None
        return gather_state(self.run.trainer)

    def _reference_after(self, steps: int) -> ReferenceStep | None:
        """Return the reference's state after so many more steps on the first rank, for which others wait."""
        computed: list[ReferenceStep] = []
        self.mesh.heartbeat.phase("start")  # the hang watch sets no limit to this phase
        first = self.mesh.rank == 0
        while_others_wait(self.mesh.control, first, lambda: computed.extend(islice(self._reference, steps)))
        return computed[-1] if first else None
