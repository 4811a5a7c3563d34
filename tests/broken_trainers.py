"""Comparisons by `verify` of trainers that a test has changed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

from torch import Tensor

from meshwright.comm.mesh import Mesh
from meshwright.data.loader import Batch
from meshwright.spec import RunSpec
from meshwright.train.step import Trainer
from meshwright.verify import precision, verify
from small import measure_gradients


def verify_broken(mesh: Mesh, spec: RunSpec, harm: Callable[[Trainer], None]) -> dict[str, object] | None:
    """`verify` of a trainer that does `harm` to its gradients after each backward."""

    class Broken(Trainer):
        def gradients(self, batch: Batch) -> Tensor:
            loss = super().gradients(batch)
            harm(self)
            measure_gradients(self.states)
            return loss

    with patch.object(verify, "Trainer", Broken):
        return verify.verify(spec, mesh, 1)


Plant = Callable[[Trainer], None]


def in_own_precision(
    mesh: Mesh, spec: RunSpec, steps: int = 3, plant: Plant | None = None
) -> dict[str, Any] | None:
    """The comparison, of a trainer that `plant` has changed."""

    class Planted(Trainer):
        def __init__(self, spec: RunSpec, mesh: Mesh) -> None:
            super().__init__(spec, mesh)
            if plant is not None:
                plant(self)

    with patch.object(precision, "Trainer", Planted):
        return precision.verify_in_own_precision(spec, mesh, steps)
