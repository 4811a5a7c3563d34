"""Jobs of Ray: a script that `ray job submit` starts, whose workers of a TorchTrainer are the ranks."""

from __future__ import annotations

import json
import re
from importlib import resources
from pathlib import Path

from meshwright.spec import UserError
from meshwright.submit.job import ClusterJob
from meshwright.submit.program import answer_of, output_of
from meshwright.submit.scheduler import Scheduler, State
from meshwright.submit.submission import Submission

_STATES: dict[str, State] = {
    "PENDING": "pending", "RUNNING": "running", "SUCCEEDED": "done", "FAILED": "failed", "STOPPED": "stopped",
}  # fmt: skip


class Ray(Scheduler):
    """Ray, by `ray job`; `--address` is that of its dashboard, else RAY_API_SERVER_ADDRESS says it."""

    here = True
    file = "ray_train.py"
    run_file = ""
    sweeps = True

    def check(self, job: ClusterJob) -> None:
        """Raise `UserError` for what Ray decides itself."""
        for given, flag in ((job.image, "--image"), (job.options, "--option"), (job.mounts, "--volume")):
            if given:
                raise UserError(f"{flag}: a cluster of Ray has its own already; leave the flag out")

    def render(self, job: ClusterJob) -> str:
        """The script, which serves any run."""
        return (
            resources.files("meshwright.submit").joinpath("templates", "ray_train.py.txt").read_text("utf-8")
        )

    def commands(self, job: ClusterJob, file: Path) -> list[list[str]]:
        """A call of `ray job submit` for each run."""
        submit = ["ray", "job", "submit", *_address(job.address), "--no-wait"]
        if job.environment:
            submit += ["--runtime-env-json", json.dumps({"env_vars": dict(job.environment)})]
        size = [
            "--workers",
            str(job.size),
            *(["--gpus"] if job.gpus else []),
            "--failures",
            str(job.restarts),
            *([] if job.doctor else ["--no-doctor"]),
        ]
        runs = zip(job.folders(), job.all_flags(), strict=True)
        return [
            [*submit, "--", "python", str(file), job.run, folder, *size, *flags] for folder, flags in runs
        ]

    def submit(self, job: ClusterJob, file: Path) -> list[str]:
        """Submit a job for each run; return their names."""
        found = []
        for words in self.commands(job, file):
            told = output_of(words)
            if (match := re.search(r"Job '([^']+)' submitted", told)) is None:
                raise UserError(
                    f"ray: it has told no job's name ({' '.join(told.split())[-200:]}); see `ray job list`"
                )
            found.append(match[1])
        return found

    def states(self, submission: Submission) -> list[State]:
        """The states of the jobs."""
        return [self._state(name, submission.job.address) for name in submission.ids]

    def _state(self, name: str, address: str | None) -> State:
        told = answer_of(["ray", "job", "status", *_address(address), name], unknown="does not exist")
        if told is None:
            return "unknown"
        match = re.search(r"Status for job '[^']+': (\w+)|Job '[^']+' (?:was )?(\w+)", told)
        return "unknown" if match is None else _STATES.get((match[1] or match[2]).upper(), "unknown")

    def log(self, submission: Submission, member: int) -> list[str]:
        """The command that prints what the script and its workers have printed."""
        return ["ray", "job", "logs", *_address(submission.job.address), submission.ids[member]]

    def stop(self, submission: Submission) -> None:
        """Stop the jobs: their workers end as they are, and what was saved last is kept."""
        for name, state in zip(submission.ids, self.states(submission), strict=True):
            if state in ("pending", "running"):
                output_of(["ray", "job", "stop", *_address(submission.job.address), name])


def _address(address: str | None) -> list[str]:
    return [] if address is None else ["--address", address]
