"""Rules on `[distil]` and what goes with it."""

from __future__ import annotations

from meshwright.spec.arithmetic import divisors, nearest
from meshwright.spec.errors import UserError
from meshwright.spec.sections import Sections
from meshwright.spec.verification import VerifyOptions


def one_source_of_answers(spec: Sections) -> None:
    """A run asks a teacher, or reads what one has answered."""
    distil = spec.distil
    if distil is None:
        return
    if (distil.teacher is None) == (distil.logits is None):
        how = "neither is given" if distil.teacher is None else "both are given"
        raise UserError(
            f"distil.teacher: is a teacher's folder, and distil.logits what one has answered, and {how}; "
            f"give one of them"
        )
    if distil.logits is None:
        return
    if distil.top_k is None:
        raise UserError(
            "distil.top_k: 'none' does not go with distil.logits, which holds the likeliest tokens; give the "
            "top_k that the folder was written with"
        )
    for key in ("tp", "pp", "cp", "ep", "zero", "hidden"):
        if getattr(distil, key) != type(distil).model_fields[key].default:
            raise UserError(
                f"distil.{key}: {getattr(distil, key)} needs the teacher itself, and distil.logits holds its "
                f"log-probabilities only; leave it out, or give distil.teacher"
            )


def some_tokens_are_left(spec: Sections) -> None:
    """The likeliest tokens leave some to count as one."""
    distil, vocabulary = spec.distil, spec.model.vocab_size
    if distil is not None and distil.top_k is not None and distil.top_k >= vocabulary:
        raise UserError(
            f"distil.top_k: {distil.top_k} is not below model.vocab_size = {vocabulary}; give fewer, or "
            f"'none' for the whole vocabulary"
        )


def teachers_ranks_divide(spec: Sections) -> None:
    """The teacher is on the run's own ranks, all of them."""
    distil, world = spec.distil, spec.layout.world_size
    if distil is None or distil.teacher is None:
        return
    left = world
    for key in ("tp", "pp", "cp"):
        size = getattr(distil, key)
        if left % size:
            raise UserError(
                f"distil.{key}: {size} does not divide the {left} of the layout's {world} ranks that the "
                f"teacher's other axes leave; try distil.{key} = {nearest(size, divisors(left))}"
            )
        left //= size


def other_model_is_drawn(asked: VerifyOptions) -> None:
    """`verify` draws a teacher for a run that has one, in float64 and in one layout, and answers for none."""
    distil, option = asked.spec.distil, ""
    if distil is None:
        return
    if asked.sweep:
        raise UserError(
            "distil: a sweep is of the student's layouts, and its teacher's is not among them; give --distil "
            "none"
        )
    if asked.through is not None:
        option = f"--through {asked.through}"
    elif asked.precision == "run":
        option = "--precision run"
    if option:
        raise UserError(f"distil: {option} draws no teacher; remove it, or give --distil none")
    if distil.teacher is None:
        raise UserError(
            "distil.logits: holds answers about the run's own samples, and verify draws samples and a "
            "teacher; give --distil.logits none and --distil.teacher FOLDER"
        )


DISTIL_RULES = (one_source_of_answers, some_tokens_are_left, teachers_ranks_divide)
