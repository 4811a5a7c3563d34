"""A run under faults, compared with its twin without any."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from meshwright.api.folders import folder_of
from meshwright.api.options import Option, folder_name, whole
from meshwright.api.ranks import Result
from meshwright.api.runs import train, train_on_ranks
from meshwright.api.start_checks import check_inputs, check_writable_folder
from meshwright.rank.env import worker
from meshwright.rank.failure import RanksFailed
from meshwright.rank.scratch import PREFIX
from meshwright.runs.record import read_metrics, write_atomically
from meshwright.spec import RunSpec, UserError
from meshwright.spec.errors import Stopped
from meshwright.spec.files import MAX_JSON, parse_json, read_text
from meshwright.spec.rules import ranks_match
from meshwright.units import duration

if TYPE_CHECKING:
    from meshwright.chaos.faults import Fault

LOG = "chaos.jsonl"
DIGESTS = ("parameters_sha256", "samples_sha256")
"""Fields of a run's result that are equal to those of its twin."""
GONE_S = 5.0
"""Processes get so long to end after the run has."""


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def chaos(
    spec: RunSpec,
    *,
    nproc: int | None = None,
    mtbf: Annotated[float, Option(
        "mean time between faults, such as 30s, 5m or 3h; a plain number is seconds", "TIME", duration,
    )] = 30.0,
    faults: Annotated[int, Option("number of faults", "N", whole(1))] = 50,
    seed: Annotated[int, Option("seed of the faults", "N", whole(0))] = 0,
    kinds: Annotated[Sequence[str] | None, Option(
        "kinds of faults, such as kill,stop; default all that leave no trace", "LIST", _names)] = None,
    replay: Annotated[Path | None, Option(
        "inject the faults of a chaos.jsonl again, at the same steps and phases", "FILE", Path)] = None,
    out: Annotated[Path | None, Option(
        "folder of the report and of both runs; default a new one under runs/", "DIR", folder_name)] = None,
) -> Result:  # fmt: skip
    """Train under `faults` faults, on average `mtbf` seconds apart, and compare with a run without any.

    `kinds` are some of `meshwright.chaos.faults.KINDS`, by default all that change no numbers. `replay` is
    the `chaos.jsonl` of an earlier run, whose faults hit again at their steps and phases. `out` gets
    `chaos.json`, `chaos.jsonl`, `chaos.html` and the folders `twin` and `run`, and `twin-skipping` after
    kinds that cost a step. Returns the content of `chaos.json`: `oracles`, `faults`, `kinds`, `effective`,
    `restart_seconds` and more. Raises `UserError`.
    """
    if worker() is not None:
        raise UserError("chaos: starts the ranks itself, and some again; start it without torchrun")
    ranks = spec.layout.world_size if nproc is None else nproc
    ranks_match(spec, ranks)
    _check(spec)
    check_writable_folder(out)
    check_inputs(spec)
    planned, due = _faults(spec, ranks, mtbf, faults, seed, kinds, replay)
    with folder_of(out) as folder:
        return _chaos_in(folder, spec, ranks, planned, due, mtbf, None if replay else seed)


def _chaos_in(
    out: Path,
    spec: RunSpec,
    ranks: int,
    planned: Sequence[Fault],
    due: list[float] | None,
    mtbf: float,
    seed: int | None,
) -> Result:
    """Train in `out` under the planned faults, and compare; see `chaos`. `seed` is None for a replay."""
    from meshwright.chaos.chaos import Chaos
    from meshwright.chaos.faults import KINDS, FaultPlan
    from meshwright.chaos.verdict import ORACLES, report
    from meshwright.rank.processes import adopted_orphans, children
    from meshwright.report.chaos_page import write_chaos_page

    run = out / "run"
    if run.exists():
        if not (out / LOG).exists():
            raise UserError(f"--out: {run} is not a run under faults; give another --out")
        shutil.rmtree(run)
    twin = _twin(spec, ranks, out)
    before, begun = children(), time.monotonic()
    checkpoints, result, end = spec.checkpoint.folder(run), None, ""
    with (
        adopted_orphans(),
        FaultPlan(planned) as plan,
        Chaos(plan, due, out / LOG, run, checkpoints) as injected,
    ):
        try:
            result = train_on_ranks(spec, run, faults=plan, tell=injected.tell)
        except (UserError, RanksFailed) as error:
            end = str(error)
        except KeyboardInterrupt as error:
            written = f"there is no report, but {out / LOG} has the faults until then, for --replay"
            raise _stopped(error, written) from error
        seconds = time.monotonic() - begun
        left = [*_processes_left(before, children), *_files_left(checkpoints)]
        hit = [course.placed for course in injected.courses().values()]
        if result is not None and (bad := [fault for fault in hit if KINDS[fault.kind].skips]):
            twin |= _twin_that_skips(spec, out, bad)
        found = {"nproc": ranks, "seed": seed, "mtbf_seconds": None if seed is None else mtbf}
        found |= report(spec, injected, twin, result, seconds, left) | {"end": end}
    write_atomically(out / "chaos.json", json.dumps(found, indent=1) + "\n")
    write_chaos_page(out / "chaos.html", found, ORACLES)
    return found


