"""Folders of runs: the one that is given, or a new one under runs/."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from itertools import chain, count
from pathlib import Path

from meshwright.rank.env import worker
from meshwright.spec import RunSpec, UserError


def make_folder(out: Path) -> None:
    """Make the folder of `--out`, with those above it, where it is not there. Raises `UserError`."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--out: {out} cannot be made ({error.strerror}); give another --out") from error


@contextmanager
def folder_of(out: Path | None, spec: RunSpec | None = None) -> Iterator[Path]:
    """Yield `out`, or else a new folder, which goes again if nothing has come into it.

    Where a command that fails before a run has begun made `out`, the folder goes, too: a record of a run, or
    a checkpoint, begins one.
    Ranks of a torchrun must agree on a folder, and share no clock: the `spec` of their run names it.
    """
    if out is None and spec is not None and worker() is not None:
        out = Path("runs") / f"{spec.model.preset or spec.model.family}-{spec.digest()[:8]}"
    if out is not None:
        out = Path(out)
        alone = worker() is None and (spec is None or spec.own_step_group is None)  # nobody else writes there
        there = out.exists() or not alone
        try:
            yield out
        except BaseException:
            if not there and not _holds_a_run(out):
                shutil.rmtree(out, ignore_errors=True)
            raise
        return
    folder = default_out()
    try:
        yield folder
    except BaseException:
        if not _holds_a_run(folder):
            shutil.rmtree(folder, ignore_errors=True)
        raise
    finally:
        with suppress(OSError):  # it holds a run
            folder.rmdir()


def _holds_a_run(folder: Path) -> bool:
    """Return True for a folder in which a run, or one of its step groups, has begun, saved or hung."""
    return any(
        next(folder.rglob(name), None) is not None for name in ("run.json", "step-*", "chaos.*", "stacks-*")
    )


def default_out() -> Path:
    """Make a new folder under runs/, named by the time, which no other process has, and return its path."""
    base = Path("runs") / datetime.now().strftime("%Y%m%d-%H%M%S")
    make_folder(base.parent)
    names = chain((base,), (Path(f"{base}-{number}") for number in count(2)))
    while True:
        folder = next(names)
        try:
            folder.mkdir()
        except FileExistsError:
            continue
        except OSError as error:
            raise UserError(f"--out: {folder} cannot be made ({error.strerror}); give an --out") from error
        return folder
