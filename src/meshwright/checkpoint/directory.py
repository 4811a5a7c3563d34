"""Published steps of a checkpoint directory, and the one that LATEST names, read from file names alone."""

from __future__ import annotations

import os
from pathlib import Path

from meshwright.checkpoint.disk import LATEST, open_regular, parse_step_name, step_name
from meshwright.checkpoint.errors import CheckpointError


def published(directory: Path) -> dict[int, Path]:
    """{step: directory} of every published checkpoint, rising; of a step saved twice, the later one.

    A directory that does not exist holds none. Raises CheckpointError when it can't be read.
    """
    attempts: dict[int, int] = {}
    for name in _names(directory):
        parsed = parse_step_name(name)
        if parsed is not None:
            attempts[parsed[0]] = max(parsed[1], attempts.get(parsed[0], 0))
    return {step: directory / step_name(step, attempts[step]) for step in sorted(attempts)}


def superseded(directory: Path) -> list[Path]:
    """Earlier attempts at a step that was saved again."""
    current = published(directory)
    paths = [(directory / name, parse_step_name(name)) for name in sorted(_names(directory))]
    return [path for path, parsed in paths if parsed is not None and current[parsed[0]] != path]


def read_latest(directory: Path) -> Path | None:
    """The checkpoint that LATEST names (it may be missing); None without one or when it makes no sense."""
    try:
        with open_regular(directory / LATEST) as descriptor:
            name = os.read(descriptor, 256).decode("ascii", "replace")
    except FileNotFoundError:
        return None
    except OSError as error:
        raise CheckpointError(f"{directory / LATEST} cannot be read: {error}") from error
    return directory / name.strip() if parse_step_name(name.strip()) else None


def history(directory: Path) -> list[Path]:
    """Checkpoints to try or to keep, best first: what LATEST names, the steps before it, then later ones.

    Steps after LATEST belong to a future that was abandoned: somebody went back and trained on from an
    earlier step.
    """
    steps, latest = published(directory), read_latest(directory)
    parsed = parse_step_name(latest.name) if latest is not None else None
    if latest is None or parsed is None:
        return list(reversed(steps.values()))
    before = [path for step, path in reversed(steps.items()) if step <= parsed[0] and path != latest]
    after = [path for step, path in reversed(steps.items()) if step > parsed[0]]
    return [latest, *before, *after]


def latest_step(directory: Path) -> int | None:
    """The step to resume from; None only where nothing was ever published.

    Raises CheckpointError when LATEST makes no sense and no checkpoint is there: a run must not start from
    scratch in silence where there was something.
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
    """Checkpoints that may serve a request for ``step``: that one, or with None the whole `history`.

    Raises CheckpointError where there is none.
    """
    if step is None:
        order = history(directory)
        if not order:
            raise CheckpointError(f"{directory} holds no checkpoint")
        return order
    steps = published(directory)
    if step not in steps:
        there = ", ".join(str(known) for known in steps) or "none"
        raise CheckpointError(f"{directory} has no checkpoint of step {step}; it has {there}")
    return [steps[step]]


def _names(directory: Path) -> list[str]:
    try:
        return os.listdir(directory)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise CheckpointError(f"checkpoint directory {directory} cannot be read: {error}") from error
