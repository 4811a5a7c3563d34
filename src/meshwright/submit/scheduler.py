"""The common part of schedulers: what each does with a job."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from jinja2 import Environment, FunctionLoader, StrictUndefined

from meshwright.submit.job import ClusterJob

if TYPE_CHECKING:
    from meshwright.submit.submission import Submission

State = Literal["pending", "running", "done", "failed", "stopped", "unknown"]
"""How a scheduler has a job; `unknown` where it has forgotten it."""
ENDED = ("done", "failed", "stopped", "unknown")


class Scheduler(Protocol):
    """A scheduler of jobs.

    With `here` the folder of a run is one of the machine that submits it, too. `file` is the name of what
    `render` writes, `run_file` where the nodes find the run file if they do not see it here, and `sweeps`
    tells that a job may have members.
    """

    here: bool
    file: str
    run_file: str
    sweeps: bool

    def check(self, job: ClusterJob) -> None:
        """Raise `UserError` for a job that this scheduler cannot have."""

    def render(self, job: ClusterJob) -> str:
        """The job as a file of this scheduler."""

    def commands(self, job: ClusterJob, file: Path) -> list[list[str]]:
        """The commands that submit the file, one for each run that is a job of its own."""

    def submit(self, job: ClusterJob, file: Path) -> list[str]:
        """Submit the file; return the identities of the jobs that it has become."""

    def states(self, submission: Submission) -> list[State]:
        """The state of each run."""

    def waits_for(self, submission: Submission) -> list[str | None]:
        """Why each run that is pending has not begun, as the scheduler says; None where it does not."""
        return [None] * len(submission.job.folders())

    def log(self, submission: Submission, member: int) -> Path | list[str]:
        """The log of a run: a file, or the command that prints it, which `--follow` lets go on."""

    def stop(self, submission: Submission) -> None:
        """Let the runs save and end, and not be started again."""


def filled(template: str, **values: Any) -> str:
    """The text of a template in `templates/`, filled with values, of which none may lack."""
    texts = resources.files("meshwright.submit").joinpath("templates")
    environment = Environment(
        loader=FunctionLoader(lambda name: texts.joinpath(name).read_text("utf-8")),
        undefined=StrictUndefined,
        autoescape=False,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["shell"] = shlex.quote
    return environment.get_template(template).render(values)


def as_words(flags: Sequence[tuple[str, str]]) -> tuple[str, ...]:
    """Dotted flags as words of a command line."""
    return tuple(f"--{key}={text}" for key, text in flags)
