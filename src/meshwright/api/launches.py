"""Runs as jobs of a scheduler: submit one, see how far it is, follow it, and stop it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime
from itertools import product
from pathlib import Path
from typing import Annotated, Any, Unpack

from pydantic import ValidationError

from meshwright import atomic
from meshwright.api.folders import make_folder
from meshwright.api.launch_options import LaunchOptions
from meshwright.api.options import Option, choice, completed
from meshwright.api.ranks import Result
from meshwright.spec import RunSpec, UserError
from meshwright.spec.files import MAX_TOML, read_text
from meshwright.spec.load import Overrides, from_tree, read_tree
from meshwright.spec.toml import to_toml
from meshwright.submit.follow import Show
from meshwright.submit.follow import follow as follow_job
from meshwright.submit.job import ClusterJob, name_of
from meshwright.submit.program import lines_of
from meshwright.submit.progress import progress, told_state
from meshwright.submit.scheduler import ENDED, as_words
from meshwright.submit.schedulers import SCHEDULERS
from meshwright.submit.sizing import size_of, spec_for
from meshwright.submit.submission import read_submission, submission_of, write_submission

MOST_RUNS = 1000
"""Most runs of a sweep: the largest array that Slurm takes as it comes."""


def launch(
    run: Path | None,
    *,
    on: Annotated[str, Option(", ".join(SCHEDULERS), "NAME", choice(*SCHEDULERS))],
    overrides: Overrides = (),
    **options: Unpack[LaunchOptions],
) -> Result:
    """Submit a run as a job of the scheduler `on`, or with `dry_run` only say how.

    `run` is a run file, the folder of a run, or None for `overrides` alone. Returns `file`, what is
    submitted, `commands`, which submit it, `folder`, where its record is, `runs`, the folders of its runs,
    `told`, sentences on its size, and `ids`, the scheduler's names of what it has become. Raises `UserError`.
    """
    given = completed(LaunchOptions, options)
    scheduler, tree = SCHEDULERS[on], {} if run is None else read_tree(run)
    spec, why = spec_for(tree, overrides, str(run or ""), given["cluster"], given["gpus"])
    written = why is not None or run is None  # no file says all of it yet
    job, told = _job(on, run, spec, written, overrides, given)
    if job.members and not scheduler.sweeps:
        raise UserError(f"--sweep: {on} has no jobs of several runs; launch a run for each value")
    scheduler.check(job)
    folder = Path(job.out) if scheduler.here else Path("runs").absolute() / job.name
    file, content = folder / scheduler.file, scheduler.render(job)
    result = {
        "scheduler": on, "file": content, "commands": scheduler.commands(job, file), "folder": str(folder),
        "runs": job.folders(), "told": [*([] if why is None else [why]), *told],
    }  # fmt: skip
    _refuse_another(folder)
    if given["dry_run"]:
        return {**result, "ids": []}
    files = {file: content} | ({Path(job.run): to_toml(spec)} if scheduler.here and written else {})
    with _written(folder, files):
        ids = scheduler.submit(job, file)
    write_submission(folder, on, ids, job)
    return {**result, "ids": ids}


@contextmanager
def _written(folder: Path, files: Mapping[Path, str]) -> Iterator[None]:
    """Block that submits files of a folder, which are written for it and where it fails are as before."""
    there, before = folder.exists(), {file: file.read_bytes() for file in files if file.is_file()}
    make_folder(folder)
    try:
        for file, content in files.items():
            atomic.write(file, content)
        yield
    except BaseException as error:
        with suppress(OSError):  # the error says more than what is left
            for file in files:
                if (content_before := before.get(file)) is None:
                    file.unlink(missing_ok=True)
                else:
                    atomic.write(file, content_before)
            if not there:
                folder.rmdir()
        if isinstance(error, OSError):
            raise UserError(
                f"--out: {folder} cannot be written ({error.strerror}); give another --out"
            ) from error
        raise


def _job(
    on: str, run: Path | None, spec: RunSpec, written: bool, overrides: Overrides, given: LaunchOptions
) -> tuple[ClusterJob, list[str]]:
    """The job of a run, and sentences on its size; with `written` its run file is made of the spec."""
    if given["at_once"] is not None and not given["sweep"]:
        raise UserError(
            f"--at-once: {given['at_once']} is of a sweep's runs; add --sweep KEY=A,B, or leave it out"
        )
    here, timed = SCHEDULERS[on].here, given["time"] is None and on == "slurm"
    size = size_of(spec, given["nodes"], given["gpus_per_node"], given["cluster"], given["cpu"], timed)
    name = given["name"] or ("train" if run is None else name_of(run))
    mounts = tuple(given["volume"] or ())
    out = _out(here, run, given["out"], name, mounts)
    text = None
    if here:
        path = str(Path(out) / "run.toml") if written or run is None else str(run.absolute())
    else:
        path, text = SCHEDULERS[on].run_file, to_toml(spec) if written or run is None else _text_of(run)
    fields: dict[str, Any] = {
        "name": name, "run": path, "run_text": text, "out": out,
        "flags": () if written else as_words(overrides),
        "nodes": size.nodes, "least_nodes": size.least, "ranks": size.ranks, "gpus": size.gpus,
        "cpus": given["cpus_per_rank"], "seconds": given["time"] or size.seconds,
        "environment": tuple(given["env"] or ()), "mounts": mounts, "options": tuple(given["option"] or ()),
        "members": _members(spec, given["sweep"] or ()), "folder": str(Path.cwd()),
        "hosts": given["hosts"] or (), "doctor": not given["no_doctor"],
    }  # fmt: skip
    same = ("restarts", "image", "at_once", "ranks_by", "kind", "namespace", "service_account", "accelerator")
    fields |= {key: given[key] for key in (*same, "address")}  # type: ignore[literal-required]
    try:
        return ClusterJob(**fields), [f"size: {size.in_words(spec)}", *size.told]
    except ValidationError as error:
        first = error.errors()[0]
        flag = _FLAGS.get(str(first["loc"][0]), str(first["loc"][0]))
        reason = first["msg"].removeprefix("Value error, ")
        raise UserError(f"--{flag}: {first['input']!r} is not valid: {reason}") from None


_FLAGS = {"mounts": "volume", "environment": "env", "options": "option", "members": "sweep"}
"""Flags by the fields of a job that have other names."""


def _out(here: bool, run: Path | None, out: Path | None, name: str, mounts: Sequence[tuple[str, str]]) -> str:
    """The run's folder, as its nodes see it."""
    if here and out is None:
        continued = run is not None and run.is_dir()
        new = Path("runs") / f"{name}-{datetime.now():%Y%m%d-%H%M%S}"
        return str((run if continued and run is not None else new).absolute())
    if out is None and not mounts:
        raise UserError("--volume: is missing; give a volume that all nodes see, as NAME:PATH")
    chosen = Path(mounts[0][1]) / name if out is None else out
    if not here and not chosen.is_absolute():
        raise UserError(f"--out: {chosen} is not an absolute path; give it as the nodes see it")
    return str(chosen.absolute())


