"""Checks before a run starts, without any rank: its folder, memory, packages, weights and teacher."""

from __future__ import annotations

from pathlib import Path

from meshwright.api.initial_weights import check_resumed_weights, check_weights
from meshwright.spec import RunSpec, UserError


def check_start(spec: RunSpec, out: Path, resume: str | None) -> None:
    """Raise the `UserError` of a `train` for which this host has too little memory, or `out` is not right."""
    from meshwright.rank.auto_layout import check_room

    check_other_models(spec)
    check_room(spec)
    check_here(spec, out, resume)


def check_here(spec: RunSpec, out: Path, resume: str | None) -> None:
    """Refuse a start by what is installed, and by what `out` and the folder of the weights hold."""
    check_packages(spec)
    check_folder(spec, out, resume)
    if resume is None:
        check_weights(spec)
    else:
        check_resumed_weights(spec, out)


def check_packages(spec: RunSpec) -> None:
    """Raise `UserError` if a package of `train.trackers` is not installed, before there is a folder."""
    if spec.train.trackers:
        from meshwright.report.trackers import check_trackers

        check_trackers(spec.train.trackers)


def check_folder(spec: RunSpec, out: Path, resume: str | None) -> None:
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


def check_other_models(spec: RunSpec) -> None:
    """Raise `UserError` for a run that distils from a teacher, or from answers, that it cannot learn from."""
    from meshwright.spec.files import user_path
    from meshwright.spec.other_models import teacher_of

    teacher_of(spec)
    if spec.distil is not None and spec.distil.logits is not None:
        from meshwright.distil.stored_answers import check_answers

        check_answers(user_path(spec.distil.logits, "distil.logits"), spec)
