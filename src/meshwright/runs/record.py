"""The record of a run in its folder: `run.json`, `metrics.jsonl`, `events.jsonl` and `result.json`.

A line is written by one system call, so a crash leaves whole lines and at most one torn last line, which
readers ignore and the next start removes. Whole files are replaced by a rename. Non-finite numbers are
written as null, since JSON has no NaN.
"""

from __future__ import annotations

import errno
import json
import os
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshwright import __version__, atomic
from meshwright.spec import UserError
from meshwright.spec.files import MAX_JSON, parse_json, read_text, strict_json
from meshwright.version import commit

if TYPE_CHECKING:  # reading a record needs no torch
    from meshwright.checkpoint import Lease

RUN, METRICS, EVENTS, RESULT = "run.json", "metrics.jsonl", "events.jsonl", "result.json"
ROWS_MISSING = "rows_missing"
"""Kind of an event: a run goes on whose record lacks rows of earlier steps."""
MOST_PARTS = 8
"""Parts of missing rows that are named one by one."""

Row = dict[str, Any]


def now() -> str:
    """Return the current time in UTC, as ISO 8601 with milliseconds."""
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _unwritable(path: Path, error: OSError) -> UserError:
    advice = {errno.EISDIR: "give the name of a file in it", errno.ENOENT: "make its folder first"}
    help_ = advice.get(error.errno or 0, "give the folder space and write permission")
    return UserError(f"{path}: cannot be written ({error.strerror}); {help_}")


def write_atomically(path: Path, text: str) -> None:
    """Replace `path` by `text` in one rename; on failure the old file stays and `UserError` is raised."""
    try:
        atomic.write(path, text)
    except OSError as error:
        raise _unwritable(path, error) from error


