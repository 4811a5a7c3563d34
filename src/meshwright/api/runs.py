"""Train runs: here, as one rank of a torchrun, on the ranks of this host, or as one of several hosts."""

from __future__ import annotations

import json
import os
import shutil
import warnings
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from meshwright.api.diagnosis import doctor as examine
from meshwright.api.diagnosis import refuse_unfit, tell_findings
from meshwright.api.folders import folder_of, make_folder
from meshwright.api.initial_weights import check_resumed_weights, check_weights
from meshwright.api.options import Option, folder_name
from meshwright.api.ranks import Result, preload, run_on_ranks, write_call
from meshwright.api.run_status import status_at_end
from meshwright.api.start_checks import (
    check_folder,
    check_host,
    check_inputs,
    check_packages,
    check_writable_folder,
)
from meshwright.api.train_rank import train_worker
from meshwright.islands.island_log import island_folder
from meshwright.rank.env import worker
from meshwright.rank.scratch import scratch_folder
from meshwright.spec import RunSpec, UserError
from meshwright.spec.rules import ranks_match
from meshwright.units import counted

if TYPE_CHECKING:
    from meshwright.chaos.faults import FaultPlan
    from meshwright.launch.start import ProbedRun, Tell

MODULES = (
    "meshwright.train.loop",
    "meshwright.weights.initial_weights",
    "meshwright.infer.sample",
    "meshwright.infer.soft_target_source",
    "meshwright.report.live_report",
)
"""Modules that ranks need."""


def train(
    spec: RunSpec,
    *,
    nproc: int | None = None,
    out: Annotated[Path | None, Option(
        "folder of the run; default a new one under runs/", "DIR", folder_name)] = None,
    resume: Annotated[str | int | None, Option(
        "continue from the newest checkpoint, or from a step", "auto|STEP", str)] = None,
    quiet: Annotated[bool, Option("no progress lines")] = False,
    supervise: bool = False,
    nodes: tuple[int, int] | None = None,
    address: Annotated[str | None, Option(
        "address of this host that the others reach it at", "IP", str)] = None,
    rendezvous: Annotated[str | None, Option(
        "store on one of the hosts of --nodes, where they meet; default the folder of --out",
        "HOST:PORT", str)] = None,
    doctor: Annotated[bool, Option(
        "first examine the hosts, as `doctor` does, and only train if a run would not fail there")] = False,
) -> Result:  # fmt: skip
    """Train on `nproc` local ranks (default: the layout's world size) and return the run's result.

    Several ranks, or one with `supervise`, are processes of their own, which are watched and, when one fails
    or hangs, started again (`recovery.max_restarts`); else one rank trains in this process.

    With `nodes` (least, most) this host is one of so many that run the same on a common `out`, with `nproc`
    ranks each (default: one for each GPU, or core): hosts may be lost and join while the run goes on, and the
    data axes of the layout have the size that the hosts at hand make. Others reach this host at `address`;
    so do other step groups, where `spec.own_step_group` is the one that this host trains. The hosts meet in
    `out`, or, as more than 64 should, in a store at `rendezvous` (HOST:PORT), which this command on HOST
    holds.

    With `doctor` the ranks examine their hosts at the first start of a job, and do not train where they find
    what the run would fail of.

    The run's folder is `out` (default `runs/<time>`). `resume` is None, "auto" (from the newest checkpoint of
    that folder, if there is one) or a step. The result has `final_loss`,
    `val_bits_per_byte`, `tokens_per_second`, `mfu`, `peak_memory_bytes`, `parameters_sha256`,
    `samples_sha256`, `steps` and more. Raises `UserError`.
    """
    resume = str(resume) if resume is not None else None
    check_packages(spec)
    if nodes is not None:
        if out is None:
            raise UserError("--out: several hosts need a common folder; give one that all of them have")
        check_writable_folder(Path(out))
        check_inputs(spec)
        with status_at_end(Path(out), spec.checkpoint.folder(Path(out)), resume is not None):
            return _train_with_others(
                spec, nodes, nproc, Path(out), resume, quiet, address, rendezvous, doctor
            )
    with folder_of(out, spec) as folder:
        place = worker()
        first, checkpoints = place is None or place.rank == 0, spec.checkpoint.folder(folder)
        with status_at_end(folder, checkpoints, resume is not None, first):
            if place is not None:
                return train_worker(
                    spec, out=folder, resume=resume, quiet=quiet, address=address, doctor=doctor
                )
            return _train_here(spec, nproc, folder, resume, quiet, supervise, address, doctor)


