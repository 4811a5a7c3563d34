"""Train runs, and launch the ranks of any verb."""

from __future__ import annotations

import json
import os
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshwright.api.folders import folder_of, make_folder
from meshwright.api.initial_weights import check_resumed_weights, check_weights
from meshwright.profile.machine import has_gpu_driver
from meshwright.rank.env import Supervision, worker
from meshwright.rank.scratch import scratch_folder
from meshwright.rank.slurm_mpi import refuse_several_tasks
from meshwright.spec import RunSpec, UserError
from meshwright.spec.rules import ranks_match

if TYPE_CHECKING:
    from meshwright.chaos.faults import Plan
    from meshwright.chaos.inject import Injection
    from meshwright.checkpoint.lease import Lease
    from meshwright.train.callbacks import Observers
    from meshwright.train.loop import TrainingRun

Result = dict[str, Any]
Tell = Callable[[str, dict[str, Any]], None]
"""Called with the kind and the fields of an event."""
WORKERS = {
    "train": (
        "meshwright.train.loop",
        "meshwright.weights.initial_weights",
        "meshwright.infer.sample",
        "meshwright.infer.teacher",
        "meshwright.report.run_page",
    ),
    "verify": ("meshwright.verify.verify",),
    "distil": ("meshwright.infer.teacher",),
}
"""Modules that the ranks of a verb need."""
COMPILER = ("torch._inductor.compile_fx",)
"""Modules that torch.compile imports when it is first used, which takes seconds."""
DYNAMO = ("torch._dynamo",)
"""Torch's checkpointing, and custom operators such as attention on GPUs, import it at their first call."""


def preload(verb: str, spec: RunSpec) -> tuple[str, ...]:
    """Modules that are imported before the ranks of a verb are forked."""
    if spec.train.compile:
        return WORKERS[verb] + COMPILER
    return WORKERS[verb] + (DYNAMO if spec.recompute.policy != "none" or has_gpu_driver() else ())


def train(
    spec: RunSpec,
    *,
    nproc: int | None = None,
    out: Path | None = None,
    resume: str | int | None = None,
    quiet: bool = False,
    supervise: bool = False,
    nodes: tuple[int, int] | None = None,
    address: str | None = None,
) -> Result:
    """Train on `nproc` local ranks (default: the layout's world size) and return the run's result.

    Several ranks, or one with `supervise`, are processes of their own, which are watched and, when one fails
    or hangs, started again (`recovery.max_restarts`); else one rank trains in this process.

    With `nodes` (least, most) this host is one of so many that run the same on a common `out`, with `nproc`
    ranks each (default: one for each GPU, or core): hosts may be lost and join while the run goes on, and the
    data axes of the layout have the size that the hosts at hand make. Others reach this host at `address`;
    so do other islands, where `outer.island` says which one this host trains.

    The run's folder is `out` (default `runs/<time>`). `resume` is None, "auto" (from the newest checkpoint of
    that folder, if there is one) or a step. The result has `final_loss`,
    `val_bits_per_byte`, `tokens_per_second`, `mfu`, `peak_memory_bytes`, `parameters_sha256`,
    `samples_sha256`, `steps` and more. Raises `UserError`.
    """
    from meshwright.rank.auto_layout import check_room

    resume = str(resume) if resume is not None else None
    _check_packages(spec)
    if nodes is not None:
        if out is None:
            raise UserError("--out: several hosts need a common folder; give one that all of them have")
        return _train_with_others(spec, nodes, nproc, Path(out), resume, quiet, address)
    ranks = spec.world_size if nproc is None else nproc
    ranks_match(spec, ranks)
    check_distillation(spec)
    check_room(spec)
    with folder_of(out) as folder:
        return _train_here(spec, ranks, folder, resume, quiet, supervise, address)


