"""The loop around the step: start or resume, step, validate, save, end."""

from __future__ import annotations

import signal
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import torch

from meshwright.checkpoint.directory import published
from meshwright.checkpoint.no_snapshots import NoSnapshots
from meshwright.checkpoint.store import CheckpointStore
from meshwright.checkpoint.weights import Weights
from meshwright.comm.mesh import Mesh
from meshwright.data.corpus import Corpus
from meshwright.data.loader import Batch, Loader
from meshwright.kernels.attention_backend import backends_in_use
from meshwright.rank.machine import machine
from meshwright.rank.scheduler import deadly_signal, job
from meshwright.runs.record import RUN
from meshwright.runs.status import going_on
from meshwright.spec import RunSpec
from meshwright.spec.errors import JOB_ENDS, REQUEUE, CorruptionError, Stopped
from meshwright.spec.parameter_groups import trained_parameters
from meshwright.train import state
from meshwright.train.callbacks import Observers
from meshwright.train.digest import SampleRecord, parameters_sha256
from meshwright.train.garbage_collection import SteppedCollection
from meshwright.train.guard.guard import Guard
from meshwright.train.island_world import World
from meshwright.train.job_end import JobEnd
from meshwright.train.metrics import Metrics
from meshwright.train.reference_run import ReferenceRun
from meshwright.train.saves import Saves
from meshwright.train.signals import Noted, stop_signals
from meshwright.train.starting_point import StartingPoint, StartingPoints
from meshwright.train.step import Trainer
from meshwright.train.step_result import StepResult
from meshwright.train.validation import Validation

Row = dict[str, Any]
END_S = 5.0
"""Seconds that ranks need to end, of those that a signal leaves them."""
MOST_COPY_S = 1200.0
"""Seconds that a run that has done its steps waits for copies of its checkpoints in a second tier."""
MOST_NOTES = 100
"""Steps whose samples may be noted only; a restart from memory reads them again."""