def _text_of(run: Path) -> str:
    """The text of a run file, which nodes get that do not see it. Raises `UserError` for a run's folder."""
    if run.is_dir():
        raise UserError(
            f"RUN: {run} is a folder, which the nodes do not see; give its run file, with the same --out"
        )
    try:
        return read_text(run, MAX_TOML)
    except (OSError, ValueError) as error:
        raise UserError(f"RUN: {run} cannot be read ({error}); give a run file") from None


def _members(spec: RunSpec, sweep: Sequence[tuple[str, tuple[str, ...]]]) -> tuple[tuple[str, ...], ...]:
    """The flags of each run of a sweep, which must be runs of one size. Raises `UserError`."""
    if not sweep:
        return ()
    keys = [key for key, _ in sweep]
    if len({*keys}) < len(keys):
        raise UserError("--sweep: a key is given twice; give all its values at once, as KEY=A,B")
    chosen = [list(zip(keys, values, strict=True)) for values in product(*(values for _, values in sweep))]
    if len(chosen) > MOST_RUNS:
        raise UserError(f"--sweep: {len(chosen):,} runs are more than {MOST_RUNS:,}; give fewer values")
    for overrides in chosen:
        if from_tree(spec.to_json(), overrides).world_size != spec.world_size:
            raise UserError(
                f"--sweep: {', '.join(f'{key}={text}' for key, text in overrides)} changes the number of "
                f"ranks, and all runs of a job have as many; launch such runs one by one"
            )
    return tuple(map(as_words, chosen))


def _refuse_another(folder: Path) -> None:
    """Raise `UserError` where a job of the run in a folder has not ended."""
    if (before := read_submission(folder)) is None:
        return
    states = SCHEDULERS[before.scheduler].states(before)
    if not all(state in ENDED for state in states):
        raise UserError(
            f"--out: {folder} has the job {', '.join(before.ids)} of {before.scheduler} already, which is "
            f"{next(state for state in states if state not in ENDED)}; end it with meshwright stop "
            f"{folder}, or give another --out"
        )


def status(out: Path) -> Result:
    """The state of the runs in a folder, without torch.

    Returns `scheduler`, `ids` and `submitted` of the newest submission, None where there is none, and `runs`,
    each with `state`, the scheduler's, `waits_for`, why it is pending, None where that is not known, `out`,
    `status`, `reason`, `step`, `last_step`, `loss` and `starts`. Raises `UserError` for a folder with neither
    a job nor a run.
    """
    submission = read_submission(out)
    if submission is None:
        found = progress(out)
        if found["status"] is None:
            submission_of(out)
        runs = [{"state": None, "waits_for": None, **found}]
        return {"scheduler": None, "ids": [], "submitted": None, "runs": runs}
    scheduler = SCHEDULERS[submission.scheduler]
    states, folders = scheduler.states(submission), submission.job.folders()
    waits = scheduler.waits_for(submission) if "pending" in states else [None] * len(states)
    runs = [
        {"state": told_state(state, found["status"]), "waits_for": why, **found}
        for state, why, found in zip(states, waits, (progress(Path(each)) for each in folders), strict=True)
    ]
    told = {"scheduler": submission.scheduler, "ids": list(submission.ids), "submitted": submission.submitted}
    return {**told, "runs": runs}


def follow(out: Path, show: Show) -> list[str]:
    """Show the log and states of the job in a folder until it has ended; return how each run has ended."""
    return follow_job(submission_of(out), show)


def logs(out: Path, *, member: int = 0, lines: int | None = None) -> Iterator[str]:
    """Yield the lines of the log of a job's run, by default all of them. Raises `UserError`."""
    submission = submission_of(out)
    if not 0 <= member < len(submission.job.folders()):
        raise UserError(
            f"--run: {member} is not a run of this job; the last is {len(submission.job.folders()) - 1}"
        )
    log = SCHEDULERS[submission.scheduler].log(submission, member)
    found = lines_of(log)
    yield from found if lines is None else found[-lines:]


def stop(out: Path) -> Result:
    """Let the runs of the job in a folder save and end; return their states before that, as `states`."""
    submission = submission_of(out)
    scheduler = SCHEDULERS[submission.scheduler]
    states = scheduler.states(submission)
    if not all(state in ENDED for state in states):
        scheduler.stop(submission)
    return {"scheduler": submission.scheduler, "ids": list(submission.ids), "states": states}
