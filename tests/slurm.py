"""A cluster of Slurm on this machine: a controller, and nodes with names and networks of their own on a
bridge.

The daemons are Debian's (`slurm-wlm`). Where they are missing they are installed, which takes root and a
package index; where that fails, `needs_slurm` skips a test with the reason.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from node_namespaces import BRIDGE, CONTROLLER, NUMBER, address, namespaces

PATIENCE_S = 60.0

CONFIGURATION = """\
ClusterName=meshwright
SlurmctldHost={host}({controller})
AuthType=auth/none
CredType=cred/none
AuthInfo=cred_expire=5
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmUser=root
SlurmdUser=root
SlurmctldPort={port}
SlurmdParameters=config_overrides
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
SlurmdTimeout=10
KillWait=20
MinJobAge=300
ReturnToService=2
JobRequeue=1
SchedulerParameters=batch_sched_delay=0,sched_interval=1,bf_interval=1
{nodes}
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverTimeLimit=0
"""


def missing() -> str | None:
    """Why there can be no Slurm here, or None; installs it first where it can be."""
    if os.geteuid() != 0:
        return "nodes are network namespaces, which take root"
    if shutil.which("ip") is None:
        return "there is no ip (iproute2) here, which makes network namespaces"
    if shutil.which("slurmctld") is None and shutil.which("apt-get") is not None:
        install = ["apt-get", "install", "-y", "--no-install-recommends", "slurm-wlm"]
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "stdin": subprocess.DEVNULL}
        if subprocess.run(install, check=False, **quiet).returncode:  # type: ignore[call-overload]
            subprocess.run(["apt-get", "update"], check=False, **quiet)  # type: ignore[call-overload]
            subprocess.run(install, check=False, **quiet)  # type: ignore[call-overload]
    return None if shutil.which("slurmctld") else "Slurm (slurm-wlm) is not installed, and could not be"


@dataclass
class Slurm:
    """A running cluster. `nodes` are its nodes' names, `folder` has its state and logs."""

    folder: Path
    nodes: list[str]
    environment: dict[str, str] = field(default_factory=dict)

    def run(self, *command: str, check: bool = True, more: Mapping[str, str] | None = None) -> str:
        """Run a command such as squeue or scontrol, with `more` variables; return what it printed."""
        environment = os.environ | self.environment | dict(more or {})
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if check and done.returncode:
            raise AssertionError(f"{' '.join(command)} ended with {done.returncode}: {done.stderr}")
        return done.stdout.strip()

    def submit(
        self,
        script: str,
        *options: str,
        words: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
    ) -> str:
        """Submit a batch script with its words; return the job's number."""
        file = self.folder / f"job-{time.monotonic_ns()}.sh"
        file.write_text(script, encoding="utf-8")
        return self.run("sbatch", "--parsable", *options, str(file), *words, more=environment)

    def state(self, job: str) -> dict[str, str]:
        """Facts of a job by Slurm's names, such as JobState, Restarts and ExitCode."""
        words = self.run("scontrol", "show", "job", job).split()
        return dict(word.partition("=")[::2] for word in words if "=" in word)

    def wait(self, job: str, *states: str, seconds: float = PATIENCE_S) -> dict[str, str]:
        """Wait until a job has one of these states; return what Slurm says of it then."""
        limit = time.monotonic() + seconds
        while (found := self.state(job))["JobState"] not in states:
            if time.monotonic() > limit:
                raise AssertionError(f"job {job} is {found['JobState']}, and not {' or '.join(states)}")
            time.sleep(0.2)
        return found

    def wait_for_node(self, node: str, state: str) -> None:
        """Wait until Slurm says of a node that it is down or idle, which may have a mark at its end."""
        limit = time.monotonic() + PATIENCE_S
        while (found := self.run("sinfo", "-h", "-n", node, "-o", "%T")).rstrip("*~#!%$@^-") != state:
            if time.monotonic() > limit:
                raise AssertionError(f"node {node} is {found}, and not {state}")
            time.sleep(0.2)

    def start_node(self, node: str) -> None:
        """Start a node's daemon."""
        named = 'hostname "$0" && exec slurmd -N "$0" -f "$1"'
        subprocess.run(
            ["ip", "netns", "exec", f"{BRIDGE}-{node}", "unshare", "--uts", "sh", "-c", named, node,
             str(self.folder / "slurm.conf")],
            check=True, env=os.environ | self.environment,
        )  # fmt: skip

    def kill_node(self, node: str) -> None:
        """Kill all processes of a node at once, as one that loses power."""
        space = f"{BRIDGE}-{node}"
        found = subprocess.run(["ip", "netns", "pids", space], check=True, capture_output=True, text=True)
        if found.stdout:
            subprocess.run(["kill", "-9", *found.stdout.split()], check=False)


@contextmanager
def slurm(folder: Path, nodes: int = 2, cpus: int = 2) -> Iterator[Slurm]:
    """A cluster of a number of nodes, which ends with the context; `cpus` are what each node says it has."""
    names = [f"n{number}" for number in range(1, nodes + 1)]
    listed = "\n".join(
        f"NodeName={name} NodeAddr={address(number)} NodeHostname={name} CPUs={cpus} State=UNKNOWN"
        for number, name in enumerate(names, start=1)
    )
    folder.mkdir(parents=True)
    (folder / "state").mkdir()
    configuration = CONFIGURATION.format(
        host=os.uname().nodename, controller=CONTROLLER, port=16817 + NUMBER, folder=folder, nodes=listed
    )
    file = folder / "slurm.conf"
    file.write_text(configuration, encoding="utf-8")
    (folder / "cgroup.conf").write_text(
        "CgroupPlugin=cgroup/v1\n", encoding="utf-8"
    )  # else it looks for them
    cluster = Slurm(folder, names, {"SLURM_CONF": str(file)})
    with namespaces(names):
        try:
            subprocess.run(["slurmctld", "-f", str(file)], check=True, env=os.environ | cluster.environment)
            for name in names:
                cluster.start_node(name)
            _ready(cluster)
            yield cluster
        finally:
            for name in names:
                cluster.kill_node(name)
            subprocess.run(["kill", "-9", (folder / "slurmctld.pid").read_text().strip()], check=False)


def _ready(cluster: Slurm) -> None:
    limit = time.monotonic() + PATIENCE_S
    while cluster.run("sinfo", "-h", "-o", "%T", check=False) != "idle":
        if time.monotonic() > limit:
            raise AssertionError(cluster.run("sinfo") + (cluster.folder / "slurmctld.log").read_text())
        time.sleep(0.2)
