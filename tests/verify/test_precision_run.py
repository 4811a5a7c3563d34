"""A run in its own precision: what rounding does not explain is found, and what it explains is not."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from broken_trainers import Plant, in_own_precision
from meshwright import api
from meshwright.comm.mesh import Mesh
from meshwright.kernels import low_precision
from meshwright.kernels.gradient_accumulation_fusion import no_sum
from meshwright.model.chunked_cross_entropy import _LinearCrossEntropy
from meshwright.spec import RunSpec, UserError, load
from meshwright.train import step as train_step
from meshwright.train.step_result import StepResult
from meshwright.train.step_sums import Sums
from meshwright.verify import precision as subject
from meshwright.verify.reference import decoder as reference_decoder
from meshwright.verify.reference.data import batches
from meshwright.verify.reference.decoder import choose_experts
from meshwright.verify.reference.low_precision import ReferenceLinears
from meshwright.verify.reference.weights import initial_weights
from meshwright.verify.rounding import exact_gradients, rounded_gradients
from ranks import Ranks
from small import measure_gradients, spec_of

BASE = {
    "model.vocab_size": 61, "data.seq_len": 16, "train.batch_tokens": 8 * 16, "train.steps": 3,
    "layout.micro_batch": 1,
}  # fmt: skip


def found(
    ranks: Ranks, plant: Plant | None = None, steps: int = 3, base: dict[str, object] = BASE, **flags: object
) -> dict[str, Any]:
    spec = spec_of(base, **flags)
    result: dict[str, Any] = ranks.run(spec.layout, in_own_precision, spec, steps, plant)[0]
    return result


# Layouts that are right ----------------------------------------------------------------------------------

MOE = {"model__preset": "moe-tiny", "model__layers": 2, "model__vocab_size": 64}
LAYOUTS: dict[str, dict[str, object]] = {
    "one": {},
    "dp": {"layout__dp": 4, "layout__zero": 0},
    "zero1": {"layout__dp": 2, "layout__zero": 1, "layout__replicate": 2},
    "zero2": {"layout__dp": 4, "layout__zero": 2, "recompute__policy": "full"},
    "zero3": {"layout__dp": 2, "layout__zero": 3, "recompute__policy": "selective"},
    "tp": {"layout__tp": 2, "layout__sequence_parallel": "true", "layout__dp": 2},
    "cp": {"layout__cp": 2},
    "pp": {"layout__pp": 2, "layout__dp": 2, "layout__zero": 1},
    "tied": {"model__tied": "true", "layout__pp": 2, "layout__schedule": "1f1b"},
    "ep": {"layout__ep": 2, "layout__dp": 2, **MOE},
    "wire": {"precision__reduce": "bf16", "layout__dp": 4, "layout__zero": 3},
    "8-bit": {"train__optimiser": "adamw8bit", "layout__tp": 2, "layout__dp": 2, "layout__zero": 2},
}
QUICK = {
    ("zero3", "fp16"),
    ("pp", "bf16"),
}


@pytest.mark.parametrize(
    ("layout", "compute"),
    [
        pytest.param(*case, marks=[] if case in QUICK else pytest.mark.full)
        for case in product(LAYOUTS, ("bf16", "fp16", "fp32"))
    ],
)
def test_a_right_layout_is_equal_in_its_own_precision(ranks: Ranks, layout: str, compute: str) -> None:
    result = found(ranks, **LAYOUTS[layout], precision__compute=compute)
    assert result["equal"], result["first"]["sentence"]
    kinds = {row["kind"] for row in result["rows"]}
    assert {"step 3 common slope", "step 3 gradient slope", "step 3 gradient noise"} <= kinds
    assert {"step 3 validation loss", "step 4 skipped step"} <= kinds


def test_a_few_draws_send_tokens_to_other_experts() -> None:
    """A run does so seldom, and then by as much as no draw would show that has all tokens where they were."""
    spec = spec_of(BASE, **MOE, precision__compute="fp16")
    batch = next(batches(spec))
    weights = {name: each.half() for name, each in initial_weights(spec.model, 0).items()}
    chosen: list[Tensor] = []

    def choose(*arguments: Any) -> Tensor:
        chosen.append(choose_experts(*arguments).sort(-1).values)
        return chosen[-1]

    with patch.object(reference_decoder, "choose_experts", choose):
        exact_gradients(spec, weights, batch, ReferenceLinears(spec), {})
        for draw in range(4):
            rounded_gradients(spec, weights, batch, ReferenceLinears(spec), 1024.0, {}, draw)
    layers = len(chosen) // 5
    exact, *draws = (torch.stack(chosen[place : place + layers]) for place in range(0, len(chosen), layers))
    moved = [int((draw != exact).any(-1).sum()) for draw in draws]
    assert 0 < sum(moved) / 4 < exact[..., 0].numel() / 20, moved


@pytest.mark.parametrize(
    ("layout", "flags"),
    [
        ("zero3", {}),
        pytest.param("tp", {"train__optimiser": "muon"}, marks=pytest.mark.full),
        pytest.param("8-bit", {}, marks=pytest.mark.full),
        pytest.param("pp", {"train__optimiser": "lion", "train__ema": 0.9}, marks=pytest.mark.full),
    ],
)
def test_weights_in_bf16_are_rounded_with_the_draws_of_the_reference(
    ranks: Ranks, layout: str, flags: dict[str, object]
) -> None:
    words = {"precision__compute": "bf16", "precision__master": "bf16"}
    result = found(ranks, **LAYOUTS[layout] | words | flags)
    assert result["equal"], result["first"]["sentence"]


def one_update_is_lost(trainer: train_step.Trainer) -> None:
    """The second update leaves a matrix as it was."""
    step = trainer.optimiser.step_divided

    def lost(rate: float, divisor: Tensor, skipped: Tensor) -> None:
        parameters = dict(trainer.states.parameters())
        kept = parameters["blocks.1.mlp.up.weight"].to_local().clone()
        step(rate, divisor, skipped)
        if trainer.optimiser.updates == 1:
            parameters["blocks.1.mlp.up.weight"].to_local().copy_(kept)

    trainer.optimiser.step_divided = lost  # type: ignore[method-assign]


def other_draws(trainer: train_step.Trainer) -> None:
    trainer.optimiser.train = trainer.optimiser.train.model_copy(update={"seed": 7})


@pytest.mark.parametrize(("plant", "step"), [(one_update_is_lost, 2), (other_draws, 1)])
def test_an_update_of_weights_in_bf16_that_is_lost_or_rounded_by_other_draws_is_found(
    ranks: Ranks, plant: Plant, step: int
) -> None:
    flags = {"layout__dp": 2, "precision__compute": "bf16", "precision__master": "bf16"}
    result = found(ranks, plant, **flags)
    assert not result["equal"]
    assert (result["first"]["step"], result["first"]["kind"]) == (step, "parameter"), result["first"]


@pytest.mark.full
@pytest.mark.parametrize("compute", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("layout", ["zero1", "zero3", "tp", "pp"])
def test_a_right_layout_is_equal_compiled(ranks: Ranks, layout: str, compute: str) -> None:
    result = found(ranks, **LAYOUTS[layout], precision__compute=compute, train__compile="true")
    assert result["equal"], result["first"]["sentence"]


LOW: dict[str, object] = BASE | {
    "model.hidden": 128, "model.ffn": 256, "model.heads": 4, "model.kv_heads": 4, "model.head_dim": 64,
    "data.seq_len": 128, "train.batch_tokens": 4 * 128,
}  # fmt: skip
LOW_LAYOUTS: dict[str, dict[str, object]] = {
    "tp": {"layout__tp": 2, "layout__dp": 2, "layout__zero": 1},
    "pp": {"layout__pp": 2, "layout__dp": 2, "layout__zero": 3, "recompute__policy": "full"},
    "cp": {"layout__cp": 2},
    "gather": {"layout__dp": 2, "layout__zero": 3, "precision__fp8_gather": "true"},
    "gather-1": {"layout__dp": 2, "layout__zero": 1, "precision__fp8_gather": "true"},
    "ep": {"layout__ep": 2, "layout__dp": 2, "model__moe__experts": 4, "model__moe__top_k": 2,
           "model__moe__ffn": 256},
}  # fmt: skip
RECIPES = ("fp8", "fp8-rowwise", "fp8-blockwise", "mxfp8", "nvfp4")
QUICK_LOW = {("cp", "mxfp8"), ("ep", "fp8-blockwise")}


@pytest.mark.parametrize(
    ("layout", "recipe"),
    [
        pytest.param(*case, marks=[] if case in QUICK_LOW else pytest.mark.full)
        for case in product(LOW_LAYOUTS, RECIPES)
        if case[1] == "fp8" or not case[0].startswith("gather")
    ],
)
def test_low_precision_rounds_as_its_reference(ranks: Ranks, layout: str, recipe: str) -> None:
    flags = {**LOW_LAYOUTS[layout], "precision__compute": recipe}
    if (layout, recipe) == ("cp", "fp8-blockwise"):  # a block of 128 tokens for each part of a sequence
        flags |= {"data__seq_len": 512, "train__batch_tokens": 2 * 512}
    result = found(ranks, steps=2, base=LOW, **flags)
    assert result["equal"], result["first"]["sentence"]
    assert result["precision"] == recipe
    noise = [row for row in result["rows"] if row["kind"].endswith("gradient noise")]
    assert all(row["tolerance"] < 3 for row in noise), noise


# Planted mistakes ----------------------------------------------------------------------------------------


def towards_zero(mesh: Mesh, spec: RunSpec, steps: int) -> dict[str, Any] | None:
    """The comparison where numbers in 8 bits are rounded towards zero, which makes all of them smaller."""

    def truncated(x: Tensor, form: low_precision.Form, scales: Tensor) -> Tensor:
        near = to_numbers(x, form, scales).float()
        exact = x.float() / scales
        return torch.where(near.abs() > exact.abs(), near * (1 - 2.0**-3), near).to(form.dtype)

    to_numbers = low_precision.to_numbers
    with patch.object(low_precision, "to_numbers", truncated):
        return subject.verify_in_own_precision(spec, mesh, steps)


def test_operands_that_are_rounded_towards_zero_are_found(ranks: Ranks) -> None:
    spec = spec_of(LOW, layout__dp=2, precision__compute="fp8")
    result: dict[str, Any] = ranks.run(spec.layout, towards_zero, spec, 2)[0]
    assert not result["equal"] and result["first"]["step"] == 2  # the first step is not rounded
    assert "rounding explains" in result["first"]["sentence"]


def with_weight_in_logits_gradients(mesh: Mesh, spec: RunSpec, steps: int) -> dict[str, Any] | None:
    with patch.object(train_step, "power_and_rest", lambda weight: (weight, 1.0)):
        return subject.verify_in_own_precision(spec, mesh, steps)


def with_weight_after_the_loss(mesh: Mesh, spec: RunSpec, steps: int) -> dict[str, Any] | None:
    apply = _LinearCrossEntropy.apply

    def weighted(*arguments: Any) -> Tensor:
        *others, scale, soft_targets, softcap = arguments
        loss: Tensor = apply(*others, 1.0, soft_targets, softcap)
        return loss * scale

    with patch.object(_LinearCrossEntropy, "apply", weighted):
        return with_weight_in_logits_gradients(mesh, spec, steps)


# How the weight is rounded, the step that shows it, and by how much gradients are off.
ROUNDED: dict[str, tuple[Callable[[Mesh, RunSpec, int], dict[str, Any] | None], int, float, float]] = {
    "logits": (with_weight_in_logits_gradients, 1, 1.7e-3, 3.4e-3),
    "loss": (with_weight_after_the_loss, 2, 2.5e-3, 4.5e-3),
}


@pytest.mark.parametrize(
    ("place", "axes"),
    [
        pytest.param(*case, marks=[] if case == ("logits", "dp=2,zero=3") else pytest.mark.full)
        for case in product(("logits", "loss"), ("dp=2,zero=3", "tp=2", "pp=2"))
    ],
)
def test_a_weight_of_the_loss_in_bf16_is_found_on_tiny(ranks: Ranks, place: str, axes: str) -> None:
    """The backward ran with 1/N: in the logits' gradients, or as a bf16 factor of all those below the head.

    The numbers of targets are those that show the first in odd steps and the second in even ones.
    """
    broken, step, least, most = ROUNDED[place]
    words = {"model.preset": "tiny", "data.corpus": "synthetic", "precision.compute": "bf16"}
    sizes = dict(axis.split("=") for axis in axes.split(","))
    spec = load(None, [*words.items(), *((f"layout.{axis}", size) for axis, size in sizes.items())])
    wrong = ranks.run(spec.layout, broken, spec, step)[0]
    assert "narrowed copy" in wrong["narrowed"]
    assert not wrong["equal"]
    assert wrong["first"]["kind"] == "common slope"
    assert "all 39 gradients are " in wrong["first"]["sentence"]
    slope = next(row for row in wrong["rows"] if row["kind"] == f"step {step} common slope")
    assert least < slope["worst"] < most
    assert slope["worst"] > 2 * slope["tolerance"]
    right = ranks.run(spec.layout, in_own_precision, spec, step)[0]
    assert right["equal"], right["first"]["sentence"]
    for row in right["rows"]:
        assert "common slope" not in row["kind"] or row["worst"] < row["tolerance"] / 2


def stale_slice(trainer: train_step.Trainer) -> None:
    """In the second microbatch some rows have the gradient of the first."""
    take, kept = trainer.states.take, list[Tensor]()

    def taken(parameter: nn.Parameter, grad: Tensor | None) -> None:
        if trainer.states._places[parameter][1].key == "blocks.1.mlp.up.weight":
            assert grad is not None
            kept.append(grad.clone())
            if len(kept) == 2:
                grad[10:20] = kept[0][10:20]
        take(parameter, grad)

    trainer.states.take = taken  # type: ignore[method-assign]
    trainer.pipeline.store.gradient_sum = no_sum


def stale_copy(trainer: train_step.Trainer) -> None:
    unit = trainer.states.units[1]
    unit.expire = lambda: None  # type: ignore[method-assign]


def one_gradient_is_halved(trainer: train_step.Trainer) -> None:
    finish = trainer.states.finish_step

    def halved() -> None:
        finish()
        dict(trainer.states.gradients())["blocks.0.attn.v.weight"].to_local().mul_(0.5)
        measure_gradients(trainer.states)

    trainer.states.finish_step = halved  # type: ignore[method-assign]


def scale_stays_in_gradients(trainer: train_step.Trainer) -> None:
    divisor = trainer.clipping.divisor
    trainer.clipping.divisor = (  # type: ignore[method-assign]
        lambda squares, factor: divisor(squares, factor) / trainer.loss_scale.value
    )


def skip_changes_a_moment(trainer: train_step.Trainer) -> None:
    apply = trainer.apply

    def changing(sums: Sums, number: int) -> StepResult:
        done = apply(sums, number)
        if not done.applied and trainer.mesh.rank == 1:
            trainer.optimiser.moments["exp_avg_sq"][2].mul_(0.999)
        return done

    trainer.apply = changing  # type: ignore[method-assign]


def scale_stays(trainer: train_step.Trainer) -> None:
    trainer.loss_scale.update = lambda finite: None  # type: ignore[method-assign]


CASES: dict[str, tuple[Plant, str, tuple[int, str, str], list[str]]] = {
    # what is planted, format, step, kind and name, what the sentence says
    "stale slice": (
        stale_slice, "bf16", (1, "gradient noise", "blocks.1.mlp.up.weight"), ["in rows ", "not by a factor"],
    ),
    "stale slice in fp32": (
        stale_slice, "fp32", (1, "gradient noise", "blocks.1.mlp.up.weight"), ["in rows "],
    ),
    "stale copy": (stale_copy, "bf16", (2, "compute copy", "blocks.0."), ["on rank 0 is not its rounded"]),
    "one gradient": (
        one_gradient_is_halved, "bf16", (1, "gradient slope", "blocks.0.attn.v.weight"), ["is 0.5"],
    ),
    "scale": (scale_stays_in_gradients, "fp16", (1, "exp_avg", ""), ["the first moment of"]),
    "skip": (
        skip_changes_a_moment, "fp16", (2, "skipped step", "changed exp_avg_sq of blocks.1."), ["must be"],
    ),
    "skip without halving": (
        scale_stays, "fp16", (2, "skipped step", "did not lower"), ["on rank 0 it did not"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_what_rounding_does_not_explain_is_named(ranks: Ranks, case: str) -> None:
    plant, compute, (step, kind, name), words = CASES[case]
    steps = 2 if step == 2 and kind != "skipped step" else 1
    scale: dict[str, object] = {"precision__loss_scale": 1024} if compute == "fp16" else {}
    result = found(ranks, plant, steps, layout__dp=2, precision__compute=compute, **scale)
    assert not result["equal"]
    first = result["first"]
    assert (first["step"], first["kind"]) == (step, kind), first["sentence"]
    assert first["name"].startswith(name), first["sentence"]
    for each in words:
        assert each in first["sentence"], first["sentence"]


def test_a_checkpoint_is_compared_in_float64_alone() -> None:
    with pytest.raises(UserError, match="--precision run: compares no checkpoints"):
        api.verify(spec_of(BASE), precision="run", through="checkpoint")
