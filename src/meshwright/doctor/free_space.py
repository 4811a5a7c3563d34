"""Room for the checkpoints that a run keeps."""

from __future__ import annotations

import os
from pathlib import Path

from meshwright.checkpoint.disk import parse_step_name
from meshwright.doctor.finding import Finding
from meshwright.planner.memory.states import checkpoint_bytes
from meshwright.spec import RunSpec
from meshwright.units import counted, gigabytes

FILES_OF_A_SAVE = 8
"""Files of a checkpoint beside one for each rank: its manifest and parts of it, LATEST, and folders."""


def free_space(spec: RunSpec, there: Path, folder: Path) -> list[Finding]:
    """A lack of room in `there`, in which the `folder` of checkpoints is or will be, for all that are kept.

    What checkpoints in the folder take is counted as free, since newer ones take their places.
    """
    status, kept = os.statvfs(there), kept_at_once(spec)
    needed = kept * checkpoint_bytes(spec)
    free = status.f_bavail * status.f_frsize + stored(folder)
    lower = f"lower checkpoint.keep ({spec.checkpoint.keep})"
    remedy = f"free space there, set checkpoint.dir to another folder, or {lower}"
    if free < needed:
        many = counted(kept, "checkpoints")
        each = gigabytes(checkpoint_bytes(spec))
        return [
            Finding(
                "space",
                True,
                f"{there} has {gigabytes(free)} for checkpoints, and the run keeps {many} of {each} at once",
                remedy,
            )
        ]
    names = kept * (spec.layout.world_size + FILES_OF_A_SAVE)
    if status.f_files and status.f_favail < names:  # some file systems count none
        return [
            Finding(
                "space",
                True,
                f"{there} has room for {status.f_favail:,} more files, and {counted(kept, 'checkpoints')} of "
                f"{counted(spec.layout.world_size, 'ranks')} are {names:,}",
                remedy,
            )
        ]
    return []


def kept_at_once(spec: RunSpec) -> int:
    """Checkpoints that are on the disk at once, at most, the one that is being written among them.

    How many steps epochs are is not known here: of those that are kept for ever none is counted then.
    """
    checkpoint, every = spec.checkpoint, spec.checkpoint.every
    counted_steps = None if spec.train.epochs is not None else spec.train.total_steps
    newest = checkpoint.keep + 1
    if every == 0:
        newest = 1
    elif every != "auto" and counted_steps is not None:
        newest = min(newest, -(-counted_steps // every))
    for_ever = counted_steps // checkpoint.keep_every if checkpoint.keep_every and counted_steps else 0
    return newest + for_ever


def stored(folder: Path) -> int:
    """Bytes of the checkpoints in a folder."""
    steps = [each for each in folder.glob("step-*") if parse_step_name(each.name) is not None]
    return sum(file.stat().st_size for step in steps for file in step.glob("*"))
