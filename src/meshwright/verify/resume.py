"""Is a run that is saved and loaded again equal to one device that never stops?

`save_part` trains some steps and saves, with the training loop of `meshwright train`. `load_part` goes on
from there, in ranks that know nothing of the first: on the same layout or another one, from the checkpoint,
from the snapshot in memory that a restart takes, or from the HF folder that the checkpoint was exported to.
Each is compared with the reference after each step, the second also as
soon as it has loaded.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from meshwright.comm.mesh import Mesh
from meshwright.comm.waiting import while_others_wait
from meshwright.spec import RunSpec, UserError
from meshwright.spec.precision import DELAYED
from meshwright.spec.tiling import Tiling, tiled
from meshwright.train.callbacks import Observers
from meshwright.train.loop import TrainingRun
from meshwright.train.open_run import open_run
from meshwright.verify.compare import Comparison, Difference, axes_of
from meshwright.verify.gather_state import State, gather_state
from meshwright.verify.held_out import AVERAGE, reference_losses
from meshwright.verify.kinds import imported, minuends, model_in
from meshwright.verify.narrow import narrow
from meshwright.verify.reference import run_steps
from meshwright.verify.reference.data import batches
from meshwright.verify.reference.low_precision import ReferenceLinears
from meshwright.verify.reference.steps import ReferenceStep
from meshwright.verify.reference.weights import initial_weights
from meshwright.verify.tiles import small_tiles
from meshwright.verify.verify import exact

RUN, SLOTS = "run.json", "snapshots"
"""In the folder of a run that was saved: its spec, and the files that stand for a supervisor's memory."""


def save_part(
    spec: RunSpec, mesh: Mesh, steps: int, folder: Path, snapshot: bool = False
) -> dict[str, Any] | None:
    """Train the first half of 2 `steps` steps, and save in `folder`, with a `snapshot` there, too; the first
    rank gets the result."""
    whole, note = narrow(exact(spec, 2 * steps))
    tree = whole.to_json()
    tree["train"] |= {"stop_at": steps, "log_every": 1, "eval_every": 0, "eval_tokens": whole.data.seq_len}
    tree["train"]["trackers"] = []
    tree["checkpoint"] |= {"dir": None, "every": 0}
    tree["recovery"]["snapshot_every"] = 1
    part = RunSpec.model_validate(tree)
    record = json.dumps({"spec": part.to_json(), "narrowed": note})
    mesh.control.on_first(lambda: (folder / RUN).write_text(record, encoding="utf-8"))
    return _run(part, mesh, folder, _ComparedRun(part, mesh, 0), note, slots=_slots(folder, mesh, snapshot))


