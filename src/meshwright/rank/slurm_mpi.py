"""Launchers of several tasks, such as srun and mpirun, by the variables that they set.

Their tasks are no ranks: each would do the whole work alone, and write it to the same place. Under srun a run
is one `meshwright train --nodes N` a node (`launch/elastic.py`), or one torchrun a node, whose ranks `env.py`
places.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from meshwright.spec import UserError

RANK_VARIABLES = "RANK", "WORLD_SIZE", "LOCAL_RANK"
"""Variables of torchrun that make a process a rank."""


@dataclass(frozen=True)
class Launcher:
    """A program that starts several tasks, and makes none of them a rank.

    Each of `sizes` is a variable with a number of tasks, each of `ranks` one with the place of a task, from
    0. `remedy` says how to start ranks with it.
    """

    name: str
    sizes: tuple[str, ...]
    ranks: tuple[str, ...]
    remedy: str


_ONE_A_NODE = "start one torchrun on each node with {}, or one `meshwright train --nodes N`"
LAUNCHERS = (
    Launcher(
        "Slurm",
        ("SLURM_STEP_NUM_TASKS",),  # SLURM_NTASKS is the job's, of which a batch script is no task
        ("SLURM_PROCID", "SLURM_LOCALID"),
        _ONE_A_NODE.format("srun --ntasks-per-node 1"),
    ),
    Launcher(
        "Open MPI",
        ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"),
        ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "PMIX_RANK"),
        _ONE_A_NODE.format("mpirun --map-by ppr:1:node"),
    ),
    Launcher(
        "MVAPICH",
        ("MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_SIZE", "MVP_COMM_WORLD_SIZE"),
        ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_LOCAL_RANK", "MVP_COMM_WORLD_RANK"),
        _ONE_A_NODE.format("mpirun -ppn 1"),
    ),
    Launcher(
        "MPI",  # MPICH, Intel MPI and Cray's, which share their variables
        ("PMI_SIZE", "MPI_LOCALNRANKS"),
        ("PMI_RANK", "MPI_LOCALRANKID", "PALS_RANKID"),
        _ONE_A_NODE.format("mpirun -ppn 1"),
    ),
    Launcher(
        "Flux",
        ("FLUX_JOB_SIZE",),
        ("FLUX_TASK_RANK",),
        _ONE_A_NODE.format("flux run --tasks-per-node 1"),
    ),
    Launcher(
        "jsrun",
        ("JSM_NAMESPACE_SIZE",),
        ("JSM_NAMESPACE_RANK",),
        _ONE_A_NODE.format("jsrun -r 1"),
    ),
)
"""Launchers whose tasks would each run alone."""


def refuse_several_tasks(environment: Mapping[str, str] | None = None) -> None:
    """Raise `UserError` in one of several tasks of a launcher which no torchrun has made ranks."""
    given = os.environ if environment is None else environment
    if any(name in given for name in RANK_VARIABLES):
        return
    for launcher in LAUNCHERS:
        if told := _told(launcher, given):
            raise UserError(
                f"{told[0]} of {launcher.name} and RANK is not set, so each would run alone; "
                f"{launcher.remedy}"
            )


def refuse_worlds_apart(given: Mapping[str, str]) -> None:
    """Raise `UserError` in a world of ranks which has fewer members than its launcher has tasks.

    A torchrun that was not told of the other hosts makes a world of its own in each task. Its members are
    torchruns (GROUP_WORLD_SIZE), or ranks where something else has made it.
    """
    name = "GROUP_WORLD_SIZE" if "GROUP_WORLD_SIZE" in given else "WORLD_SIZE"
    members = _number(given, name)
    for launcher in LAUNCHERS:
        tasks = [_number(given, size) for size in launcher.sizes]
        tasks += [1 + number for rank in launcher.ranks if (number := _number(given, rank))]
        if 0 < members < max(tasks):
            told = _told(launcher, given)[0]
            raise UserError(
                f"{name}: {members} is less than the tasks of {launcher.name} ({told}), so each would run "
                f"alone, in a world of its own; give each torchrun --nnodes {max(tasks)} and one "
                f"--rdzv-endpoint, or unset the variable if it is not of these tasks"
            )


def _told(launcher: Launcher, given: Mapping[str, str]) -> list[str]:
    """Return what says that this process is one of several tasks of a launcher."""
    told = [f"{name}: {given[name]} tasks" for name in launcher.sizes if _number(given, name) > 1]
    return told + [f"{name}: this is task {given[name]}" for name in launcher.ranks if _number(given, name)]


def _number(given: Mapping[str, str], name: str) -> int:
    """Return a variable's number; 0 where it is not set, or is none."""
    text = given.get(name, "")
    return int(text) if text.isdecimal() else 0