def _train_here(
    spec: RunSpec,
    ranks: int,
    out: Path,
    resume: str | None,
    quiet: bool,
    supervise: bool,
    address: str | None,
) -> Result:
    """Train on this host alone; see `train`."""
    if resume is not None:
        check_resumed_weights(spec, out)
    if spec.outer.quorum is not None and spec.outer.island is None:
        from meshwright.api.islands import train_islands

        refuse_several_tasks()
        _check_folder(spec, out, resume)
        if resume is None:
            check_weights(spec)
        make_folder(out)
        return train_islands(spec, out, resume, quiet)
    if spec.outer.island is not None:
        from meshwright.islands.island_log import island_folder

        out = island_folder(out, spec.outer.island)
        make_folder(out)
    if resume is None:  # else the ranks do it, since to read checkpoints takes torch
        _check_folder(spec, out, resume)
        check_weights(spec)
    if ranks == 1 and not supervise:
        return train_worker(spec, out=out, resume=resume, quiet=quiet, address=address)
    flags = ["--out", str(out), *(["--quiet"] if quiet else [])]
    flags += [] if address is None else ["--address", address]
    first = flags if resume is None else [*flags, "--resume", resume]
    return launch("train", spec, ranks, first, out / "result.json", [*flags, "--resume", "auto"])


def _train_with_others(
    spec: RunSpec,
    nodes: tuple[int, int],
    nproc: int | None,
    out: Path,
    resume: str | None,
    quiet: bool,
    address: str | None,
) -> Result:
    """Train as one of several hosts; see `train`."""
    from meshwright.launch.elastic import ElasticJob, HostSupervisor
    from meshwright.launch.membership import Host
    from meshwright.launch.start import Job
    from meshwright.rank.env import count_devices, resized
    from meshwright.rank.network import own_address

    ranks = count_devices() if nproc is None else nproc
    least, most = nodes
    specs = {size: fitting for size in range(least, most + 1) if (fitting := resized(spec, size * ranks))}
    if not specs:
        raise UserError(
            f"--nodes: {spec.layout.describe()} cannot be run by {least} to {most} hosts of {ranks} ranks; "
            f"tp x cp x pp must divide the ranks, and the data ranks the {spec.shared_sequences} sequences "
            f"of a batch"
        )
    own, interface = own_address(address)
    flags = ["--out", str(out), *(["--quiet"] if quiet else [])]
    with scratch_folder() as folder:

        def job_of(first: bool, size: int) -> Job:
            file = folder / f"run-{size}.json"
            file.write_text(json.dumps({"spec": specs[size].to_json()}), encoding="utf-8")
            again = resume if first else "auto"
            argv = ["train", str(file), *flags, *([] if again is None else ["--resume", again])]
            return Job(argv, ranks, "meshwright", preload("train", spec), spec.recovery, spec.layout.pp)

        job = ElasticJob(out / "hosts", sorted(specs), job_of, partial(_record, out, None))
        HostSupervisor(job, Host(f"{own}-{os.getpid()}", own, interface, ranks)).run().raise_for_failure()
    return dict(json.loads((out / "result.json").read_text(encoding="utf-8")))


