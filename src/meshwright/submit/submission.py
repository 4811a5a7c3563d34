"""The record of a submitted job, `job.json` in the run's folder."""

from __future__ import annotations

import json
from pathlib import Path

from pydantic import ValidationError

from meshwright import atomic
from meshwright.runs.record import now, read_object
from meshwright.runs.status import JOB
from meshwright.spec import UserError
from meshwright.spec.base import FrozenModel
from meshwright.submit.job import ClusterJob


class Submission(FrozenModel):
    """A job that a scheduler has been given: its identities there, and when, in UTC (ISO 8601)."""

    scheduler: str
    ids: tuple[str, ...]
    submitted: str
    job: ClusterJob


def write_submission(folder: Path, scheduler: str, ids: list[str], job: ClusterJob) -> Submission:
    """Write the record of a job that was submitted just now, and return it. Raises `UserError`."""
    made = Submission(scheduler=scheduler, ids=tuple(ids), submitted=now(), job=job)
    try:
        atomic.write(folder / JOB, json.dumps(made.model_dump(mode="json"), indent=2) + "\n")
    except OSError as error:
        raise UserError(
            f"{folder / JOB}: cannot be written ({error.strerror}), but {scheduler} has the job "
            f"{', '.join(ids)}; end it there"
        ) from error
    return made


def read_submission(folder: Path) -> Submission | None:
    """The newest submission of the run in a folder; None where none was submitted. Raises `UserError`."""
    if (found := read_object(folder / JOB)) is None:
        return None
    try:
        return Submission.model_validate(found)
    except ValidationError as error:
        place = ".".join(map(str, error.errors()[0]["loc"]))
        raise UserError(
            f"{folder / JOB}: {place} is not as meshwright launch writes it ({error.errors()[0]['msg']}); "
            f"the file is damaged, move it away"
        ) from None


def submission_of(folder: Path) -> Submission:
    """The submission of the run in a folder. Raises `UserError` where there is none."""
    if (found := read_submission(folder)) is None:
        raise UserError(
            f"{folder}: has no {JOB}, so no job of it was submitted from here; give the --out of a "
            f"meshwright launch, or its folder under runs/ where that is not a folder of this machine"
        )
    return found
