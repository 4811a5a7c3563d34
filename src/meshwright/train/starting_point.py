"""The state that a run begins with: its initial weights, a checkpoint, or a snapshot of ranks before it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

from meshwright.checkpoint.errors import BadCheckpointError
from meshwright.checkpoint.no_snapshots import NoSnapshots
from meshwright.checkpoint.store import CheckpointStore
from meshwright.checkpoint.weights import Weights
from meshwright.comm.mesh import Mesh
from meshwright.data.corpus import Corpus
from meshwright.parallel.flat_param import Stored
from meshwright.spec import RunSpec, UserError
from meshwright.train import state
from meshwright.train.digest import SampleRecord
from meshwright.train.guard.guard import Guard
from meshwright.train.reference_run import ReferenceRun
from meshwright.train.step import Trainer

Row = dict[str, Any]


class StartingPoint(NamedTuple):
    """Where a run stands once its tensors are filled."""

    samples: SampleRecord
    """The samples of the steps that are done; a snapshot may be ahead of what it has taken down."""
    done: int = 0
    loss: float = math.nan
    saved: bool = False
    """True if this state is on disk."""
    from_memory: bool = False
    peak_flops: float = 0.0
    """FLOP/s of a product that the run has measured, 0 if it has not."""


class StartingPoints:
    """Fills a run's tensors, on one rank, with what it begins with; all ranks call each method together."""

    def __init__(
        self,
        spec: RunSpec,
        mesh: Mesh,
        corpus: Corpus,
        trainer: Trainer,
        store: CheckpointStore,
        snapshots: NoSnapshots,
        guard: Guard,
        weights: Callable[[], Weights | None],
        reference: ReferenceRun,
        has_run: bool,
    ) -> None:
        self.spec, self.mesh, self.corpus, self.trainer = spec, mesh, corpus, trainer
        self.store, self.snapshots, self.guard = store, snapshots, guard
        self._weights, self._reference = weights, reference
        self._has_run = has_run
        """True if an earlier start of the run was recorded."""

    def take(self, resume: str | None) -> StartingPoint:
        """The initial weights for None, else a checkpoint: the step `resume`, or for "auto" what is newest.

        Raises `UserError` for a folder that holds checkpoints where None is given, and for another run's.
        """
        if resume is not None:
            return self.resume(resume)
        if self.store.latest() is not None:
            raise UserError(
                f"{self.store.directory} already holds checkpoints; go on with --resume auto, or give "
                f"another --out or checkpoint.dir"
            )
        return self._initialise()

    def resume(self, resume: str) -> StartingPoint:
        """The newest snapshot or checkpoint for "auto", else the checkpoint of that step."""
        if resume != "auto" and not resume.isdecimal():
            raise UserError(f"--resume: {resume!r} is neither 'auto' nor a step")
        if resume == "auto" and self.snapshots.newest() is None:
            self.store.fetch(partial(self._check_same_run, where=self.spec.checkpoint.remote))
        step, latest = None if resume == "auto" else int(resume), self.store.latest()
        if (found := self._from_memory(resume, latest)) is not None:
            return found
        if resume == "auto" and latest is None:
            if self._has_run:
                self.store.warnings.append(
                    f"{self.store.directory} holds no checkpoint: the run starts from its initial weights"
                )
            return self._initialise()
        return self._from_disk(step, latest)

    def _initialise(self) -> StartingPoint:
        """Take the weights of `model.weights`, each rank its own part, or draw them."""
        weights = self.mesh.control.together(self._weights)
        if weights is not None and weights.exact and self.spec.precision.base != "fp64":
            self.store.warnings.append(
                f"model.weights: {self.spec.model.weights} has weights in float64, which this run rounds to "
                f"{self.spec.precision.master}; give precision.compute = fp64 to keep them as they are"
            )
        if weights is None and not self.spec.trains_all:
            self.store.warnings.append(
                "model.weights: the weights are random, and those that are frozen stay so; for a trained "
                "model give its folder, as --from FOLDER"
            )
        self.mesh.control.together(lambda: self.trainer.initialise(weights))
        self._reference.begin()
        self.store.save_frozen(state.frozen_tensors(self.trainer))
        return StartingPoint(SampleRecord(self.mesh))

    def _from_disk(self, step: int | None, latest: int | None) -> StartingPoint:
        """The checkpoint of a step, or the last one; those after it are given up."""
        self._reference.resume()
        frozen = state.frozen_tensors(self.trainer)
        kept = self._load(partial(self.store.load, step, converted=frozen), frozen)
        state.put_frozen(self.trainer, frozen)
        found = self._restored(kept, SampleRecord(self.mesh, kept["samples_sha256"], int(kept["step"])))
        self.store.save_frozen(state.frozen_tensors(self.trainer))
        if step is not None and latest != step:
            self.store.go_back(step)
        if found.done > self.spec.train.last_step:
            raise UserError(
                f"train.steps: the checkpoint is at step {found.done}, after the last step "
                f"{self.spec.train.last_step}; give more steps"
            )
        return found._replace(saved=True)

    def _from_memory(self, resume: str, latest: int | None) -> StartingPoint | None:
        """The newest snapshot, unless the checkpoint of step `latest` is newer or asked for.

        A damaged snapshot is reported, and not used.
        """
        step = self.snapshots.newest()
        if step is None or resume != "auto" or step < (latest or 0):
            self.snapshots.clear()
            return None
        self._reference.resume()
        try:
            form = state.form(self.trainer)
            kept = self._load(partial(self.snapshots.load, step, form=form))
            frozen = state.frozen_tensors(self.trainer)
            self.store.frozen.load(kept.get("frozen"), frozen)
            state.put_frozen(self.trainer, frozen)
        except BadCheckpointError as error:
            self.store.warnings.append(f"{error}; the last checkpoint is used instead")
            self.snapshots.clear()
            return None
        samples = SampleRecord(self.mesh, kept["samples_sha256"], kept["samples_steps"])
        found = self._restored(kept, samples)
        measured = kept["matmul_flops_per_second"]
        return found._replace(saved=latest == step, from_memory=True, peak_flops=measured)

    def _load(
        self,
        load: Callable[[dict[str, Stored], Callable[[Row], None]], Row],
        frozen: Mapping[str, Stored] = MappingProxyType({}),
    ) -> Row:
        """Fill the run's tensors; which of them there are is known once the checkpoint's state is read.

        Those in `frozen` are filled, too.
        """
        tensors = state.tensors(self.trainer)

        def check(kept: Row) -> None:
            self._check_same_run(kept)
            there = state.tensors_in(self.trainer, kept)
            tensors.clear()
            tensors.update({**there, **frozen})

        return load(tensors, check)

    def _check_same_run(self, kept: Row, where: str | None = None) -> None:
        """Refuse the state of another run's checkpoint, in `where`, by default the store's folder."""
        state.check_fields(kept, where or self.store.directory)
        name = self._name(kept, where)
        state.check_same_run(self.spec, kept, self.corpus.digest, name, self.corpus.first_token_remark)
        for part in self.trainer.parts:
            part.check(kept, name)

    def _name(self, kept: Row, where: str | None = None) -> str:
        return f"the checkpoint of step {kept['step']} in {where or self.store.directory}"

    def _restored(self, kept: Row, samples: SampleRecord) -> StartingPoint:
        state.restore(self.trainer, kept)
        self.guard.restore(kept.get("guard"), self._name(kept))
        loss = kept["loss"] if kept["loss"] is not None else math.nan
        return StartingPoint(samples, int(kept["step"]), loss)
