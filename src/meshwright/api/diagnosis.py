"""Examination of the hosts of a run before it starts (`doctor`)."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from meshwright.api.folders import make_folder
from meshwright.api.options import Option, folder_name
from meshwright.api.ranks import Result, run_on_ranks
from meshwright.api.start_checks import nearest_folder
from meshwright.hardware.cluster import Cluster
from meshwright.hardware.find import cluster as hardware_of
from meshwright.profile.machine import gpus
from meshwright.rank.env import count_devices, worker
from meshwright.rank.failure import errors_recorded
from meshwright.rank.scheduler import job
from meshwright.runs.record import RUN, read_object
from meshwright.runs.status import read_status, write_status
from meshwright.spec import RunSpec, UserError
from meshwright.units import counted

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

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


@contextmanager
def examined(spec: RunSpec, out: Path, quiet: bool) -> Iterator[Store | None]:
    """Block of a rank that trains the run in `out`, whose hosts all ranks have examined together before.

    That is at the first start of a job alone: what a later one would find, such as a lost node, a new start
    mends. Yields the store that ranks have met at, None where they need none, or are to meet elsewhere.
    Raises on all ranks the `UserError` of what the run would fail of; the rest is warnings.
    """
    from meshwright.comm.process_groups import TIMEOUT
    from meshwright.doctor.examination import Examination
    from meshwright.doctor.meeting import met

    examination = Examination(spec, spec.checkpoint.folder(out))
    with errors_recorded():
        if not examination.may_meet():
            refuse_unfit(examination.alone())
        with met(examination.place, out, TIMEOUT) as (ranks, store):
            if ranks.on_first(lambda: _starts_job(out)):
                found = examination.together(ranks, store)
                if ranks.rank == 0 and found["fails"]:
                    _begin_status(out)
                found = ranks.broadcast(found)
                refuse_unfit(found)
                if ranks.rank == 0:
                    tell_findings(found, quiet)
            yield store


def _starts_job(out: Path) -> bool:
    """True where no start of the run in `out` is recorded of the job that this process runs in.

    Without the number of a job that is a run that has not started at all.
    """
    starts = (read_object(out / RUN) or {}).get("starts") or []
    own = (job() or {}).get("job")
    jobs = [(start.get("job") or {}).get("job") for start in starts if isinstance(start, dict)]
    return own not in jobs


def _begin_status(out: Path) -> None:
    """Let the status of a run that is not done be that of this start, whose end it is to tell."""
    with suppress(UserError):  # that the folder cannot be made is among the findings
        make_folder(out)
    if (read_status(out) or ("",))[0] != "done":
        write_status(out, "running")


def refuse_unfit(found: Mapping[str, Any]) -> None:
    """Raise the `UserError` of an examination's findings of which a run would fail, in one line."""
    failing = [in_words(each) for each in found["findings"] if each["fails"]]
    if failing:
        raise UserError(f"doctor: the run would fail on these hosts: {' | '.join(failing)}")


def tell_findings(found: Mapping[str, Any], quiet: bool) -> None:
    """Warn of an examination's findings that a run outlives; say what was examined unless `quiet`."""
    for each in found["findings"]:
        warnings.warn(f"doctor: {in_words(each)}", stacklevel=2)
    if not quiet:
        place = f"{counted(found['ranks'], 'ranks')} on {counted(found['hosts'], 'hosts')}"
        told = "nothing found" if found["healthy"] else counted(len(found["findings"]), "warnings")
        print(f"doctor: {told}: {place}, {found['seconds']:.1f} s", flush=True)


def in_words(finding: Mapping[str, Any]) -> str:
    """A finding as a sentence: its check, what was found, on which ranks, and what mends it."""
    where = f" ({finding['where']})" if finding["where"] else ""
    return f"{finding['check']}: {finding['sentence']}{where}; {finding['remedy']}"


def _expected(cluster: str | Cluster | None) -> Cluster | None:
    return hardware_of(cluster) if isinstance(cluster, str) else cluster


def _ranks(spec: RunSpec | None, nproc: int | None) -> int:
    """The number of processes to start; any in a world that is there."""
    if nproc is not None or worker() is not None:
        return nproc or 1
    if spec is not None and spec.layout.world_size <= count_devices():
        return spec.layout.world_size
    return gpus() or 1
