"""Published steps of a checkpoint directory, and the one that LATEST names, read from file names alone.

LATEST is one line: the name of a step's directory, and the start of the SHA-256 of that name. Earlier
versions wrote the name alone.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from pathlib import Path

from meshwright.checkpoint.disk import LATEST, Disk, parse_step_name, step_name
from meshwright.checkpoint.errors import CheckpointError, reading, retried


def published(directory: Path) -> dict[int, Path]:
    """Return {step: directory} of every published checkpoint by step; of a step saved twice, the later one.

    A directory that does not exist holds none. Raises CheckpointError when it cannot be read.
    """
    return {step: directory / step_name(step, attempt) for step, attempt in _attempts(directory)}


def step_of(name: str) -> int:
    """Return the step of a published directory's name."""
    parsed = parse_step_name(name)
    assert parsed is not None
    return parsed[0]


def next_name(directory: Path, step: int) -> Path:
    """Return where a checkpoint of a step is published: beside an earlier one of it, if there is any."""
    existing = published(directory).get(step)
    parsed = parse_step_name(existing.name) if existing is not None else None
    return directory / step_name(step, parsed[1] + 1 if parsed else 0)


def superseded(directory: Path) -> list[Path]:
    """Return the directories of earlier attempts at a step that was saved again."""
    current = published(directory)
    paths = [(step, directory / step_name(step, attempt)) for step, attempt in _attempts(directory)]
    return [path for step, path in paths if current[step] != path]


def latest_line(name: str) -> str:
    """Return the content of LATEST that names the checkpoint in directory `name`."""
    return f"{name} {hashlib.sha256(name.encode()).hexdigest()[:16]}\n"


def read_latest(directory: Path) -> Path | None:
    """Return the checkpoint that LATEST names, which may be missing; None without the file, or if damaged."""
    name = name_of_line(_read_line(directory / LATEST))
    return None if name is None else directory / name


def name_of_line(line: str | None) -> str | None:
    """Return the name of the checkpoint in a content of LATEST; None without one, or where it is damaged."""
    name = (line or "").partition(" ")[0].strip()
    if line is None or parse_step_name(name) is None or line not in (name, f"{name}\n", latest_line(name)):
        return None
    return name


def latest_is_damaged(directory: Path) -> bool:
    """True if LATEST is there and holds nothing that this program or an earlier version would write."""
    return _read_line(directory / LATEST) is not None and read_latest(directory) is None


def _read_line(path: Path) -> str | None:
    def line() -> str | None:
        with reading(path):
            try:
                with Disk().opened(path) as (descriptor, _):
                    return os.read(descriptor, 256).decode("ascii", "replace")
            except FileNotFoundError:
                return None

    return retried(line)


def history(directory: Path) -> list[Path]:
    """Return the checkpoints to try or to keep, best first (`ordered`)."""
    latest = read_latest(directory)
    names = [step_name(*attempt) for attempt in _attempts(directory)]
    return [directory / name for name in ordered(names, None if latest is None else latest.name)]


def ordered(names: Iterable[str], latest: str | None) -> list[str]:
    """Return names of checkpoints, best first: LATEST's, the steps before it, then later ones.

    Steps after LATEST were abandoned: the run went back and continued from an earlier step. Of a step that
    was saved twice the later one counts, and names of other things are left out.
    """
    attempts = sorted(parsed for name in names if (parsed := parse_step_name(name)) is not None)
    steps = {step: step_name(step, attempt) for step, attempt in attempts}
    parsed = None if latest is None else parse_step_name(latest)
    if latest is None or parsed is None:
        return list(reversed(steps.values()))
    before = [name for step, name in reversed(steps.items()) if step <= parsed[0] and name != latest]
    after = [name for step, name in reversed(steps.items()) if step > parsed[0]]
    return [latest, *before, *after]


def latest_step(directory: Path) -> int | None:
    """Return the step to resume from; None only where nothing was ever published.

    Raises CheckpointError when LATEST names no checkpoint and none is there: a run must not silently start
    from scratch where there was something.
    """
    order = history(directory)
    if order:
        parsed = parse_step_name(order[0].name)
        return parsed[0] if parsed else None
    if os.path.lexists(directory / LATEST):
        raise CheckpointError(
            f"{directory / LATEST} names no checkpoint and {directory} holds none; "
            "remove the file to start from scratch"
        )
    return None


def candidates(directory: Path, step: int | None) -> list[Path]:
    """Return the checkpoints that may serve a request for `step`: that one, or for None the whole `history`.

    Raises CheckpointError where there is none.
    """
    if step is None:
        order = history(directory)
        if not order:
            raise CheckpointError(f"{directory} holds no checkpoint")
        return order
    steps = published(directory)
    if step not in steps:
        known = ", ".join(map(str, steps)) or "none"
        raise CheckpointError(f"{directory} has no checkpoint of step {step}; it has {known}")
    return [steps[step]]


def _attempts(directory: Path) -> list[tuple[int, int]]:
    """Return (step, attempt) of each published directory, in this order."""

    def names() -> list[str]:
        with reading(directory):
            try:
                return os.listdir(directory)
            except FileNotFoundError:
                return []
            except (NotADirectoryError, PermissionError) as error:
                reason = f"checkpoint directory {directory} cannot be read: {error.strerror}"
                raise CheckpointError(reason) from error

    return sorted(parsed for name in retried(names) if (parsed := parse_step_name(name)) is not None)
