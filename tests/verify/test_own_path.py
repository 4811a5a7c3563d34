"""Comparisons of what fp32 and bf16 runs take: updates, skips, validation, experts."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from covering import marked
from meshwright.comm.mesh import Mesh
from meshwright.kernels import cpu_kernels, elementwise_cpu
from meshwright.model.router import Router
from meshwright.optim import lr_schedule
from meshwright.optim.clipping import Clipping
from meshwright.optim.optimiser import AdamW
from meshwright.parallel.pipeline_parallel import Pipeline
from meshwright.parallel.precision import LossScale
from meshwright.spec import MoeSpec, RunSpec
from meshwright.spec.load import from_tree
from meshwright.verify import learning_rates, routing
from meshwright.verify.both import with_own_precision
from meshwright.verify.precision import verify_in_own_precision
from meshwright.verify.verify import verify
from ranks import Ranks
from small import spec_of

SMALL = {
    "model.vocab_size": 61, "model.layers": 2, "data.seq_len": 32, "train.batch_tokens": 8 * 32,
    "train.clip": 0.3, "layout.dp": 2, "layout.micro_batch": 2,
}  # fmt: skip
Plant = Callable[[], AbstractContextManager[object]]


def both(mesh: Mesh, spec: RunSpec, plant: Plant) -> dict[str, Any] | None:
    with plant():
        found = verify(spec, mesh, 2)
        return with_own_precision(found, spec, mesh)


CASES: list[dict[str, object]] = [
    {},
    {"precision__compute": "bf16", "layout__zero": 3, "train__ema": 0.9},
    {"precision__compute": "fp16", "layout__tp": 2, "layout__dp": 1},
    {"train__optimiser": "muon", "layout__pp": 2, "layout__dp": 1},
    {"layout__dp": 2, "outer__staleness": 1},
    {"layout__dp": 1, "layout__replicate": 2, "outer__every": 2},
]


@pytest.mark.parametrize("case", marked(CASES, [*CASES[:2], CASES[-1]]), ids=str)
def test_both_parts_of_a_right_layout_are_equal(ranks: Ranks, case: dict[str, object]) -> None:
    spec = spec_of(SMALL, **case)
    found = ranks.run(spec.layout, both, spec, nullcontext)[0]
    assert found["equal"], found["first"]["sentence"]
    kinds = {row["kind"] for row in found["rows"]}
    assert {"step 0 learning rate", "step 2 validation loss"} <= kinds
    own = {row["kind"] for row in found["own"]["rows"]}
    assert {"step 2 loss", "step 2 validation loss", "step 3 skipped step"} <= own
    assert "step 1 loss" not in own  # one step is compared with its rounding
    assert found["own"]["precision"] == spec.precision.compute


def no_clipping() -> AbstractContextManager[object]:
    def divisor(_clipping: Clipping, squares: Tensor, gradient_factor: float) -> Tensor:
        return torch.full_like(squares, 1 / gradient_factor)

    return patch.object(Clipping, "divisor", divisor)


def update_that_one_rank_skips() -> AbstractContextManager[object]:
    step = AdamW.step_divided

    def lost(optimiser: AdamW, *given: Any) -> None:
        if optimiser.states.mesh.world.rank == 0 or optimiser.updates == 0:
            step(optimiser, *given)

    return patch.object(AdamW, "step_divided", lost)


def steps_that_are_never_skipped() -> AbstractContextManager[object]:
    step = AdamW.step_divided

    def taken(
        optimiser: AdamW, rate: float, divisor: Tensor | None = None, skipped: Tensor | None = None
    ) -> None:
        step(optimiser, rate, divisor, None if skipped is None else torch.zeros_like(skipped))

    return patch.object(AdamW, "step_divided", taken)


def validation_one_percent_off() -> AbstractContextManager[object]:
    forward = Pipeline.forward
    return patch.object(Pipeline, "forward", lambda *given: [1.01 * loss for loss in forward(*given)])


def scale_that_grows_late() -> AbstractContextManager[object]:
    make = LossScale.__init__

    def late(scale: LossScale, precision: Any) -> None:
        make(scale, precision)
        scale.window += 1

    return patch.object(LossScale, "__init__", late)


def rates_without_a_floor() -> AbstractContextManager[object]:
    whole = lr_schedule.learning_rate
    without = lambda train, step: whole(train.model_copy(update={"min_lr_ratio": 0.0}), step)  # noqa: E731
    return patch.object(learning_rates, "learning_rate", without)


def half_of_a_kernels_gradient() -> AbstractContextManager[object]:
    backward = elementwise_cpu.rms_norm_backward

    def halved(*given: Tensor) -> tuple[Tensor, Tensor]:
        of_x, of_weight = backward(*given)
        return of_x, of_weight / 2

    return patch.object(elementwise_cpu, "rms_norm_backward", halved)


PLANTED: dict[str, tuple[Plant, str, dict[str, object]]] = {
    "no clipping": (no_clipping, "clipping", {}),
    "one rank's update": (update_that_one_rank_skips, "replicas", {}),
    "no skips": (steps_that_are_never_skipped, "skipped step", {}),
    "validation": (validation_one_percent_off, "validation loss", {}),
    "scale": (scale_that_grows_late, "loss scale", {"precision__compute": "fp16"}),
    "rates": (rates_without_a_floor, "learning rate", {}),
    "a kernel": (half_of_a_kernels_gradient, "gradient slope", {}),
}


@pytest.mark.parametrize("case", PLANTED)
def test_what_every_run_takes_is_compared(ranks: Ranks, case: str) -> None:
    plant, kind, flags = PLANTED[case]
    if case == "a kernel" and cpu_kernels.library() is None:
        pytest.skip("kernels need an x86 processor and a compiler")
    spec = spec_of(SMALL, **flags)
    found = ranks.run(spec.layout, both, spec, plant)[0]
    assert not found["equal"]
    assert found["first"]["kind"] == kind, found["first"]["sentence"]


# Experts ---------------------------------------------------------------------------------------------


def own(mesh: Mesh, spec: RunSpec, plant: Plant) -> dict[str, Any] | None:
    with plant():
        return verify_in_own_precision(spec, mesh, 2)


def choices_that_lean() -> AbstractContextManager[object]:
    choose = Router._choose
    return patch.object(
        Router, "_choose", lambda router, scores: choose(router, scores + 0.05 * scores.roll(1, 1))
    )


def test_a_token_near_a_tie_is_no_mistake_and_a_choice_that_leans_is_one(ranks: Ranks) -> None:
    keys = {"model": {"preset": "moe-tiny"}, "precision": {"compute": "bf16"}}
    spec = from_tree({**keys, "layout": {"dp": 2, "micro_batch": 1}}, [])
    found = ranks.run(spec.layout, own, spec, nullcontext)[0]
    assert found["equal"], found["first"]["sentence"]
    assert any(row["kind"] == "step 2 routing" and row["worst"] > 0 for row in found["rows"])
    leaning = ranks.run(spec.layout, own, spec, choices_that_lean)[0]
    assert "routing" in {each["kind"] for each in leaning["differences"]}


def test_choices_are_held_to_groups_and_scores() -> None:
    moe = MoeSpec(experts=6, top_k=2, groups=3, top_groups=2, ffn=8)
    values = torch.tensor([[[0.9, 0.1, 0.6, 0.5, 0.2, 0.8]]])  # sums of groups: 1.0, 1.1, 1.0
    beyond = routing._beyond
    assert beyond(moe, values, torch.tensor([[[2, 5]]]), 0.01) == 0.0  # the first and the third are tied
    assert beyond(moe, values, torch.tensor([[[2, 0]]]), 0.01) == 0.0
    assert math.isclose(beyond(moe, values, torch.tensor([[[3, 5]]]), 0.01), 0.1, rel_tol=1e-5)
    assert beyond(moe, values, torch.tensor([[[2, 2]]]), 0.01) == math.inf
