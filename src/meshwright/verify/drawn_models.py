"""Further models that `meshwright verify` draws: of the kind and layout of the run's, narrowed if large."""

from __future__ import annotations

import torch
from torch import Tensor

from meshwright.comm.mesh import Mesh
from meshwright.distil.teacher import Teacher
from meshwright.model.soft_targets import SoftTargetSource
from meshwright.spec import RunSpec
from meshwright.spec.other_models import on_ranks_of, teacher_of
from meshwright.spec.precision import PrecisionSpec
from meshwright.verify.narrow import narrow
from meshwright.verify.reference.soft_targets import ReferenceTeacher
from meshwright.verify.reference.steps import Loss
from meshwright.verify.reference.weights import initial_weights

INIT_STD = 0.2
"""Standard deviation of a teacher's weights: with the usual one all tokens would be nearly as likely."""


class DrawnModels:
    """The teacher of `spec`, for its narrowed copy `small` in float64; nothing for a run without one.

    Raises `UserError` as `teacher_of` does.
    """

    def __init__(self, spec: RunSpec, small: RunSpec) -> None:
        self._run, self._teacher = small, _drawn_teacher(spec, small)

    def soft_targets(self, mesh: Mesh) -> SoftTargetSource | None:
        """Return the teacher on the ranks of a mesh."""
        if self._teacher is None:
            return None
        teacher = Teacher(self._run, self._teacher, mesh)
        teacher.draw()
        return teacher

    def loss(self, device: torch.device) -> Loss | None:
        """Return the loss of the reference, with the teacher on its one device."""
        if self._teacher is None or self._run.distil is None:
            return None
        return ReferenceTeacher(self._run.distil, self._teacher.model, weights_of(self._teacher, device))


def weights_of(spec: RunSpec, device: torch.device) -> dict[str, Tensor]:
    """Draw the initial weights of a run's model."""
    drawn = initial_weights(spec.model, spec.train.seed, spec.precision.master, spec.lora)
    return {name: tensor.to(device) for name, tensor in drawn.items()}


def _drawn_teacher(spec: RunSpec, small: RunSpec) -> RunSpec | None:
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
