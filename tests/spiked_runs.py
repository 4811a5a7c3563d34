"""Runs with samples that make the loss spike, which are skipped or rolled back."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from meshwright.comm.mesh import Mesh
from meshwright.data.loader import Batch
from meshwright.spec import RunSpec
from meshwright.spec.errors import NumericalError
from meshwright.spec.sections import RecoverySpec
from meshwright.train.callbacks import Observers
from meshwright.train.loop import TrainingRun
from meshwright.train.open_run import open_run
from ranks import Ranks
from training_runs import Notes

Range = tuple[int, int]
"""Samples from a first up to an end."""
STEPS = 27
SEQUENCES = 8
"""Samples of a batch of `spec_of`."""
POISONED = range(16 * SEQUENCES, 19 * SEQUENCES)
"""Numbers of the samples that make the loss spike, in steps 17 to 19."""
FLAGS: dict[str, object] = {
    "train__steps": STEPS, "checkpoint__every": 5, "checkpoint__keep": 9, "recovery__spike_window": 8,
    "train__schedule": "constant", "train__warmup_steps": 0, "train__lr": 1e-3, "recovery__spike_sigmas": 2,
    "recovery__spike_norms": 1.2, "recovery__on_spike": "rollback", "train__clip": "none",
}  # fmt: skip


def of_batches(first: int, end: int) -> Range:
    return first * SEQUENCES, end * SEQUENCES


def poison(run: TrainingRun, samples: Collection[int]) -> None:
    """Replace the targets of batches that begin with one of these samples by one rare token."""
    make, loader = run.loader._make, run.loader

    def poisoned(step: int) -> Batch:
        batch = make(step)
        if loader.first_sample(step) in samples:
            batch.targets[batch.targets >= 0] = 299
        return batch

    loader._make = poisoned  # type: ignore[method-assign]


def spiked(
    mesh: Mesh, spec: RunSpec, out: Path, bad: Collection[int], resume: str | None, skipped: Sequence[Range]
) -> tuple[dict[str, Any], list[Any], str]:
    """Result, events and error of a run with these `bad` samples, which leaves out the `skipped` ones."""
    notes = Notes()
    run = open_run(spec, mesh, out, Observers([notes]))
    poison(run, bad)
    for first, end in skipped:
        run.loader.skip(first, end)
    try:
        return run.execute(resume), notes.events, ""
    except NumericalError as raised:
        return {}, notes.events, str(raised)


def run_spiked(
    ranks: Ranks, spec: RunSpec, out: Path, bad: Collection[int] = POISONED, resume: str | None = None
) -> tuple[dict[str, Any], list[Any], str]:
    return ranks.run(spec.layout, spiked, spec, out, bad, resume, ())[0]


def never_seen(
    ranks: Ranks, spec: RunSpec, out: Path, skipped: Sequence[Range], bad: Collection[int] = POISONED
) -> dict[str, Any]:
    """The result of a run that never saw the `skipped` samples."""
    calm = spec.model_copy(update={"recovery": RecoverySpec()})
    return ranks.run(spec.layout, spiked, calm, out, bad, None, skipped)[0][0]


def rollbacks(events: list[Any]) -> list[tuple[int, int, Range]]:
    told = [fields for kind, fields in events if kind == "rollback"]
    return [(fields["from"], fields["step"], tuple(fields["skipped_samples"])) for fields in told]
