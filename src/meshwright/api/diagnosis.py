"""Examination of the hosts of a run before it starts (`doctor`)."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

from meshwright.api.options import Option, folder_name
from meshwright.api.ranks import Result, run_on_ranks
from meshwright.api.start_checks import nearest_folder
from meshwright.hardware.cluster import Cluster
from meshwright.hardware.find import cluster as hardware_of
from meshwright.profile.machine import gpus
from meshwright.rank.env import count_devices, worker
from meshwright.spec import RunSpec

MODULES = ("meshwright.doctor.examination",)
"""Modules that ranks need."""


def doctor(
    spec: RunSpec | None = None,
    *,
    nproc: int | None = None,
    out: Annotated[Path | None, Option(
        "the run's folder, whose file system is examined; default runs/ here", "DIR", folder_name)] = None,
    cluster: Annotated[str | Cluster | None, Option(
        "the hardware that is expected, by name or a hardware file: rates of messages are compared with it",
        "NAME|FILE", str)] = None,
) -> Result:  # fmt: skip
    """Examine the hosts of a run before it starts: limits, ports, versions, clocks, folder, disk and groups.

    As a rank of torchrun, srun or mpirun all hosts are examined together, else this one, with `nproc`
    processes: by default one for each rank of the run's layout where this host has a device for each, else
    one for each of its GPUs, or one. Returns on the first rank `healthy`, `fails` (True if a run would fail),
    `findings` (each with `check`, `fails`, `sentence`, `remedy`, `ranks` and `where`), `measured`, `ranks`,
    `hosts` and `seconds`, and {} on others, but on each rank that could not meet the others. Nothing that is
    written stays. Raises `UserError`.
    """
    if out is not None:
        nearest_folder(out)
    ranks = _ranks(spec, nproc)
    call = partial(doctor_worker, spec, out=out, cluster=_expected(cluster))
    return run_on_ranks(call, ranks, modules=MODULES)


def doctor_worker(spec: RunSpec | None, *, out: Path | None, cluster: Cluster | None) -> Result:
    """Examine as one rank."""
    from meshwright.doctor.examination import Examination

    base = Path("runs") if out is None else out
    folder = base if spec is None else spec.checkpoint.folder(base)
    return Examination(spec, folder, cluster).run()


def _expected(cluster: str | Cluster | None) -> Cluster | None:
    return hardware_of(cluster) if isinstance(cluster, str) else cluster


def _ranks(spec: RunSpec | None, nproc: int | None) -> int:
    """The number of processes to start; any in a world that is there."""
    if nproc is not None or worker() is not None:
        return nproc or 1
    if spec is not None and spec.layout.world_size <= count_devices():
        return spec.layout.world_size
    return gpus() or 1
