"""Launchers of tasks, such as srun and mpirun, by the variables that they set: which of them are ranks.

A task of a launcher is a rank of a run where its variables tell the whole place: its number among all tasks,
and among those of its host. Launchers may be one inside another, as mpirun in a batch job of Slurm: the first
of `LAUNCHERS` that tells the whole place has started this process.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from meshwright.spec import UserError

RANK_VARIABLES = "RANK", "WORLD_SIZE", "LOCAL_RANK"
"""Variables of torchrun that make a process a rank."""

LOWEST_PORT, PORTS = 20_000, 12_000
"""Ports below those that Linux gives to connections (32768), of which a job's name chooses one."""


class Task(NamedTuple):
    """A task's number among all of its launcher, and among those of its host."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int


@dataclass(frozen=True)
class Launcher:
    """A program that starts several tasks.

    `rank`, `world_size`, `local_rank` and `local_world_size` are names of variables, of which the first that
    is set counts; places count from 0. `count_local` returns the tasks of this host where no variable has
    them. All tasks of a job, and no others, have the same words in the variables `job`. `flag` is how the
    command is told the number of tasks, `one_a_host` the command that starts one on each host.
    """

    name: str
    rank: tuple[str, ...]
    world_size: tuple[str, ...]
    local_rank: tuple[str, ...]
    local_world_size: tuple[str, ...]
    flag: str
    one_a_host: str
    job: tuple[str, ...] = ()
    count_local: Callable[[Mapping[str, str]], int | None] = lambda _given: None

    def task(self, given: Mapping[str, str]) -> Task | None:
        """The place of this process; None where the variables do not tell the whole of it."""
        rank, world_size = _first(given, self.rank), _first(given, self.world_size)
        local_rank, local = _first(given, self.local_rank), _first(given, self.local_world_size)
        local = self.count_local(given) if local is None else local
        if rank is None or world_size is None or local_rank is None or local is None:
            return None
        fits = rank < world_size and local_rank < local <= world_size
        return Task(rank, world_size, local_rank, local) if fits else None

    def told(self, given: Mapping[str, str]) -> list[str]:
        """Words for each variable which says that this process is one of several tasks."""
        sizes = [name for name in self.world_size + self.local_world_size if (_number(given, name) or 0) > 1]
        told = [f"{name}: {given[name]} tasks" for name in sizes]
        places = [name for name in self.rank + self.local_rank if _number(given, name)]
        return told + [f"{name}: this is task {given[name]}" for name in places]

    def least_tasks(self, given: Mapping[str, str]) -> int:
        """The number of tasks that there are at least, as the variables say."""
        sizes = [_number(given, name) or 0 for name in self.world_size + self.local_world_size]
        return max([1, *sizes, *(1 + (_number(given, name) or 0) for name in self.rank + self.local_rank)])

    def master(self, task: Task, given: Mapping[str, str]) -> tuple[str, int]:
        """Host and port where the tasks of a job meet, those of MASTER_ADDR and MASTER_PORT where they are
        set. Raises `UserError` where nothing tells the host of rank 0."""
        host = given.get("MASTER_ADDR") or ("127.0.0.1" if task.local_world_size == task.world_size else "")
        if not host and self is SLURM:
            host = first_host(given.get("SLURM_STEP_NODELIST", given.get("SLURM_JOB_NODELIST", "")))
        if not host:
            raise UserError(
                f"MASTER_ADDR: it is not set, and {self.name} does not say on which host rank 0 is; set it "
                f"to that host's address in all tasks, such as by mpirun -x MASTER_ADDR=ADDRESS"
            )
        if port := given.get("MASTER_PORT", ""):
            if not (port.isdecimal() and 0 < int(port) < 1 << 16):
                raise UserError(
                    f"MASTER_PORT: {port!r} is not a port; give a free one of {host}, or unset it"
                )
            return host, int(port)
        words = [given[name] for name in self.job if name in given] or [str(os.getppid())]
        drawn = int.from_bytes(hashlib.sha256(" ".join([self.name, *words]).encode()).digest()[:8], "big")
        return host, LOWEST_PORT + drawn % PORTS


def _tasks_of_node(given: Mapping[str, str]) -> int | None:
    """Tasks of this node of a step of Slurm, whose list for all nodes is such as "2(x3),1"."""
    node, counts = _number(given, "SLURM_NODEID"), list[int]()
    for part in given.get("SLURM_STEP_TASKS_PER_NODE", "").split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if match is None:
            return None
        counts += [int(match[1])] * int(match[2] or 1)
    return counts[node] if node is not None and node < len(counts) else None


def _tasks_by_hosts(given: Mapping[str, str]) -> int | None:
    """Tasks of a host of Flux, if all hosts have as many."""
    size, hosts = _number(given, "FLUX_JOB_SIZE"), _number(given, "FLUX_JOB_NNODES")
    return size // hosts if size and hosts and size % hosts == 0 else None


SLURM = Launcher(
    "Slurm",
    rank=("SLURM_PROCID",),
    world_size=("SLURM_STEP_NUM_TASKS",),  # SLURM_NTASKS is the job's, of which a batch script is no task
    local_rank=("SLURM_LOCALID",),
    local_world_size=(),
    flag="srun --ntasks",
    one_a_host="srun --ntasks-per-node 1",
    job=("SLURM_JOB_ID", "SLURM_STEP_ID"),
    count_local=_tasks_of_node,
)

LAUNCHERS = (
    Launcher(
        "Open MPI",
        rank=("OMPI_COMM_WORLD_RANK", "PMIX_RANK"),
        world_size=("OMPI_COMM_WORLD_SIZE",),
        local_rank=("OMPI_COMM_WORLD_LOCAL_RANK",),
        local_world_size=("OMPI_COMM_WORLD_LOCAL_SIZE",),
        flag="mpirun -n",
        one_a_host="mpirun --map-by ppr:1:node",
        job=("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"),
    ),
    Launcher(
        "MVAPICH",
        rank=("MV2_COMM_WORLD_RANK", "MVP_COMM_WORLD_RANK"),
        world_size=("MV2_COMM_WORLD_SIZE", "MVP_COMM_WORLD_SIZE"),
        local_rank=("MV2_COMM_WORLD_LOCAL_RANK", "MVP_COMM_WORLD_LOCAL_RANK"),
        local_world_size=("MV2_COMM_WORLD_LOCAL_SIZE", "MVP_COMM_WORLD_LOCAL_SIZE"),
        flag="mpirun -n",
        one_a_host="mpirun -ppn 1",
    ),
    Launcher(
        "MPI",  # MPICH, Intel MPI and Cray's (PALS), which share variables
        rank=("PMI_RANK", "PALS_RANKID"),
        world_size=("PMI_SIZE",),
        local_rank=("MPI_LOCALRANKID", "PALS_LOCAL_RANKID", "PMI_LOCAL_RANK"),
        local_world_size=("MPI_LOCALNRANKS", "PALS_LOCAL_SIZE", "PMI_LOCAL_SIZE"),
        flag="mpirun -n",
        one_a_host="mpirun -ppn 1",
        job=("PALS_APID",),
    ),
    Launcher(
        "Flux",
        rank=("FLUX_TASK_RANK",),
        world_size=("FLUX_JOB_SIZE",),
        local_rank=("FLUX_TASK_LOCAL_ID",),
        local_world_size=(),
        flag="flux run --ntasks",
        one_a_host="flux run --tasks-per-node 1",
        job=("FLUX_JOB_ID",),
        count_local=_tasks_by_hosts,
    ),
    Launcher(
        "jsrun",
        rank=("JSM_NAMESPACE_RANK",),
        world_size=("JSM_NAMESPACE_SIZE",),
        local_rank=("JSM_NAMESPACE_LOCAL_RANK",),
        local_world_size=("JSM_NAMESPACE_LOCAL_SIZE",),
        flag="jsrun -n",
        one_a_host="jsrun -r 1",
        job=("LSB_JOBID",),
    ),
    SLURM,  # last: mpirun and others start their daemons by srun, whose variables their tasks inherit
)


def launcher_of(given: Mapping[str, str]) -> tuple[Launcher, Task] | None:
    """The launcher of which this process is one of several tasks, and its place; None for a lone process.

    Raises `UserError` where variables tell of several tasks, and of no whole place.
    """
    found = [(launcher, task) for launcher in LAUNCHERS if (task := launcher.task(given)) is not None]
    if several := next((each for each in found if each[1].world_size > 1), None):
        return several
    for launcher in LAUNCHERS:
        if told := launcher.told(given):
            raise UserError(
                f"{told[0]} of {launcher.name}, whose other variables do not tell the place of this process "
                f"among them, so each would run alone; {_remedy(launcher)}"
            )
    return None


def ranks_flag() -> str:
    """How the launcher of this process is told the number of ranks."""
    if "RANK" in os.environ or (started := launcher_of(os.environ)) is None:
        return "--nproc"
    return started[0].flag


def refuse_several_tasks(environment: Mapping[str, str] | None = None) -> None:
    """Raise `UserError` in one of several tasks of a launcher which no torchrun has made ranks."""
    given = os.environ if environment is None else environment
    if any(name in given for name in RANK_VARIABLES):
        return
    for launcher in LAUNCHERS:
        if told := launcher.told(given):
            raise UserError(
                f"{told[0]} of {launcher.name}, each of which would do the whole work alone; start one task, "
                f"such as by {launcher.flag} 1"
            )


def refuse_worlds_apart(given: Mapping[str, str]) -> None:
    """Raise `UserError` in a world of ranks which has fewer members than its launcher has tasks.

    A torchrun that was not told of the other hosts makes a world of its own in each task. Its members are
    torchruns (GROUP_WORLD_SIZE), or ranks where something else has made it.
    """
    name = "GROUP_WORLD_SIZE" if "GROUP_WORLD_SIZE" in given else "WORLD_SIZE"
    members = _number(given, name) or 0
    for launcher in LAUNCHERS:
        tasks = launcher.least_tasks(given)
        if 0 < members < tasks:
            told = launcher.told(given)[0]
            raise UserError(
                f"{name}: {members} is less than the tasks of {launcher.name} ({told}), so each would run "
                f"alone, in a world of its own; give each torchrun --nnodes {tasks} and one "
                f"--rdzv-endpoint, or unset the variable if it is not of these tasks"
            )


def first_host(nodes: str) -> str:
    """The first host of a list of Slurm's, such as "gpu[07-09,12],login": "gpu07"."""
    match = re.match(r"([^,\[]+)(?:\[(\w+)[^\]]*\]([^,]*))?", nodes)
    return "" if match is None else match[1] + (match[2] or "") + (match[3] or "")


def _remedy(launcher: Launcher) -> str:
    return (
        f"start one torchrun on each node with {launcher.one_a_host}, or one `meshwright train --nodes N`, "
        f"or unset the variable if it is not of this process"
    )


def _first(given: Mapping[str, str], names: tuple[str, ...]) -> int | None:
    """The number of the first variable that is set; None where none is, or it is no number."""
    return next((_number(given, name) for name in names if name in given), None)


def _number(given: Mapping[str, str], name: str) -> int | None:
    text = given.get(name, "")
    return int(text) if text.isdecimal() else None