def _train_here(
    spec: RunSpec,
    nproc: int | None,
    out: Path,
    resume: str | None,
    quiet: bool,
    supervise: bool,
    address: str | None,
    doctor: bool,
) -> Result:
    """Train on ranks that this process starts; see `train`."""
    ranks_match(spec, spec.world_size if nproc is None else nproc)
    check_host(spec, out)
    if resume is not None:
        check_resumed_weights(spec, out)
    if spec.own_step_group is not None:
        out = island_folder(out, spec.own_step_group)
    free_running = spec.free_step_groups
    if resume is None or free_running:  # else the ranks do it, since to read checkpoints takes torch
        check_folder(spec, out, resume)
    if resume is None:
        check_weights(spec)
    if spec.own_step_group is not None or free_running:
        make_folder(out)
    if free_running:
        from meshwright.api.island_runs import train_islands

        if doctor:  # whose ranks are of several worlds
            refuse_unfit(found := examine(spec, nproc=spec.world_size, out=out))
            tell_findings(found, quiet)
        return train_islands(spec, out, resume, quiet)
    return train_on_ranks(spec, out, resume, quiet, supervise, address, doctor=doctor)


def train_on_ranks(
    spec: RunSpec,
    out: Path,
    resume: str | None = None,
    quiet: bool = True,
    supervise: bool = True,
    address: str | None = None,
    faults: FaultPlan | None = None,
    tell: Tell | None = None,
    doctor: bool = False,
) -> Result:
    """Train in the folder `out` on the run's ranks, whose failures its record gets, and `tell` first.

    With `doctor` they examine their host before their first start.
    """
    as_rank = partial(train_worker, spec, out=out, quiet=quiet, address=address)
    again = partial(as_rank, resume="auto") if supervise or spec.world_size > 1 else None
    return run_on_ranks(
        partial(as_rank, resume=resume, doctor=doctor),
        spec.world_size,
        spec=spec,
        modules=MODULES,
        again=again,
        tell=partial(record_event, out, tell),
        faults=faults,
        health=_probed(spec, out),
    )


def _probed(spec: RunSpec, out: Path) -> ProbedRun | None:
    """The run that a host is probed for before its ranks are started again, or None."""
    from meshwright.launch.start import ProbedRun

    return ProbedRun(spec, out) if spec.recovery.health_probe else None


def _train_with_others(
    spec: RunSpec,
    nodes: tuple[int, int],
    nproc: int | None,
    out: Path,
    resume: str | None,
    quiet: bool,
    address: str | None,
    rendezvous: str | None,
    doctor: bool,
) -> Result:
    """Train as one of several hosts; see `train`."""
    from meshwright.launch.elastic import ElasticJob, HostSupervisor
    from meshwright.launch.membership import Host
    from meshwright.launch.start import Job
    from meshwright.rank.env import count_devices, resized
    from meshwright.rank.host_rendezvous import check_rendezvous
    from meshwright.rank.network import own_address

    ranks = count_devices() if nproc is None else nproc
    least, most = nodes
    specs = {size: fitting for size in range(least, most + 1) if (fitting := resized(spec, size * ranks))}
    if not specs:
        raise UserError(
            f"--nodes: {spec.layout.describe()} cannot be run by {least} to {counted(most, 'hosts')} of "
            f"{counted(ranks, 'ranks')}; tp x cp x pp must divide the ranks, and the data ranks the "
            f"{spec.shared_sequences} sequences of a batch"
        )
    check_rendezvous(rendezvous, most)
    own, interface = own_address(address)
    with scratch_folder() as folder:

        def job_of(first: bool, size: int) -> Job:
            call = partial(
                train_worker, specs[size], out=out, quiet=quiet, resume=resume if first else "auto",
                doctor=doctor and first,
            )  # fmt: skip
            return Job(
                write_call(call, folder / f"call-{size}"), ranks,
                preload=preload(MODULES, spec), recovery=spec.recovery, stages=spec.layout.pp,
                health=_probed(specs[size], out),
            )  # fmt: skip

        tell = partial(record_event, out, None)
        job = ElasticJob(out / "hosts", sorted(specs), job_of, tell, rendezvous)
        HostSupervisor(job, Host(f"{own}-{os.getpid()}", own, interface, ranks)).run().raise_for_failure()
    return dict(json.loads((out / "result.json").read_text(encoding="utf-8")))


def record_event(out: Path, tell: Tell | None, kind: str, fields: dict[str, Any]) -> None:
    """Add a supervisor's event to the record of the run in `out`; stacks of a hang get a file of their own,
    and dumps of its ranks a folder.

    A record that cannot be written is a warning: the run matters more.
    """
    from meshwright.runs.record import append_event

    if tell is not None:
        tell(kind, fields)
    for internal in ("noticed", "furthest"):  # for `tell`: by a clock that only this process can read
        fields.pop(internal, None)
    try:
        if stacks := fields.pop("stacks", ""):
            file = out / f"stacks-{fields['generation']}.txt"
            file.write_text(stacks, encoding="utf-8")
            fields["stacks"] = file.name
        if dumps := fields.pop("dumps", ()):
            folder = out / f"flight-recorder-{fields['generation']}"
            folder.mkdir(exist_ok=True)
            for dump in dumps:
                shutil.copyfile(dump, folder / dump.name)
            fields["flight_recorder"] = folder.name
        append_event(out, kind, fields, alone=kind not in ("healthy", "slow", "zygote_stopped"))
    except (OSError, UserError) as error:
        warnings.warn(f"{out}: the event '{kind}' was not recorded: {error}", stacklevel=2)