def train_worker(
    spec: RunSpec,
    *,
    out: Path,
    resume: str | None = None,
    quiet: bool = False,
    address: str | None = None,
) -> Result:
    """Train as one rank of the world of torchrun, or alone; every rank returns the result.

    The ranks of other islands reach this one at `address`, by default on this host.
    """
    from meshwright.checkpoint.lease import STALE_S, Lease
    from meshwright.data.corpus import open_corpus
    from meshwright.infer.teacher import teaching
    from meshwright.kernels.flash_implementation import flash_implementation
    from meshwright.rank.network import own_address
    from meshwright.rank.out_of_memory import memory_errors_told
    from meshwright.rank.world import mesh_of, once_per_host
    from meshwright.report.run_page import write_report
    from meshwright.train.callbacks import Observers
    from meshwright.train.open_run import open_run
    from meshwright.weights.initial_weights import open_weights

    with memory_errors_told(spec), mesh_of(spec, folder=out) as mesh, ExitStack() as stack:
        stack.enter_context(flash_implementation(spec.train.flash_attention, mesh.device))
        first, ranks = mesh.control.rank == 0, mesh.control
        # What restarts a run by itself asks for "auto", and may come before the other host's process is gone.
        supervision = Supervision.given()
        stale_s = STALE_S if supervision is None else supervision.lease_seconds
        lease = Lease(out, "meshwright", stale_s, wait=resume == "auto")

        def check() -> None:
            if first:
                _check_here(spec, out, resume)
                if resume is None:
                    open_weights(spec.model)

        def start() -> Observers:
            check()
            if not first:
                return Observers([])
            make_folder(out)
            return _observers(spec, out, stack.enter_context(lease), quiet)

        ranks.together(check)
        once_per_host(ranks, lambda: open_corpus(spec))  # if it fails, there is no folder yet
        observers = stack.enter_context(ranks.together(start))
        slots = supervision.snapshots if supervision is not None else ()
        injection = _injection(supervision)
        disk = injection.disk if injection else None
        host = "127.0.0.1" if address is None else own_address(address)[0]
        run = open_run(
            spec, mesh, out, observers, check="lazy", lease=lease, slots=slots, disk=disk,
            soft_targets=lambda corpus: teaching(spec, mesh, corpus, out), host=host,
            weights=lambda: open_weights(spec.model),
        )  # fmt: skip
        if injection is not None:
            injection.attach(run)
        ranks.together(lambda: _keep_tokenizer(run))
        result = run.execute(resume)
        _add_figures(result, run, supervision)
        ranks.together(lambda: observers.on_end(result))
        if first:
            write_report(out)
    return result


def _observers(spec: RunSpec, out: Path, lease: Lease, quiet: bool) -> Observers:
    """Return what rank 0 writes and shows of a run in the folder `out`."""
    from meshwright.report.progress import Progress
    from meshwright.report.trackers import make_trackers
    from meshwright.runs.record import RunRecord
    from meshwright.train.callbacks import Observers

    shown = [] if quiet else [Progress()]
    folder = out.resolve()
    name = folder.name if spec.outer.island is None else f"{folder.parent.name}/{folder.name}"
    trackers = make_trackers(spec.train.trackers, out, name, spec.to_json())
    return Observers([RunRecord(out, lease), *shown, *trackers])


def _keep_tokenizer(run: TrainingRun) -> None:
    """Give the run's folder the files that reading and writing text needs, if it has none."""
    from meshwright.data.kept_tokenizer import keep_tokenizer

    if run.mesh.control.rank == 0 and not (run.out / "tokenizer.json").exists():
        make_folder(run.out)
        keep_tokenizer(run.spec, run.corpus.tokenizer if run.corpus.has_text else None, run.out)


def _add_figures(result: Result, run: TrainingRun, supervision: Supervision | None) -> None:
    """Add to the result of a run its starts, the time of all of them, a text, and how far xz compresses."""
    from meshwright.comm.waiting import while_others_wait
    from meshwright.infer.sample import held_out_sample

    result["restarts"] = supervision.generation if supervision is not None else 0
    if supervision is not None and supervision.generation:  # the time of all starts, not of the last one
        result["seconds"] = time.monotonic() - supervision.began
    result["sample"] = held_out_sample(run.trainer, run.corpus)
    ranks = run.mesh.control
    eval_tokens = run.spec.train.eval_tokens
    while_others_wait(ranks, ranks.rank == 0, lambda: result.update(run.corpus.compressed(eval_tokens)))


def _injection(supervision: Supervision | None) -> Injection | None:
    """Return what injects faults into this rank, if its supervisor has a plan of them."""
    place = worker()
    if place is None or supervision is None or not supervision.faults:
        return None
    from meshwright.chaos.inject import Injection

    return Injection(supervision, place)


def check_start(spec: RunSpec, out: Path, resume: str | None) -> None:
    """Raise the `UserError` of a `train` for which this host has too little memory, or `out` is not right."""
    from meshwright.rank.auto_layout import check_room

    check_distillation(spec)
    check_room(spec)
    _check_here(spec, out, resume)