class TrainingRun:
    """One run of one spec on one rank; `execute` does all of it and returns the result.

    `train/open_run.py` opens what it is made of. `weights` opens the weights that a start without a
    checkpoint takes, None for random ones.
    """

    def __init__(
        self,
        spec: RunSpec,
        mesh: Mesh,
        out: Path,
        observers: Observers,
        corpus: Corpus,
        world: World,
        loader: Loader,
        trainer: Trainer,
        store: CheckpointStore,
        snapshots: NoSnapshots,
        weights: Callable[[], Weights | None],
    ) -> None:
        self.spec, self.mesh = spec, mesh
        self.control, self.heartbeat = mesh.control, mesh.heartbeat
        self.out, self.observers, self.corpus = out, observers, corpus
        self.world, self.loader, self.trainer = world, loader, trainer
        self.store, self.snapshots = store, snapshots
        trainer.before_update = self._fence
        self.saves = Saves(spec, self.control, store, observers)
        self.guard = Guard(trainer, loader, observers)
        reference = ReferenceRun(trainer, corpus, out)
        self.starting_points = StartingPoints(
            spec, mesh, corpus, trainer, store, snapshots, self.guard, weights, reference,
            has_run=(out / RUN).exists(),
        )  # fmt: skip
        self.metrics = Metrics(trainer)
        self.validation = Validation(spec, mesh, trainer, corpus, loader, observers)
        self._stand_at(StartingPoint(SampleRecord(mesh)))
        first = self.control.rank == 0
        self.job_end = self.control.together(lambda: JobEnd(spec.recovery, first))
        self.skipped = self.steps_timed = self.warned = 0

    def execute(self, resume: str | None) -> Row:
        """Train to the last step, from the initial weights or from checkpoint `resume` ("auto" or a step).

        A first stop signal (`train/signals.py`) on any rank ends the run after the step that runs, or after
        the next one where that has already ended its backward, with a checkpoint: then every rank raises
        `Stopped`. In the last validation a rank that gets one raises it at once, as the last step is saved.
        """
        started = time.perf_counter()
        self.heartbeat.phase("start")
        try:
            self._start(resume)
            self._compile()
            self.world.join(self.trainer, self.done)
            with stop_signals() as noted:
                with SteppedCollection() as garbage:
                    if self.done < self.spec.train.last_step:
                        self.batch = self.control.together(lambda: self.loader.step(self.done))
                        self.trainer.expect(self.batch)
                    while self.done < self.spec.train.last_step:
                        if self._step(lambda: bool(noted) or self.job_end.is_near()):
                            self._stop(noted)
                        garbage.after_step()
                    self._save_last()
                if self.control.any(bool(noted)):  # in the last save
                    self._stop(noted)
                with stop_signals(self._interrupt):
                    return self._end(time.perf_counter() - started)
        except Stopped as stop:
            if stop.signal:
                self.observers.on_event("stopped", {"step": self.done, "signal": stop.signal})
            raise
        except CorruptionError:
            self.snapshots.clear()  # they may be of the corrupted state
            raise
        finally:
            self.trainer.microbatches.forget()
            self.loader.close()
            try:
                self.saves.close()
            finally:
                self._tell_warnings()

    # Start ------------------------------------------------------------------------------------------

    def _start(self, resume: str | None) -> None:
        self._go_on_from(self.starting_points.take(resume))
        if not self.metrics.peak_flops:  # a snapshot has it, and a restart has no time to lose
            self.metrics.measure_peak()
        self.observers.on_start(
            {
                "spec": self.spec.to_json(),
                "step": self.done,
                "total_steps": self.spec.train.total_steps,
                "last_step": self.spec.train.last_step,
                "parameters": self.spec.model.parameters,
                **self._counts,
                "layout": self.spec.layout.describe(),
                "world_size": self.spec.layout.world_size,
                "matmul_flops_per_second": self.metrics.peak_flops,
                "device": self.mesh.device.type,
                "machine": machine(self.mesh.device) if self.control.rank == 0 else None,
                "job": job(),
                "attention": backends_in_use(self.spec, self.mesh.device).to_json(),
                "torch": torch.__version__,
            }
        )
        self.store.warnings += filter(None, (self.job_end.warning, deadly_signal()))
        self._tell_warnings()
        if self.from_memory:  # the ranks may have died in what was due after that step
            self._validate_and_save()

    def _compile(self) -> None:
        """Compile what the steps and validations call, and tell how long it took."""
        seconds = self.trainer.compile_stages(evaluate=self.corpus.validation.target_tokens > 0)
        if self.spec.train.compile:
            self.observers.on_event("compiled", {"seconds": seconds})

    def _stand_at(self, point: StartingPoint) -> None:
        self.done, self.loss, self.samples = point.done, point.loss, point.samples
        self.from_memory = point.from_memory

    def _go_on_from(self, point: StartingPoint) -> None:
        """Take a state as the run's own, and note the samples again that its digest lacks."""
        self._stand_at(point)
        self.metrics.peak_flops = point.peak_flops or self.metrics.peak_flops
        self.saves.start(point.done, point.saved)
        for step in range(self.samples.steps, self.done):
            self.samples.note(self.world.within(self.loader.step(step)))

    @property
    def _counts(self) -> dict[str, int]:
        """Numbers of parameters that are trained, and of all with adapters, by their names in records."""
        return dict(zip(("trained_parameters", "all_parameters"), trained_parameters(self.spec), strict=True))

    def _tell_warnings(self) -> None:
        for warning in self.store.warnings[self.warned :]:
            self.observers.on_event("warning", {"message": warning})
            if self.mesh.rank == 0:
                warnings.warn(warning, stacklevel=2)
        self.warned = len(self.store.warnings)

    # Steps ------------------------------------------------------------------------------------------

    def _step(self, stop: Callable[[], bool]) -> bool:
        """Run one step; True if any rank was asked to stop before the step's numbers were summed.

        Ranks agree on failures and stops in that sum, and meet on the host only after a failure.
        """
        begun = time.perf_counter()
        self.metrics.begin_step()
        self.heartbeat.phase("data", self.done)
        batch, failure = self.batch, None
        following: Batch | None = None
        train = self.spec.train
        try:  # a save in the background, or the loader, may have failed
            self.saves.poll()
            if self.done + 1 < train.last_step:
                following = self.loader.step(self.done + 1)
        except Exception as error:  # raised below, on all ranks
            failure = error
        self._tell_saved()
        self.samples.note(self.world.within(batch))
        result = self.trainer.step(batch, self.done + 1, following, failure is not None, stop)
        self.done += 1
        if result.failures:
            self.trainer.mesh.control.together(lambda: _raise(failure))
        self.loss = result.loss
        self._watch(result)
        seconds = time.perf_counter() - begun
        self.saves.note_step(seconds)
        self._warn_of_late_stops(seconds)
        row = self.metrics.row(self.done, result, seconds)
        if row is not None:
            self.observers.on_step(row)
        if following is not None:
            self.batch = following
        spike = self.guard.spike(self.done, result)
        if spike is not None:
            self._roll_back(spike)
            return result.stops > 0
        self.guard.vote(self.done)
        self._keep_snapshot()
        self._validate_and_save()
        return result.stops > 0

    def _validate_and_save(self) -> None:
        """Do what is due after the last step done."""
        train = self.spec.train
        if train.eval_every and self.done % train.eval_every == 0 and self.done < train.last_step:
            self._fence()  # averaged weights may take the place of these
            self.validation.measure(self.done)
        if self.saves.due(self.done) and self.saves.saved != self.done:
            self._save(self.spec.checkpoint.asynchronous)

    def _watch(self, result: StepResult) -> None:
        """Count skipped steps; after too many in a row save the state, which they left alone, and stop."""
        self.skipped += not result.applied
        error = self.guard.after(self.done, result, self.batch)
        if error is not None:
            if self.spec.step_groups == 1:  # a save takes all ranks of the run
                self._save_last()
            raise error

    def _warn_of_late_stops(self, step_seconds: float) -> None:
        """Say once, when a step's time is known, if a stop would be over before it reaches all ranks."""
        self.steps_timed += 1
        if self.steps_timed == 3:
            self.store.warnings.extend(self.world.late_stops(step_seconds))

    def _roll_back(self, first: int) -> None:
        """Go on from the newest checkpoint before a loss spike that began with step `first`."""
        self._fence()
        spiked, before = self.done, self.guard.state()
        self.saves.settle()
        self._tell_saved()
        latest = self.store.latest() or 0  # later ones were abandoned
        steps = self.control.on_first(lambda: list(published(self.store.directory)))
        goal = self.guard.goal_of_rollback(first, spiked, [step for step in steps if step <= latest])
        self._go_on_from(self.starting_points.resume(str(goal)))
        self.guard.skip(goal, spiked, before)
        self.batch = self.control.together(lambda: self.loader.step(self.done))
        self.trainer.expect(self.batch)

    def _keep_snapshot(self) -> None:
        """Keep the state in memory, where that is due."""
        if not self.snapshots.due(self.done):
            return
        if self.done - self.samples.steps >= MOST_NOTES:
            self.samples.digest()

        def kept() -> Row:
            row = self._metadata(self.samples.chain)
            return row | {
                "samples_steps": self.samples.steps,
                "matmul_flops_per_second": self.metrics.peak_flops,
            }

        self.snapshots.save(self.done, state.tensors(self.trainer), kept, state.form(self.trainer))
        self._tell_warnings()

    def _fence(self) -> None:
        """Let what is issued from now on, which may change the state, wait for copies of it on the device."""
        self.snapshots.fence()
        self.store.fence()

    def _metadata(self, samples: str) -> Row:
        tokenizer = self.corpus.tokenizer.content_sha256 if self.corpus.has_text else None
        kept = state.metadata(self.trainer, self.done, self.loss, samples, self.corpus.digest, tokenizer)
        return kept | {"guard": self.guard.state(), **self.store.frozen.fields()}

    def _save(self, asynchronous: bool) -> None:
        self.heartbeat.phase("save", self.done)
        self._fence()
        self.guard.before_save(self.done)
        kept = self._metadata(self.samples.digest())
        self.guard.refuse_flaw(self.done, lambda: state.flaw(kept))
        try:
            self.saves.save(self.done, state.tensors(self.trainer), kept, asynchronous)
        finally:
            self._tell_saved()

    def _save_last(self) -> None:
        """See that the last step done is on disk."""
        self.saves.save_last(self.done, lambda: self._save(asynchronous=False))
        self._tell_saved()

    def _tell_saved(self) -> None:
        self.saves.tell()
        self._tell_warnings()

    def _stop(self, noted: Noted) -> None:
        """Save and end, for a signal that this or another rank has `noted`, or as the job ends."""
        asked = noted.at or time.monotonic()
        self._save_last()
        left = self.spec.recovery.grace_seconds - (time.monotonic() - asked)
        self.saves.wait_for_copies(min(left, self.job_end.seconds_left()) - END_S)
        self.world.leave("stopped")
        ends = self.control.any(not noted and self.job_end.is_near())
        self._interrupt(noted[0] if noted else signal.SIGTERM, None if noted or not ends else JOB_ENDS)

    def _interrupt(self, number: int, why: str | None = None) -> NoReturn:
        """End the run, whose last step is saved."""
        name = why or signal.Signals(number).name
        raise Stopped(
            f"stopped by {name} after step {self.done}, which is saved; go on with {going_on(self.out)}",
            128 + number if number == signal.SIGINT else REQUEUE,
            name,
        )

    # End --------------------------------------------------------------------------------------------

    def _end(self, seconds: float) -> Row:
        self.snapshots.settle()
        self.guard.at_end(self.done)
        self.world.leave("done")
        self.validation.measure(self.done)
        self.heartbeat.phase("end", self.done)
        self.metrics.measure_peak()
        with self.trainer.model():
            digest = parameters_sha256(self.trainer)
        self.heartbeat.phase("end", self.done)
        self.saves.wait_for_copies(MOST_COPY_S)
        return {
            "final_loss": self.loss,
            **self.validation.result(),
            **self.metrics.summary(),
            "parameters": self.spec.model.parameters,
            **self._counts,
            "parameters_sha256": digest,
            "samples_sha256": self.samples.digest(),
            "steps": self.done,
            "skipped_steps": self.skipped,
            "skipped_last": self.guard.in_a_row,
            "seconds": seconds,
            "layout": self.spec.layout.describe(),
            **self.world.result(self.trainer),
        }


def _raise(failure: Exception | None) -> None:
    if failure is not None:
        raise failure
