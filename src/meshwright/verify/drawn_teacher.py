"""The teacher that `meshwright verify` draws: of the kind and layout of the run's, narrowed if large."""

from __future__ import annotations

from meshwright.spec import RunSpec
from meshwright.spec.precision import PrecisionSpec
from meshwright.spec.teacher import on_ranks_of, teacher_of
from meshwright.verify.narrow import narrow

INIT_STD = 0.2
"""Standard deviation of its weights: with the usual one all tokens would be nearly as likely."""


def drawn_teacher(spec: RunSpec, small: RunSpec) -> RunSpec | None:
    """Return the teacher of `spec`, for its narrowed copy `small` in float64; None for a run without one.

    Raises `UserError` as `teacher_of` does.
    """
    teacher, distil = teacher_of(spec), small.distil
    if teacher is None or distil is None:
        return None
    model = narrow(teacher)[0].model
    changed: dict[str, object] = {"vocab_size": small.model.vocab_size, "init_std": INIT_STD}
    if distil.hidden:
        changed["hidden"] = small.model.hidden
    exact = PrecisionSpec(compute="fp64")
    drawn = on_ranks_of(small, model.model_copy(update=changed), exact)
    return drawn.model_copy(update={"train": drawn.train.model_copy(update={"seed": small.train.seed + 1})})
