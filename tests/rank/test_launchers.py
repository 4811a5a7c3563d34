"""Ranks that launchers of tasks have started, such as srun and mpirun."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshwright.cli.main import main
from meshwright.rank import env
from meshwright.rank.env import Worker, worker
from meshwright.rank.launchers import (
    LOWEST_PORT,
    PORTS,
    first_host,
    launcher_of,
    refuse_several_tasks,
)
from meshwright.spec import UserError

SRUN = {
    "SLURM_PROCID": "3", "SLURM_STEP_NUM_TASKS": "5", "SLURM_LOCALID": "1", "SLURM_NODEID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2),1", "SLURM_STEP_NODELIST": "gpu[07-09]", "SLURM_JOB_ID": "41",
    "SLURM_STEP_ID": "0",
}  # fmt: skip
MPIRUN = {
    "OMPI_COMM_WORLD_RANK": "5", "OMPI_COMM_WORLD_SIZE": "8", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4", "PMIX_RANK": "5", "PMIX_NAMESPACE": "prterun-a-12@1",
}  # fmt: skip
PALS = {
    "PMI_RANK": "5", "PMI_SIZE": "8", "PALS_RANKID": "5", "PALS_LOCAL_RANKID": "1", "PMI_LOCAL_SIZE": "4",
}  # fmt: skip
HYDRA = {"PMI_RANK": "5", "PMI_SIZE": "8", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "4"}
FLUX = {"FLUX_TASK_RANK": "5", "FLUX_JOB_SIZE": "8", "FLUX_TASK_LOCAL_ID": "1", "FLUX_JOB_NNODES": "2"}
JSRUN = {
    "JSM_NAMESPACE_RANK": "5", "JSM_NAMESPACE_SIZE": "8", "JSM_NAMESPACE_LOCAL_RANK": "1",
    "JSM_NAMESPACE_LOCAL_SIZE": "4",
}  # fmt: skip


@pytest.mark.parametrize("given", [MPIRUN, PALS, HYDRA, FLUX, JSRUN])
def test_tasks_of_launchers_are_ranks(given: dict[str, str]) -> None:
    assert worker(given) == Worker(5, 8, 1, 4)


def test_tasks_of_slurm_are_ranks_unless_an_inner_launcher_has_made_others() -> None:
    assert worker(SRUN) == Worker(3, 5, 1, 2)
    assert worker({**SRUN, "SLURM_PROCID": "4", "SLURM_NODEID": "2", "SLURM_LOCALID": "0"}) == Worker(
        4, 5, 0, 1
    )
    assert worker(SRUN | {"PMI_RANK": "3", "PMI_SIZE": "5"}) == Worker(3, 5, 1, 2)  # srun --mpi=pmi2
    assert worker(SRUN | {"PMIX_RANK": "3"}) == Worker(3, 5, 1, 2)  # srun --mpi=pmix
    assert worker(SRUN | MPIRUN) == Worker(5, 8, 1, 4)  # mpirun in a job, whose daemons srun has started
    assert worker(SRUN | {"RANK": "0", "WORLD_SIZE": "8", "GROUP_WORLD_SIZE": "5"}) == Worker(0, 8, 0, 8)


def test_tasks_of_a_job_meet_at_the_first_host_and_a_port_of_the_job() -> None:
    launcher, task = launcher_of(SRUN) or pytest.fail("srun made no ranks")
    host, port = launcher.master(task, SRUN)
    assert host == "gpu07"
    assert LOWEST_PORT <= port < LOWEST_PORT + PORTS
    assert launcher.master(task, SRUN | {"SLURM_PROCID": "0"}) == (host, port)
    assert launcher.master(task, SRUN | {"SLURM_JOB_ID": "42"})[1] != port
    assert launcher.master(task, SRUN | {"MASTER_ADDR": "a", "MASTER_PORT": "77"}) == ("a", 77)
    mpirun, place = launcher_of(MPIRUN) or pytest.fail("mpirun made no ranks")
    with pytest.raises(UserError, match=r"MASTER_ADDR: .* Open MPI does not say .* -x MASTER_ADDR=ADDRESS"):
        mpirun.master(place, MPIRUN)
    assert mpirun.master(place._replace(local_world_size=8), MPIRUN)[0] == "127.0.0.1"


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("n1", "n1"),
        ("n[3-5,9]", "n3"),
        ("gpu-[012,014]", "gpu-012"),
        ("a7,b[1-2]", "a7"),
        ("r[1-2]c0,x", "r1c0"),
    ],
)
def test_the_first_host_of_a_list_of_slurms(nodes: str, first: str) -> None:
    assert first_host(nodes) == first


def test_torchrun_under_a_launcher_makes_ranks() -> None:
    given = {"RANK": "1", "WORLD_SIZE": "2", "OMPI_COMM_WORLD_SIZE": "2", "SLURM_STEP_NUM_TASKS": "2"}
    assert worker(given) == Worker(1, 2, 1, 2, launched=False)
    refuse_several_tasks(given)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "0"}, "tasks of Slurm .SLURM_STEP_NUM_TASKS: 2 tasks"),
        ({"OMPI_COMM_WORLD_SIZE": "4"}, "GROUP_WORLD_SIZE: 1 is less than .* give each torchrun --nnodes 4"),
        ({"PMIX_RANK": "1"}, "PMIX_RANK: this is task 1.* --nnodes 2 and one --rdzv-endpoint"),
    ],
)
def test_a_torchrun_in_each_task_that_knows_no_other_is_a_sentence(given: dict[str, str], words: str) -> None:
    alone = {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "8"}
    with pytest.raises(UserError, match=words):
        worker({**alone, "GROUP_WORLD_SIZE": "1", **given})
    together = {**alone, **given, "GROUP_WORLD_SIZE": "4"}
    assert worker(together) == Worker(3, 8, 3, 8)
    assert worker({**alone, **given}) == Worker(3, 8, 3, 8)  # ranks that a script has made of the tasks
    by_nodes = {**together, "GROUP_WORLD_SIZE": "1", env.SUPERVISOR: "{}"}
    assert worker(by_nodes) == Worker(3, 8, 3, 8, launched=True)


def test_tasks_that_are_made_worlds_of_one_rank_are_a_sentence() -> None:
    given = {"RANK": "0", "WORLD_SIZE": "1", "SLURM_STEP_NUM_TASKS": "2"}
    with pytest.raises(UserError, match="WORLD_SIZE: 1 is less than the tasks of Slurm"):
        worker(given)
    assert worker({**given, "SLURM_STEP_NUM_TASKS": "1", "SLURM_NTASKS": "8"}) == Worker(0, 1, 0, 1)


def test_several_hosts_may_be_tasks_of_a_launcher_and_other_runs_may_not(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    nodes = ["--nodes", "1", "--nproc", "1", "--address", "203.0.113.1", "--out", str(tmp_path / "o")]
    with pytest.raises(UserError, match=r"--address: 203\.0\.113\.1 is not an address of this host"):
        main(["train", "--model.preset", "tiny", *nodes])
    with pytest.raises(UserError, match="OMPI_COMM_WORLD_SIZE: 2 tasks"):
        main(["train", "--model.preset", "tiny", "--out", str(tmp_path / "o")])
    with pytest.raises(UserError, match="OMPI_COMM_WORLD_SIZE: 2 tasks"):
        main(["chaos", "--model.preset", "tiny", "--layout.dp", "2", "--out", str(tmp_path / "o")])
    with pytest.raises(UserError, match="OMPI_COMM_WORLD_SIZE: 2 tasks"):
        main(["quantise", "run", "--compare"])
