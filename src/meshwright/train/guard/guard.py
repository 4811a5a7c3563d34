"""The guard over a run's numbers, which the loop asks after each step: skips, spikes, corrupted states.

All ranks decide alike: from numbers that were summed over all of them, or by a message.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, NotRequired

from typing_extensions import TypedDict

from meshwright.comm.collectives import sum_scalars
from meshwright.data.loader import Batch, Loader
from meshwright.spec.errors import CorruptionError, NumericalError
from meshwright.spec.records import Natural
from meshwright.train.callbacks import Observers
from meshwright.train.guard.nonfinite import bad_state, locate
from meshwright.train.guard.replay import replay, replicas
from meshwright.train.guard.spikes import SpikeDetector, SpikesState
from meshwright.train.guard.vote import Vote
from meshwright.train.step import Trainer
from meshwright.train.step_result import StepResult

MOST_NAMED = 5
"""Parameters without gradients that a warning lists."""
_NOT_SAVED = "it is not saved; resume from the last checkpoint"


class GuardState(TypedDict):
    """State of a `Guard` in a checkpoint."""

    skipped_samples: NotRequired[list[tuple[Natural, Natural]]]
    skipped_batches: NotRequired[list[tuple[Natural, Natural]]]
    """In the place of `skipped_samples` from before batches could grow."""
    rollbacks: Natural
    spikes: SpikesState


class Guard:
    """Checks of one rank on the numbers of a run; every method is called on all ranks together.

    The skipped samples, the number of rollbacks and the statistics of the loss are a part of checkpoints.
    """

    def __init__(self, trainer: Trainer, loader: Loader, observers: Observers) -> None:
        self.recovery = trainer.spec.recovery
        self._trainer, self._loader, self._observers = trainer, loader, observers
        self.in_a_row = 0
        """Skipped steps up to the last one of this start."""
        self._looked = self._told_zero = False
        self.rollbacks = 0
        self._spikes = SpikeDetector(self.recovery)
        self._vote = Vote(trainer)
        self._apart = trainer.run_spec.step_groups > 1
        self._vote_of_all = Vote(trainer, between_groups=True) if self._apart else None
        self._voted = -1
        self._batch: Batch | None = None

    # Gradients that are missing ------------------------------------------------------------------------

    def _look_at_gradients(self, step: int, result: StepResult) -> None:
        """Warn, once in a start of the ranks, of parameters that nothing trains.

        A parameter that the loss does not depend on is looked for in the first step; later ones only look at
        the norm, which is known anyway.
        """
        if not self._looked:
            self._looked = True
            control, unreached = self._trainer.mesh.control, self._trainer.states.unreached
            if control.any(bool(unreached)) and (found := control.gather(unreached)):
                names = sorted({name for each in found for name in each})
                listed = ", ".join(names[:MOST_NAMED])
                more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
                self._warn(
                    step,
                    f"no gradient reached {listed}{more} in step {step}: the loss does not depend on "
                    f"{len(names)} of the model's parameters, and nothing trains them",
                )
        if result.grad_norm == 0.0 and not (self._told_zero or result.waiting):
            self._told_zero = True
            self._warn(
                step,
                f"the norm of the gradient is exactly 0 in step {step}: nothing trains the model; were its "
                f"weights loaded or drawn, and has its data any targets?",
            )

    def _warn(self, step: int, message: str) -> None:
        if self._trainer.run_mesh.rank == 0:
            self._observers.on_event("warning", {"step": step, "message": message})
            warnings.warn(message, stacklevel=3)

    # Steps that are not finite ------------------------------------------------------------------------

    def after(self, step: int, result: StepResult, batch: Batch) -> NumericalError | None:
        """Take note of a step; if it is one skipped step too many in a row, the error to end the run with."""
        self._batch = batch
        self._look_at_gradients(step, result)
        if result.applied:
            self.in_a_row = 0
            return None
        self.in_a_row += 1
        late = self._trainer.spec.staleness
        if late:
            first = f"the gradient of step {step - late}, which this step applied"
        else:
            origin = locate(self._trainer, batch, result.loss_scale)
            first = str(origin) if origin else "nothing when the step was computed again"
        fields = {"step": step, "grad_norm": str(result.grad_norm), "in_a_row": self.in_a_row}
        self._observers.on_event("skipped_step", {**fields, "first": first})
        if self.in_a_row <= self.recovery.max_skipped:
            return None
        precision = self._trainer.spec.precision
        scale = f"precision.loss_scale ({precision.loss_scale:g}) or " if precision.compute == "fp16" else ""
        return NumericalError(
            f"the gradient was not finite in {self.in_a_row} steps in a row, up to step {step}, more than "
            f"recovery.max_skipped = {self.recovery.max_skipped}; not finite was first {first}; the state, "
            f"which they left alone, is {'not ' if self._apart else ''}saved: resume from an "
            f"earlier checkpoint, or train anew with a lower {scale}train.lr"
        )

    def at_end(self, step: int) -> None:
        """Warn of a run that ends with skipped steps, which have trained nothing."""
        if self.in_a_row:
            last = "the last step was" if self.in_a_row == 1 else f"the last {self.in_a_row} steps were"
            self._warn(
                step,
                f"{last} skipped, as the gradient was not finite: the model is that of step "
                f"{step - self.in_a_row} of {step}; events.jsonl names what was first, and a lower "
                f"train.lr or an earlier checkpoint may help",
            )

    # Loss spikes --------------------------------------------------------------------------------------

    def spike(self, step: int, result: StepResult) -> int | None:
        """The first step of a loss spike that this one completes, else None."""
        if self.recovery.on_spike == "ignore" or not result.applied or result.waiting:
            return None
        first = self._spikes.first_step(step, result.loss, result.grad_norm)
        if first is not None:
            fields = {"step": step, "first_step": first, "loss": result.loss, "grad_norm": result.grad_norm}
            self._observers.on_event("spike", fields)
        return first

    def goal_of_rollback(self, first: int, step: int, saved: list[int]) -> int:
        """The newest of the `saved` steps before a spike from step `first` to `step`.

        Raises `NumericalError` where there is none, and where the run stops at a spike.
        """
        earlier = max((number for number in saved if number < first), default=None)
        words = f"a loss spike from step {first} to step {step}"
        if earlier is None:
            raise NumericalError(
                f"{words}, and no checkpoint before it to go back to; set checkpoint.every to save in time, "
                f"and checkpoint.keep to two or more"
            )
        if self.recovery.on_spike == "stop":
            raise NumericalError(
                f"{words}, and recovery.on_spike is 'stop'; to leave its batches out, resume with --resume "
                f"{earlier} --recovery.on_spike rollback"
            )
        if self.rollbacks >= self.recovery.max_rollbacks:
            raise NumericalError(
                f"{words}, after {self.rollbacks} rollbacks (recovery.max_rollbacks); train anew with a "
                f"lower train.lr, or resume with --resume {earlier} and allow more"
            )
        return earlier

    def skip(self, goal: int, step: int, before: GuardState) -> None:
        """After a rollback to step `goal`, leave out the batches up to that of `step`, at most `spike_skip`.

        `before` is `state()` before the rollback: what was skipped then stays so.
        """
        self._loader.restore(before["skipped_samples"])
        begin = self._loader.first_sample(max(goal, step - self.recovery.spike_skip))
        end = self._loader.end_of_samples(step - 1)
        self._loader.skip(begin, end)
        self.rollbacks = before["rollbacks"] + 1
        self._observers.on_event("rollback", {"step": goal, "from": step, "skipped_samples": [begin, end]})

    # Corrupted states ---------------------------------------------------------------------------------

    def vote(self, step: int) -> None:
        """Compare copies if this step is one of `recovery.vote_every`; raises `CorruptionError`."""
        every = self.recovery.vote_every
        if every and step % every == 0:
            self._compare(step, self._vote)

    def before_save(self, step: int) -> None:
        """Raise `NumericalError` if the state of this step must not be saved."""
        if self.recovery.vote_every and self._voted != step:
            self._compare(step, self._vote)
        if self.recovery.vote_every and self._vote_of_all is not None:  # a save takes all ranks of the run
            self._compare(step, self._vote_of_all)
        self._refuse_bad_state(f"after step {step}", _NOT_SAVED)

    def refuse_flaw(self, step: int, flaw: Callable[[], str | None]) -> None:
        """Raise `NumericalError` if `flaw`, which the first rank calls, finds one in what is no tensor of the
        state of this step: a resume would refuse it."""
        found = self._trainer.run_mesh.control.on_first(flaw)
        if found is not None:
            raise NumericalError(
                f"after step {step} the state is not one to resume from ({found}); {_NOT_SAVED}"
            )

    def _compare(self, step: int, vote: Vote) -> None:
        found = vote()
        self._voted = step
        if found is None:
            return
        fields = {"step": step, "tensor": found.tensor, "ranks": found.ranks, "hosts": found.hosts}
        axis, cause = replicas(self._trainer.mesh), ""
        if vote is self._vote and not found.certain and axis is not None and self._batch is not None:
            wrong = replay(self._trainer, self._batch, axis)
            computed = str(wrong) if wrong else "both compute the same from the same numbers"
            fields["computation"], cause = computed, f" ({computed})"
        self._observers.on_event("divergence", {**fields, "certain": found.certain})
        raise CorruptionError(
            f"after step {step} {found}{cause}: memory or arithmetic of a machine is at fault; this state is "
            f"not saved: go on from the last checkpoint with --resume auto, without that machine if it recurs"
        )

    def _refuse_bad_state(self, when: str, remedy: str) -> None:
        mesh, own = self._trainer.mesh, bad_state(self._trainer)
        if not sum_scalars([own is not None], mesh.world)[0]:
            return
        named = mesh.control.gather(own and [mesh.numbers[mesh.rank], own])
        rank, name = mesh.control.broadcast(next((pair for pair in named if pair), None))
        raise NumericalError(f"{when} {name} is not finite on rank {rank}; {remedy}")

    # Checkpoints --------------------------------------------------------------------------------------

    def state(self) -> GuardState:
        """State for a checkpoint, as JSON."""
        return {
            "skipped_samples": self._loader.skipped,
            "rollbacks": self.rollbacks,
            "spikes": self._spikes.state(),
        }

    def restore(self, kept: dict[str, Any] | None, where: str) -> None:
        """Continue from `state()`, None of a checkpoint without one; refuse loaded tensors that are not
        finite."""
        self._refuse_bad_state(f"in {where}", "resume from an earlier one with --resume and its step")
        kept = kept or {"skipped_samples": [], "rollbacks": 0, "spikes": SpikeDetector(self.recovery).state()}
        if "skipped_batches" in kept:  # saved before batches could grow: all had the same size
            size = self._trainer.run_spec.batch_sequences
            self._loader.restore([(first * size, end * size) for first, end in kept["skipped_batches"]])
        else:
            self._loader.restore(kept["skipped_samples"])
        self.rollbacks = kept["rollbacks"]
        self._spikes.restore(kept["spikes"])
        self._voted = -1
