"""Distillation as a part of a training step: a teacher's answers about each batch's tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NotRequired

from typing_extensions import TypedDict

from meshwright.data.loader import Batch
from meshwright.distil.stored_answers import TeacherState
from meshwright.model.soft_targets import SoftTargetSource
from meshwright.parallel.step_part import StepPart
from meshwright.spec import RunSpec, UserError
from meshwright.spec.differences import as_in_file
from meshwright.spec.distil import DistilSpec


class _Fields(TypedDict):
    """Fields of a checkpoint's state."""

    teacher: NotRequired[TeacherState]


class Distillation(StepPart):
    """A step's lessons from `teaching`, by the keys of `[distil]`."""

    Fields = _Fields

    def __init__(self, how: DistilSpec, teaching: SoftTargetSource) -> None:
        self.how, self.teaching = how, teaching

    def with_answers(self, batch: Batch, own: Batch) -> Batch:
        """`own`, this rank's tokens of a batch, with the teacher's answers about them."""
        return replace(own, soft_targets=self.teaching(batch))

    def state(self) -> dict[str, Any]:
        """Says which teacher it is."""
        return {"teacher": dict(self.teaching.identity)}

    def check(self, state: Mapping[str, Any], where: str) -> None:
        """Refuse a checkpoint that learned from another teacher, or by another loss from this one.

        Distillation may begin and end at any checkpoint. A teacher may be asked or have answered before, on
        any layout.
        """
        before, how = state["spec"].get("distil"), self.how
        if before is None:
            return
        was, now = state["teacher"], self.teaching.identity
        if was["sha256"] != now["sha256"]:
            raise UserError(
                f"{where} learned from a teacher's checkpoint of step {was['step']} (SHA-256 "
                f"{was['sha256'][:12]}), and distil.{'teacher' if how.teacher else 'logits'} is now of step "
                f"{now['step']} ({now['sha256'][:12]}); give that teacher, of which meshwright average "
                f"TEACHER --steps {was['step']} makes a run of its own, or another --out"
            )
        after = how.model_dump(mode="json")
        for key in ("loss", "weight", "temperature", "top_k", "hidden"):
            if before[key] != after[key]:
                raise UserError(
                    f"{where} is of another run: distil.{key} was {as_in_file(before[key])} and is "
                    f"{as_in_file(after[key])}; give the same value, or another --out"
                )

    def flops_per_token(self) -> float:
        """Model FLOPs of an answer about one token; 0 for one that is read."""
        return self.teaching.flops_per_token


def distillation_of(spec: RunSpec, teaching: SoftTargetSource | None) -> list[Distillation]:
    """The part that learns from a teacher, in a list; none in a run without distillation."""
    assert (teaching is None) == (spec.distil is None)
    return [Distillation(spec.distil, teaching)] if spec.distil is not None and teaching is not None else []
