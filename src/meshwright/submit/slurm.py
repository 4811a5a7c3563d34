"""Jobs of Slurm: a batch script whose tasks are ranks, requeued by the run's status, and arrays for sweeps.

The script takes the run file, the run's folder and flags as its words, so a script serves any run of its
size. Containers are pyxis's (`srun --container-image`), which enroot runs.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from meshwright.rank.host_rendezvous import STORE_PORT
from meshwright.spec import UserError
from meshwright.submit.job import ClusterJob
from meshwright.submit.program import answer_of, output_of
from meshwright.submit.scheduler import Scheduler, State, filled
from meshwright.submit.submission import Submission

DAY_S = 24 * 3600
"""Seconds of a job that does not say its own: what clusters usually allow. It is requeued after them."""

_STATES: dict[str, State] = {
    **dict.fromkeys(("COMPLETED",), "done"),
    **dict.fromkeys(("CANCELLED", "REVOKED"), "stopped"),
    **dict.fromkeys(
        (
            "PENDING",
            "CONFIGURING",
            "REQUEUED",
            "REQUEUE_FED",
            "REQUEUE_HOLD",
            "SPECIAL_EXIT",
            "RESV_DEL_HOLD",
        ),
        "pending",
    ),
    **dict.fromkeys(("RUNNING", "COMPLETING", "SUSPENDED", "STOPPED", "SIGNALING", "STAGE_OUT"), "running"),
}
"""How Slurm calls the states of jobs; all others are failures."""


class Slurm(Scheduler):
    """Slurm, by sbatch, squeue and scancel."""

    here = True
    file = "slurm.sbatch"
    run_file = ""
    sweeps = True

    def check(self, job: ClusterJob) -> None:
        """Raise `UserError` for what a script of Slurm cannot say."""
        if job.least_nodes is not None and job.ranks_by == "torchrun":
            raise UserError(
                "--ranks-by: torchrun makes a world of one size, and --nodes has a range; give one number of "
                "nodes, or leave out --ranks-by"
            )
        for option in job.options:
            if not re.fullmatch(r"[A-Za-z][\w-]*", option.partition("=")[0]):
                raise UserError(
                    f"--option: {option!r} begins with no name that sbatch could know; give NAME=VALUE, or "
                    f"NAME"
                )
        for source, target in job.mounts:
            if {",", ":"} & {*source, *target}:
                raise UserError(
                    f"--volume: {source}:{target} has a comma or a colon in a path, at which pyxis cuts; "
                    f"give a path without one"
                )

    def render(self, job: ClusterJob) -> str:
        """The batch script."""
        elastic, torchrun = job.least_nodes is not None, job.ranks_by == "torchrun"
        one = elastic or torchrun
        return filled(
            "slurm.sbatch",
            job=job,
            elastic=elastic,
            torchrun=torchrun,
            least=job.least_nodes,
            store=f' --rendezvous "$head:$(({STORE_PORT} + SLURM_JOB_ID % 1000))"'
            if job.meets_in_a_store
            else "",
            tasks=1 if one else job.ranks,
            cpus=job.cpus * job.ranks if one else job.cpus,
            time=_time(job.seconds or DAY_S),
            array=f"0-{len(job.members) - 1}" + (f"%{job.at_once}" if job.at_once else ""),
            container=_container(job),
        )

    def commands(self, job: ClusterJob, file: Path) -> list[list[str]]:
        """The one call of sbatch."""
        log = f"--output={job.out}/slurm-{'%A_%a' if job.members else '%j'}.log"
        return [["sbatch", "--parsable", log, str(file), job.run, job.out, *job.flags]]

    def submit(self, job: ClusterJob, file: Path) -> list[str]:
        """Submit the script; return the job's number."""
        return [output_of(self.commands(job, file)[0]).strip().partition(";")[0]]

    def states(self, submission: Submission) -> list[State]:
        """The states of the job, or of the tasks of the array."""
        told = _told(submission, "%T")
        return ["unknown" if word is None else _STATES.get(word, "failed") for word in told]

    def waits_for(self, submission: Submission) -> list[str | None]:
        """The reasons, such as Resources, Priority or QOSMaxJobsPerUserLimit."""
        return [None if word in (None, "None") else word for word in _told(submission, "%r")]

    def log(self, submission: Submission, member: int) -> Path:
        """The file that the job writes, over all its starts."""
        task = f"_{member}" if submission.job.members else ""
        return Path(submission.job.out) / f"slurm-{submission.ids[0]}{task}.log"

    def stop(self, submission: Submission) -> None:
        """Interrupt the steps that run, as Ctrl-C does, and cancel the job where none does yet."""
        states = self.states(submission)
        number = submission.ids[0]
        if "pending" in states:
            output_of(["scancel", "--state=PENDING", number])
        if "running" in states:
            output_of(["scancel", "--signal=INT", "--state=RUNNING", number])


def _told(submission: Submission, field: str) -> list[str | None]:
    """A field of squeue of the job, or of each task of the array; None where Slurm has forgotten it."""
    number, members = submission.ids[0], submission.job.members
    words = ["squeue", "--noheader", "--states=all", "--array", f"--jobs={number}", f"--format=%i|{field}"]
    told = answer_of(words, unknown="invalid job id") or ""
    rows = dict(line.strip().split("|", 1) for line in told.splitlines() if "|" in line)
    return [rows.get(f"{number}_{member}") for member in range(len(members))] or [rows.get(number)]


def _time(seconds: int) -> str:
    """A limit as Slurm writes it, in whole minutes, rounded up: 24:00:00."""
    minutes = -(-seconds // 60)
    return f"{minutes // 60:02d}:{minutes % 60:02d}:00"


def _container(job: ClusterJob) -> str:
    """The words of srun for pyxis, with a space before each."""
    if job.image is None:
        return ""
    mounts = [
        f"{folder}:{folder}" for folder in dict.fromkeys((job.folder, str(Path(job.run).parent), job.out))
    ]
    mounts += [f"{source}:{target}" for source, target in job.mounts]
    words = [f"--container-image={image_of(job.image)}", f"--container-mounts={','.join(mounts)}"]
    words += [f"--container-workdir={job.folder}"]
    words += [f"--container-env={','.join(name for name, _ in job.environment)}"] if job.environment else []
    return "".join(f" {shlex.quote(word)}" for word in words)


def image_of(name: str) -> str:
    """An image as enroot names it, whose registry has a # behind it: nvcr.io#nvidia/pytorch:25.01-py3."""
    found = re.fullmatch(r"([\w.-]+\.[\w.-]+(?::\d+)?)/(.+)", name)
    return name if found is None or name.endswith(".sqsh") else f"{found[1]}#{found[2]}"