def _check(spec: RunSpec) -> None:
    """Refuse a run that cannot be run twice, or that the first fault would end."""
    if spec.recovery.max_restarts == 0:
        raise UserError("recovery.max_restarts: with 0 the first fault ends the run; give 1 or more")
    if spec.checkpoint.dir is not None:
        raise UserError(
            f"checkpoint.dir: the run and its twin without faults would share {spec.checkpoint.dir}; unset it"
        )


def _faults(
    spec: RunSpec,
    ranks: int,
    mtbf: float,
    count: int,
    seed: int,
    kinds: Sequence[str] | None,
    replay: Path | None,
) -> tuple[list[Fault], list[float] | None]:
    """Return the faults, and the seconds at which each is due; None where each has a step and phase."""
    from meshwright.chaos.faults import DEFAULT_KINDS, KINDS, check, read_log, saves_enough, schedule

    last, every = spec.train.last_step, spec.checkpoint.every
    if not isinstance(every, int):  # an interval that the run chooses
        every = 0
    if replay is not None:
        found = read_log(replay, ranks)
        check({fault.kind for fault in found}, every, last)
        return found, None
    if kinds is None:
        kinds = [name for name in DEFAULT_KINDS if saves_enough(every, last) or not KINDS[name].saves]
    if not kinds:
        raise UserError(f"--kinds: names none; give some of {', '.join(KINDS)}")
    check(kinds, every, last)
    timed = schedule(seed, count, mtbf, kinds, ranks, every)
    return [fault for _, fault in timed], [due for due, _ in timed]


def _twin(spec: RunSpec, ranks: int, out: Path) -> Result:
    """Return figures of the run without faults, which is made anew unless `out` has them already."""
    file, folder = out / "twin.json", out / "twin"
    if file.exists():
        kept = _kept(file)
        if kept["spec"] == spec.to_json():
            return kept
        shutil.rmtree(folder, ignore_errors=True)
    elif folder.exists():
        raise UserError(
            f"--out: {folder} is not the finished twin of a run under faults; remove it, or give "
            f"another --out"
        )
    begun = time.monotonic()
    try:
        result = train(spec, nproc=ranks, out=folder, quiet=True, supervise=True)
    except BaseException as error:
        shutil.rmtree(folder, ignore_errors=True)  # what is cut short is no measure
        if isinstance(error, KeyboardInterrupt):
            raise _stopped(error, "the run without faults was not finished, so nothing is kept") from error
        raise
    seconds = time.monotonic() - begun
    steps = [row["seconds"] for row in read_metrics(folder) if "loss" in row]
    kept = {
        "spec": spec.to_json(),
        "wall_seconds": seconds,
        "step_seconds": statistics.median(steps),
        **{key: result[key] for key in (*DIGESTS, "final_loss")},
    }
    write_atomically(file, json.dumps(kept) + "\n")
    return kept


def _twin_that_skips(spec: RunSpec, out: Path, bad: Sequence[Fault]) -> Result:
    """Return the digests of a run that has no faults, and skips the steps of bad batches.

    It does so for a loss that is not a number, though all that it was computed from is as it must be.
    """
    from meshwright.chaos.faults import FaultPlan

    folder = out / "twin-skipping"
    shutil.rmtree(folder, ignore_errors=True)
    by_step = {fault.step: replace(fault, kind="nan-loss", generation=0) for fault in bad}
    with FaultPlan([by_step[step] for step in sorted(by_step)]) as plan:
        for number in range(len(by_step)):
            plan.hits.write(number, armed=1)
        result = train_on_ranks(spec, folder, faults=plan)
    return {key: result[key] for key in DIGESTS}


def _kept(file: Path) -> Result:
    """Return the content of a twin's file. Raises `UserError`."""
    try:
        kept = parse_json(read_text(file, MAX_JSON))
    except ValueError:
        kept = None
    if not isinstance(kept, dict) or "spec" not in kept:
        raise UserError(
            f"--out: {file} is damaged; remove it and {file.with_suffix('')}, or give another --out"
        )
    return kept


def _stopped(error: KeyboardInterrupt, written: str) -> Stopped:
    """Return the end of a command that a signal stopped: none of its runs can be resumed."""
    found = re.match(r"stopped by (SIG\w+)", str(error))
    name = found[1] if found else "SIGINT"
    return Stopped(f"stopped by {name}; {written}", 128 + signal.Signals[name])


def _processes_left(before: set[int], children: Callable[[], set[int]]) -> list[str]:
    """Return the processes that the run has left, after some time in which they may end."""
    until = time.monotonic() + GONE_S
    while (left := children() - before) and time.monotonic() < until:
        time.sleep(0.05)
    return [f"process {pid}" for pid in sorted(left)]


def _files_left(checkpoints: Path) -> list[str]:
    """Return the temporary folders of this process, and the checkpoints that were never published."""
    from meshwright.checkpoint.disk import TEMPORARY

    folders = Path(tempfile.gettempdir()).glob(f"{PREFIX}{os.getpid()}-*")
    return [str(path) for path in (*sorted(folders), *sorted(checkpoints.glob(f"{TEMPORARY}*")))]