class _Lines:
    """A JSON-lines file that grows by whole lines."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self.file = open(path, "ab", buffering=0)  # noqa: SIM115 (closed by RunRecord.close)
        except OSError as error:
            raise _unwritable(path, error) from error

    def append(self, row: Row) -> None:
        line = (json.dumps(strict_json(row), allow_nan=False) + "\n").encode()
        start = os.fstat(self.file.fileno()).st_size
        try:
            written = 0
            while written < len(line):  # a full disk accepts a part, then refuses the rest
                written += self.file.write(line[written:])
        except OSError as error:
            os.ftruncate(self.file.fileno(), start)
            raise _unwritable(self.path, error) from error


def _read_lines(path: Path) -> list[Row]:
    """Return the whole lines of a JSON-lines file, without a torn last one; [] for a missing file."""
    if not path.is_file():
        return []
    *lines, _torn = path.read_bytes().split(b"\n")
    rows: list[Row] = []
    for number, line in enumerate(lines, start=1):
        try:
            row = parse_json(line)
        except ValueError:
            row = None
        if not isinstance(row, dict):
            raise UserError(f"{path}: line {number} is not a JSON object; the file is damaged, move it away")
        rows.append(row)
    return rows


def _cut(path: Path, last_step: int | None = None) -> tuple[int, int]:
    """Rewrite a JSON-lines file without a torn last line; with a `last_step` also without rows after it, and
    with each of the others once, the last one that was written, in order of steps.

    Returns how many rows were after `last_step`, and how many others, of steps, were there again or out of
    place.
    """
    if not path.is_file():
        return 0, 0
    rows = kept = _read_lines(path)
    lost = odd = 0
    if last_step is not None:
        if wrong := [row["step"] for row in rows if not isinstance(row.get("step", 0), int)]:
            raise UserError(f"{path}: a row has the step {wrong[0]!r}; the file is damaged, move it away")
        before = [row for row in rows if row.get("step", 0) <= last_step]
        kept = _in_order(before)
        lost, odd = len(rows) - len(before), _misplaced(before)
    write_atomically(path, "".join(json.dumps(row) + "\n" for row in kept))
    return lost, odd


def _place(row: Row) -> tuple[int, bool]:
    """Where a row of metrics stands: by its step, a validation after the step itself."""
    return row.get("step", 0), "val_loss" in row


def _in_order(rows: Sequence[Row]) -> list[Row]:
    """Return rows of metrics in order of steps, each once: the last one of those of a place.

    Rows of no step come first, as they are.
    """
    each = {_place(row): row for row in rows if "step" in row}
    return [row for row in rows if "step" not in row] + [each[place] for place in sorted(each)]


def _misplaced(rows: Sequence[Row]) -> int:
    """Return how many rows of steps do not stand after those of all steps before them."""
    found, last = 0, -1
    for step in (row.get("step", 0) for row in rows if "val_loss" not in row):
        found += step <= last
        last = max(last, step)
    return found


def read_object(path: Path) -> dict[str, Any] | None:
    """Return the JSON object in a file, or None without the file. Raises `UserError` for anything else."""
    if not path.is_file():
        return None
    try:
        value = parse_json(read_text(path, MAX_JSON))
    except ValueError as error:
        raise UserError(f"{path}: is not JSON ({error}); the file is damaged, move it away") from error
    if not isinstance(value, dict):
        raise UserError(f"{path}: holds no JSON object; the file is damaged, move it away")
    return value


def read_metrics(out: Path) -> list[Row]:
    """Return the training and validation rows of the run in folder `out`, in the order written.

    Non-finite values are None. Raises `UserError` for a damaged line other than the last.
    """
    return _read_lines(out / METRICS)


def last_checkpoint(out: Path) -> int | None:
    """Return the step of the last checkpoint in the events of the run in folder `out`, or None."""
    steps = [row.get("step") for row in _read_lines(out / EVENTS) if row.get("kind") == "checkpoint"]
    return int(steps[-1] or 0) if steps else None


def given_up(out: Path) -> set[int]:
    """Return the steps of checkpoints of the run in folder `out` that a later start, or a rollback, undid."""
    kept: set[int] = set()
    gone: set[int] = set()
    for row in _read_lines(out / EVENTS):
        step = row.get("step")
        if type(step) is not int:
            continue
        if row.get("kind") == "checkpoint":
            kept.add(step)
        elif row.get("kind") in ("resumed", "rollback"):
            gone |= {each for each in kept if each > step}
            kept -= gone
    return gone - kept


@dataclass(frozen=True)
class RecordedRun:
    """The record of a run: its spec and set-up, metrics, events, and the result if it ended."""

    out: Path
    info: dict[str, Any]
    metrics: list[Row]
    events: list[Row]
    result: dict[str, Any] | None


def read_run(out: Path) -> RecordedRun:
    """Read the record of the run in folder `out`. Raises `UserError` if it has none."""
    info = read_object(out / RUN)
    if info is None:
        raise UserError(f"{out}: holds no {RUN}, so it is not the folder of a run; give the --out of one")
    return RecordedRun(out, info, read_metrics(out), _read_lines(out / EVENTS), read_object(out / RESULT))


def missing_steps(info: dict[str, Any], rows: Sequence[Row], step: int) -> list[list[int]]:
    """Return the steps of a run up to `step` whose training rows are not among `rows`, in parts that join.

    `info` is the content of run.json: its `starts` say from which step on rows were written, and how often.
    Nothing is known of a start that does not say it.
    """
    starts = [start for start in info.get("starts") or [] if type(start.get("step")) is int]
    due: list[int] = []
    for start, end in zip(starts, [*(start["step"] for start in starts[1:]), step], strict=True):
        while due and due[-1] > start["step"]:  # taken again
            due.pop()
        every, last = start.get("log_every"), start.get("last_step")
        if type(every) is int and every > 0:
            due += [
                each
                for each in range(start["step"] + 1, min(end, step) + 1)
                if each % every == 0 or each == last
            ]
    written = {row.get("step") for row in rows if "val_loss" not in row}
    parts = groupby((each for each in due if each <= step), lambda each: each in written)
    return [list(part) for there, part in parts if not there]


def append_event(out: Path, kind: str, fields: dict[str, Any], *, alone: bool) -> None:
    """Add an event to the record of the run in folder `out`, from outside of its ranks.

    `alone` tells that none of them runs; then a torn last line, which a killed one left, is removed first.
    """
    if (out / EVENTS).is_file():
        if alone:
            _cut(out / EVENTS)
        lines = _Lines(out / EVENTS)
        lines.append({**fields, "time": now(), "kind": kind})
        lines.file.close()


class RunRecord:
    """An observer that writes a run's record into the folder `out`, which it makes.

    A start at step s, or a rollback to it, removes metrics of later steps, which the run wrote and then lost.
    Events are a history and stay. An earlier `result.json` stays until the run takes another step. Raises
    `UserError` if the folder is not writable; lines written before stay intact.

    `lease` is that of the folder, which the caller holds. Once another run has it nothing is written: files
    are replaced or removed under its lock, and lines appended while nobody can have waited for it.
    """

    def __init__(self, out: Path, lease: Lease | None = None) -> None:
        self.out, self.lease = out, lease
        self._lines: dict[str, _Lines] = {}
        self._continued = False
        self._evaluated: Row | None = None

    def on_start(self, info: dict[str, Any]) -> None:
        step = int(info.get("step", 0))
        try:
            self.out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise _unwritable(self.out, error) from error
        with self._fenced(self.out / RUN):
            lost, odd = _cut(self.out / METRICS, step)
            _cut(self.out / EVENTS)
            described = self._write_run(info, step)
        rows = read_metrics(self.out)
        self._evaluated = next((row for row in reversed(rows) if "val_loss" in row), None)
        self._continued = False
        self._lines = {name: _Lines(self.out / name) for name in (METRICS, EVENTS)}
        if step or lost:
            self.on_event("resumed", {"step": step, "lost_rows": lost})
        if odd:
            message = (
                f"{self.out / METRICS}: {odd} row{'s' * (odd != 1)} of earlier steps stood there again or "
                f"out of order; each step is there once now, as it was written last"
            )
            warnings.warn(message, stacklevel=2)
            self.on_event("warning", {"message": message})
        self._tell_missing(missing_steps(described, rows, step), step)

    def _tell_missing(self, parts: Sequence[Sequence[int]], step: int) -> None:
        """Warn of rows that the record lacks up to `step`, from which the run goes on, once of the same."""
        if not parts:
            return
        named = [f"{part[0]}" if len(part) == 1 else f"{part[0]} to {part[-1]}" for part in parts]
        steps = ", ".join(named[:MOST_PARTS]) + ", ..." * (len(named) > MOST_PARTS)
        found = {"rows": sum(map(len, parts)), "steps": steps}
        told = [row for row in _read_lines(self.out / EVENTS) if row.get("kind") == ROWS_MISSING]
        if told and found.items() <= told[-1].items():
            return
        message = (
            f"{self.out / METRICS}: {found['rows']} row{'s' * (found['rows'] != 1)} of steps that the run "
            f"has done are missing (step{'s' * (found['rows'] != 1)} {steps}); it goes on after step {step}, "
            f"and the report has a gap there"
        )
        warnings.warn(message, stacklevel=3)
        self.on_event(ROWS_MISSING, {"step": step, **found, "message": message})

    def _write_run(self, info: dict[str, Any], step: int) -> dict[str, Any]:
        """Write `run.json`, and return its content.

        A resumed run keeps the time of its first start and lists the later ones.
        """
        earlier = (read_object(self.out / RUN) or {}) if step else {}
        before = earlier.get("starts", [])
        if not isinstance(before, list) or not all(isinstance(start, dict) for start in before):
            raise UserError(
                f"{self.out / RUN}: starts has something else than objects; the file is damaged, move it away"
            )
        rows = {"log_every": info.get("spec", {}).get("train", {}).get("log_every", 1)}
        own = {"step": step, "time": now(), **rows, "last_step": info.get("last_step")}
        if info.get("job") is not None:
            own["job"] = info["job"]
        starts = [*before, own]
        described = {
            **{key: value for key, value in info.items() if key not in ("step", "job")},
            "version": __version__,
            "commit": commit(),
            "started": earlier.get("started", starts[-1]["time"]),
            "starts": starts,
        }
        write_atomically(self.out / RUN, json.dumps(strict_json(described), indent=2, allow_nan=False) + "\n")
        return described

    def on_step(self, row: Row) -> None:
        if not self._continued:
            with self._fenced(self.out / RESULT):
                (self.out / RESULT).unlink(missing_ok=True)  # the result of a part that now continues
            self._continued = True
        self._append(METRICS, row)

    def on_eval(self, row: Row) -> None:
        if strict_json(row) != self._evaluated:  # a finished run that is started again repeats its evaluation
            self._append(METRICS, row)

    def on_event(self, kind: str, fields: dict[str, Any]) -> None:
        if kind == "rollback":  # the run takes the steps after this one again
            self._lines[METRICS].file.close()
            with self._fenced(self.out / METRICS):
                _cut(self.out / METRICS, fields["step"])
            self._lines[METRICS] = _Lines(self.out / METRICS)
        self._append(EVENTS, {**fields, "time": now(), "kind": kind})

    def on_end(self, result: dict[str, Any]) -> None:
        with self._fenced(self.out / RESULT):
            text = json.dumps(strict_json(result), indent=2, allow_nan=False) + "\n"
            write_atomically(self.out / RESULT, text)
        self.close()

    def _append(self, name: str, row: Row) -> None:
        if self.lease is not None:
            self.lease.recheck()
        self._lines[name].append(row)

    @contextmanager
    def _fenced(self, path: Path) -> Iterator[None]:
        """Hold the lease's lock, if there is a lease, while `path` is replaced or removed."""
        try:
            with nullcontext() if self.lease is None else self.lease.fenced():
                yield
        except OSError as error:
            raise _unwritable(path, error) from error

    def close(self) -> None:
        """Close the files; may be called twice."""
        for lines in self._lines.values():
            lines.file.close()
        self._lines = {}
