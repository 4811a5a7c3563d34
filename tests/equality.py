"""One layout against one device, on the test ranks: numbers by `meshwright verify`, bytes by the formulas."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any
from unittest.mock import patch

import pytest
import torch

from meshwright.comm.mesh import Mesh
from meshwright.data.loader import Batch
from meshwright.planner.traffic.messages import traffic
from meshwright.spec import RunSpec
from meshwright.spec.parameter_groups import run_parameters
from meshwright.train.step import Trainer
from meshwright.train.step_result import StepResult
from meshwright.train.step_sums import Sums
from meshwright.verify import verify as subject
from meshwright.verify.sweep import KnownReferences
from ranks import Ranks

STEPS = 2  # the second takes up the first's moments
Sent = dict[tuple[str, str], float]
Counted = tuple[dict[str, Any] | None, int, list[Sent]]
"""The result of `verify`, the rank's stage, the bytes that it sent in each step."""
Run = Callable[[Mesh, RunSpec], Counted]
known_reference = KnownReferences(STEPS)


def equal_to_one_device(
    ranks: Ranks, spec: RunSpec, tolerance: float, rules: str = "nccl", run: Run | None = None
) -> Collection[str]:
    """Assert it of STEPS steps, with the bytes that each rank sends; returns the kinds that were compared.

    Bytes are compared where they do not depend on the routing of tokens.
    """
    results = ranks.run(spec.layout, run or verify_and_count, spec, rules=rules)
    found, _, _ = results[0]
    assert found["narrowed"] is None
    assert found["equal"], found["first"]["sentence"]
    assert found["worst_relative"] <= tolerance, found["worst_name"]
    kinds = {row["kind"]: row["compared"] for row in found["rows"]}
    every = [parameter for unit in run_parameters(spec).values() for parameter in unit]
    trained = sum(parameter.trainable for parameter in every)
    for step in range(1, STEPS + 1):
        assert len(parameter_names(spec)) == len(every)
        assert kinds[f"step {step} parameter"] == spec.step_groups * len(every)
        assert kinds[f"step {step} gradient"] == spec.step_groups * trained
        assert kinds.get(f"step {step} frozen", 0) == spec.step_groups * (len(every) - trained)
        assert {f"step {step} loss", f"step {step} grad norm"} <= kinds.keys()
    if spec.model.moe is None:
        exact = subject.exact(spec, STEPS)
        for _, stage, steps in results:
            assert len(steps) == STEPS
            if spec.train.optimiser == "muon":  # ranks of a stage are dealt unequal parts
                steps = _means([other for _, place, other in results if place == stage])
            for number, sent in enumerate(steps, 1):
                assert sent == pytest.approx(traffic(exact.at_step(number), stage), rel=1e-14)
    return kinds.keys()


def _means(ranks: list[list[Sent]]) -> list[Sent]:
    """The bytes of each step, as the mean over ranks."""
    return [
        {
            key: sum(sent.get(key, 0.0) for sent in step) / len(step)
            for key in {key for sent in step for key in sent}
        }
        for step in zip(*ranks, strict=True)
    ]


def parameter_names(spec: RunSpec) -> list[str]:
    """Names of the whole decoder's parameters, adapters included."""
    from meshwright.model.decoder import Decoder
    from meshwright.model.lora import attach_adapters

    with torch.device("meta"):
        return [name for name, _ in attach_adapters(Decoder(spec.model), spec.lora).named_parameters()]


def verify_and_count(mesh: Mesh, spec: RunSpec, known: bool = True) -> Counted:
    """Run `verify`, with the reference of another run of this model and data where that is `known`."""
    sent: list[Sent] = []

    class Counting(Trainer):
        def gradients(self, batch: Batch) -> torch.Tensor:
            self.expect(batch)
            self.mesh.wire.clear()
            return super().gradients(batch)

        def apply(self, sums: Sums, number: int) -> StepResult:
            done = super().apply(sums, number)
            moved = dict(self.mesh.wire.bytes)
            moved.pop(("world", "send"), None)  # gradients, gathered for the comparison
            sent.append(moved)
            return done

    with patch.object(subject, "Trainer", Counting):
        result = subject.verify(spec, mesh, STEPS, known_reference if known else None)
    return result, mesh.pipeline.rank, sent