def load_part(
    spec: RunSpec, mesh: Mesh, saved: Path, folder: Path, snapshot: bool = False
) -> dict[str, Any] | None:
    """Take as many steps again as `save_part` has taken in `saved`, on the layout of `spec`.

    `folder` holds the run to go on from: `saved`, or what was exported from it and imported again, where
    moments and steps begin anew. With `snapshot` it goes on from the snapshot in `saved`. The first rank gets
    the result.
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
    watch = _ComparedRun(after, mesh, steps, imported, snapshot)
    return _run(after, mesh, folder, watch, record["narrowed"], "auto", _slots(saved, mesh, snapshot))


def _slots(folder: Path, mesh: Mesh, snapshot: bool) -> list[list[int]]:
    """Descriptors of files for two snapshots of each rank, all of one host; none without a `snapshot`."""
    if not snapshot:
        return []
    place = folder / SLOTS
    mesh.control.on_first(lambda: place.mkdir(exist_ok=True))
    names = [[f"{rank}.{turn}" for turn in range(2)] for rank in range(mesh.control.size)]
    return [[os.open(place / name, os.O_RDWR | os.O_CREAT, 0o600) for name in of_rank] for of_rank in names]


def tiles_of(saved: Path) -> Tiling:
    """Return the sizes of pieces that `save_part` has used in `saved`."""
    record = json.loads((saved / RUN).read_text(encoding="utf-8"))
    return small_tiles(RunSpec.model_validate(record["spec"]))


def _run(
    spec: RunSpec,
    mesh: Mesh,
    folder: Path,
    watch: _ComparedRun,
    note: str | None,
    resume: str | None = None,
    slots: Sequence[Sequence[int]] = (),
) -> dict[str, Any] | None:
    try:
        with tiled(small_tiles(spec)):
            watch.run = open_run(spec, mesh, folder, watch, slots=slots)
            watch.run.execute(resume)
    finally:
        for descriptor in chain.from_iterable(slots):
            os.close(descriptor)
    if mesh.rank:
        return None
    verdict = watch.comparison.result(axes_of(spec.layout, spec.microbatches))
    steps = len({step for step, kind in watch.comparison.kinds if kind == "loss"})
    return {**verdict, "narrowed": note, "layout": spec.layout.describe(), "steps": steps}


class _ComparedRun(Observers):
    """Compares a run with the reference as it trains; every rank has one, and errors are not swallowed.

    `saved` is the number of steps after which the run was saved, 0 for one that begins.
    """

    def __init__(
        self, spec: RunSpec, mesh: Mesh, saved: int, imported: bool = False, snapshot: bool = False
    ) -> None:
        super().__init__([])
        self.spec, self.mesh, self.saved, self.imported = spec, mesh, saved, imported
        self.snapshot = snapshot
        self.comparison = Comparison()
        self.run: TrainingRun | None = None
        self._reference: Iterator[ReferenceStep] = iter(())
        self._wanted: ReferenceStep = {}
        """The last step of the reference, on the first rank."""
        if mesh.rank == 0:
            initial = initial_weights(spec.model, spec.train.seed, spec.precision.master, spec.lora)
            weights = {name: weight.to(mesh.device) for name, weight in initial.items()}
            self._reference = self._steps_from(weights)

    def _steps_from(self, weights: Mapping[str, Tensor]) -> Iterator[ReferenceStep]:
        return run_steps(self.spec, weights, batches(self.spec))

    def on_start(self, info: dict[str, Any]) -> None:
        """Compare what was loaded."""
        if not self.saved:
            return
        found = self._state()
        wanted = self._reference_after(self.saved)
        if wanted is None:
            return
        assert self.run is not None
        missed = info["step"] != (0 if self.imported else self.saved)
        words = str(info["step"])
        if self.snapshot and not self.run.from_memory:
            missed, words = True, f"{words} of a checkpoint, and not of the snapshot"
        reached = Difference(self.saved, "loaded step", words, math.inf if missed else 0.0)
        self.comparison.note(self.saved, "loaded step", [reached])
        if self.imported:
            model = model_in(wanted)
            wanted = imported(wanted, self.spec.train.moments)
            self._reference = self._steps_from(model)
        self._compare(self.saved, "loaded ", found, wanted)

    def on_step(self, row: dict[str, Any]) -> None:
        """Compare a step; its loss and norm are those of the ranks that step with the first."""
        found, step = self._state(), int(row["step"])
        wanted = self._reference_after(1)
        if wanted is None:
            return
        for kind, field in (("loss", "loss"), ("grad norm", "grad_norm")):
            name, of_first = next(iter(wanted[kind].items()))
            number = torch.tensor(row[field], dtype=torch.float64)
            self.comparison.add(step, kind, {name: number}, {name: of_first})
        self._compare(step, "", found, wanted)

    def on_eval(self, row: dict[str, Any]) -> None:
        """Compare the validation loss."""
        if not self._wanted or self.spec.precision.compute in DELAYED:
            return
        fields = {"loss": "val_loss", f"loss{AVERAGE}": "val_loss_ema"}
        found = {
            name: torch.tensor(row[field], dtype=torch.float64)
            for name, field in fields.items()
            if field in row
        }
        linears, most = ReferenceLinears(self.spec), self.spec.train.eval_tokens
        wanted = reference_losses(self.spec, self._wanted, linears, self.mesh.device, most)
        self.comparison.add(int(row["step"]), "validation loss", found, wanted)

    def _compare(self, step: int, prefix: str, found: State, wanted: ReferenceStep) -> None:
        for kind in (kind for kind in found if kind in wanted):
            self.comparison.add(step, prefix + kind, found[kind], wanted[kind], minuends(kind, wanted))

    def _state(self) -> State:
        assert self.run is not None
        return gather_state(self.run.trainer)

    def _reference_after(self, steps: int) -> ReferenceStep | None:
        """Return the reference's state after so many more steps on the first rank, for which others wait."""
        computed: list[ReferenceStep] = []
        self.mesh.heartbeat.phase("start")  # the hang watch sets no limit to this phase
        first = self.mesh.rank == 0
        while_others_wait(self.mesh.control, first, lambda: computed.extend(islice(self._reference, steps)))
        self._wanted = computed[-1] if first else {}
        return self._wanted if first else None