def _check_here(spec: RunSpec, out: Path, resume: str | None) -> None:
    """Refuse a start by what is installed, and by what `out` and the folder of the weights hold."""
    _check_packages(spec)
    _check_folder(spec, out, resume)
    if resume is None:
        check_weights(spec)
    else:
        check_resumed_weights(spec, out)


def _check_packages(spec: RunSpec) -> None:
    """Raise `UserError` if a package of `train.trackers` is not installed, before there is a folder."""
    if spec.train.trackers:
        from meshwright.report.trackers import check_trackers

        check_trackers(spec.train.trackers)


def _check_folder(spec: RunSpec, out: Path, resume: str | None) -> None:
    """Refuse a start that would replace or ignore what the folder `out` holds, or learn from itself."""
    if resume is None:
        if (out / "run.json").exists():
            raise UserError(
                f"--out: {out} already holds a run; continue it with --resume auto, or give another --out"
            )
        return
    from meshwright.checkpoint.directory import candidates, latest_step
    from meshwright.runs.record import last_checkpoint

    teacher = None if spec.distil is None else spec.distil.teacher
    if teacher is not None and Path(teacher).resolve() == out.resolve():
        raise UserError(
            f"distil.teacher: {out} is the run's own folder, whose weights change; copy the folder, and "
            f"resume the copy"
        )
    checkpoints = spec.checkpoint.folder(out)
    if resume != "auto":
        if not resume.isdecimal():
            raise UserError(f"--resume: {resume!r} is neither 'auto' nor a step")
        candidates(checkpoints, int(resume))
    elif latest_step(checkpoints) is None and (before := last_checkpoint(out)) is not None:
        raise UserError(
            f"--resume: {checkpoints} holds no checkpoint, but {out} has saved one at step {before}; give "
            f"the checkpoint.dir that it had, put them back, or give another --out"
        )


def check_distillation(spec: RunSpec) -> None:
    """Raise `UserError` for a run that distils from a teacher, or from answers, that it cannot learn from."""
    from meshwright.spec.files import user_path
    from meshwright.spec.other_models import teacher_of

    teacher_of(spec)
    if spec.distil is not None and spec.distil.logits is not None:
        from meshwright.distil.stored_answers import check_answers

        check_answers(user_path(spec.distil.logits, "distil.logits"), spec)


def launch(
    verb: str,
    spec: RunSpec,
    ranks: int,
    flags: Sequence[str],
    result: Path,
    restart_flags: Sequence[str] | None = None,
    faults: Plan | None = None,
    tell: Tell | None = None,
) -> Result:
    """Run a verb of the command line as `ranks` processes, and return the JSON that it writes to `result`.

    Ranks that fail are started again with `restart_flags`, if given; the run's folder is that of `result`,
    and its record gets each failure, of which `tell` is told first. `faults` are injected into the ranks.
    """
    from meshwright.launch.supervisor import Restarts, run_ranks

    refuse_several_tasks()
    with scratch_folder() as folder:
        file = folder / "run.json"
        file.write_text(json.dumps({"spec": spec.to_json()}), encoding="utf-8")
        restarts = None
        if restart_flags is not None:
            restarts = Restarts([verb, str(file), *restart_flags], partial(_record, result.parent, tell))
        run_ranks(
            [verb, str(file), *flags],
            ranks,
            preload=preload(verb, spec),
            restarts=restarts,
            recovery=spec.recovery,
            stages=spec.layout.pp,
            faults=faults,
        ).raise_for_failure()
    return dict(json.loads(result.read_text(encoding="utf-8")))


def _record(out: Path, tell: Tell | None, kind: str, fields: dict[str, Any]) -> None:
    """Add a supervisor's event to the record of the run in `out`; stacks of a hang get a file of their own.

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
        append_event(out, kind, fields, alone=kind not in ("slow", "zygote_stopped"))
    except (OSError, UserError) as error:
        warnings.warn(f"{out}: the event '{kind}' was not recorded: {error}", stacklevel=2)
