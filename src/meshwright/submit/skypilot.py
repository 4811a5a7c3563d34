"""Managed jobs of SkyPilot: a task as YAML, whose nodes' launchers meet in the run's folder on a volume."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import yaml

from meshwright.spec import UserError
from meshwright.spec.errors import REQUEUE
from meshwright.submit.job import ClusterJob
from meshwright.submit.program import output_of
from meshwright.submit.scheduler import Scheduler, State
from meshwright.submit.submission import Submission
from meshwright.submit.yaml_text import documents

_STATES: dict[str, State] = {
    **dict.fromkeys(("PENDING", "SUBMITTED", "STARTING", "RECOVERING"), "pending"),
    **dict.fromkeys(("RUNNING", "WINDING_DOWN", "CANCELLING"), "running"),
    "SUCCEEDED": "done",
    "CANCELLED": "stopped",
}
"""How SkyPilot calls the states of managed jobs; all others begin with FAILED."""
RUN_FILE = "/tmp/meshwright/run.toml"
"""Where nodes find the run file, which the task carries."""


class SkyPilot(Scheduler):
    """SkyPilot, by `sky jobs`."""

    here = False
    file = "job.yaml"
    run_file = RUN_FILE
    sweeps = False

    def check(self, job: ClusterJob) -> None:
        """Raise `UserError` for what a task cannot say."""
        if job.gpus and job.accelerator is None:
            raise UserError("--accelerator: is missing; give the GPU as SkyPilot calls it, such as H100")
        if job.seconds is not None:
            raise UserError("--time: a managed job of SkyPilot has no limit; leave the flag out")
        if not any(Path(job.out).is_relative_to(target) for _, target in job.mounts):
            raise UserError(
                f"--out: {job.out} is on none of the volumes, so it would go with its node; give --volume "
                f"VOLUME:PATH of a volume that all nodes may write, and an --out below PATH"
            )

    def render(self, job: ClusterJob) -> str:
        """The task as YAML."""
        return documents([task(job)])

    def commands(self, job: ClusterJob, file: Path) -> list[list[str]]:
        """The one call of `sky jobs launch`."""
        return [["sky", "jobs", "launch", "--yes", "--detach-run", "--name", job.name, str(file)]]

    def submit(self, job: ClusterJob, file: Path) -> list[str]:
        """Launch the managed job; return its name."""
        output_of(self.commands(job, file)[0])
        return [job.name]

    def states(self, submission: Submission) -> list[State]:
        """The state of the newest managed job of the name."""
        told = output_of(["sky", "jobs", "queue", "--all", "--output", "json"])
        return [state_in(told, name) for name in submission.ids]

    def log(self, submission: Submission, member: int) -> list[str]:
        """The command that prints the log of the first node."""
        return ["sky", "jobs", "logs", "--no-follow", "--name", submission.ids[member]]

    def stop(self, submission: Submission) -> None:
        """Cancel the managed job."""
        output_of(["sky", "jobs", "cancel", "--yes", "--name", submission.ids[0]])


def task(job: ClusterJob) -> dict[str, Any]:
    """The task of a job, as SkyPilot's YAML has it."""
    resources: dict[str, Any] = {}
    if job.gpus:
        resources["accelerators"] = f"{job.accelerator}:{job.ranks}"
    else:
        resources["cpus"] = f"{job.cpus * job.ranks}+"
    if job.image is not None:
        resources["image_id"] = f"docker:{job.image}"
    for option in job.options:
        name, equals, text = option.partition("=")
        if not equals or not name.isidentifier() or name in resources:
            raise UserError(
                f"--option: {option!r} is not a further field of resources; give such as infra=aws or "
                f"disk_size=512"
            )
        resources[name] = yaml.safe_load(text)
    # Only a run that has saved is started again; nodes that are lost SkyPilot replaces by itself.
    resources["job_recovery"] = {"recover_on_exit_codes": [REQUEUE]}
    found: dict[str, Any] = {"name": job.name, "num_nodes": job.nodes, "resources": resources}
    found["volumes"] = {target: volume for volume, target in job.mounts}
    if job.environment:
        found["envs"] = dict(job.environment)
    found["run"] = _script(job)
    return found


def _script(job: ClusterJob) -> str:
    """The commands of each node."""
    words = job.train_words()
    lines = []
    if job.run_text is not None:
        marker = "MESHWRIGHT_RUN"
        lines += [f"mkdir -p {Path(RUN_FILE).parent}", f"cat > {RUN_FILE} <<'{marker}'"]
        lines += [*job.run_text.rstrip("\n").splitlines(), marker]
    if job.nodes > 1:
        lines.append('address=$(echo "$SKYPILOT_NODE_IPS" | sed -n "$((SKYPILOT_NODE_RANK + 1))p")')
        if job.meets_in_a_store:
            lines.append('first=$(echo "$SKYPILOT_NODE_IPS" | head -n 1)')
    meeting = [*job.meeting_words("$first"), "--address", '"$address"'] if job.nodes > 1 else []
    lines.append(" ".join(["exec", shlex.join(words), *meeting]))
    return "\n".join(lines) + "\n"


def state_in(told: str, name: str) -> State:
    """The state of the newest job of a name in the list that `sky jobs queue --output json` prints."""
    rows = json.loads(told[max(0, told.find("[")) :] or "[]")
    own = [row for row in rows if row.get("job_name") == name and row.get("status")]
    if not own:
        return "unknown"
    return _STATES.get(max(own, key=lambda row: int(row.get("job_id") or 0))["status"], "failed")
