"""A planted mistake is told by the first step, kind and module that differ, the ranks, and the factor."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from meshwright.comm.mesh import Mesh
from meshwright.data.loader import Batch
from meshwright.spec import RunSpec
from meshwright.train.step_result import StepResult
from meshwright.train.step_sums import Sums
from meshwright.verify import verify as subject
from meshwright.verify.compare import Comparison, Difference, factor_of
from ranks import Ranks
from small import scale_gradients, spec_of

BASE = {
    "model.vocab_size": 61, "data.seq_len": 16, "train.batch_tokens": 8 * 16, "train.steps": 3,
    "layout.micro_batch": 2,
}  # fmt: skip
Plant = Callable[[subject.Trainer], None]


def with_planted(mesh: Mesh, spec: RunSpec, plant: Plant, steps: int) -> dict[str, Any] | None:
    """`verify` with a trainer that `plant` has changed."""

    class Planted(subject.Trainer):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.number = self.seen = 0
            plant(self)

        def gradients(self, batch: Batch) -> Tensor:
            self.number += 1
            return super().gradients(batch)

    with patch.object(subject, "Trainer", Planted):
        return subject.verify(spec, mesh, steps)


def on_module(trainer: subject.Trainer, rank: int, name: str, change: Callable[[Tensor], Tensor]) -> None:
    if trainer.mesh.rank == rank:
        module = trainer.decoder.get_submodule(name)
        module.register_forward_hook(lambda _module, _inputs, output: change(output))


def one_element_of_attention(trainer: subject.Trainer) -> None:
    on_module(
        trainer, 1, "blocks.1.attn", lambda x: x + 1e-6 * nn.functional.one_hot(torch.tensor(3), x.shape[2])
    )


def swapped_tokens(trainer: subject.Trainer) -> None:
    for rank in range(2):
        on_module(trainer, rank, "blocks.0.mlp", lambda x: x.roll(1, 1))


def one_microbatch(trainer: subject.Trainer) -> None:
    def second_call(x: Tensor) -> Tensor:
        trainer.seen += 1
        return 2 * x if trainer.seen == 2 else x

    on_module(trainer, 0, "embed", second_call)


class Halve(torch.autograd.Function):
    """The identity, with half its gradient."""

    @staticmethod
    def forward(_context: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(_context: Any, grad: Tensor) -> Tensor:
        return grad / 2


def half_a_backward(trainer: subject.Trainer) -> None:
    """The attention's norm lies beside the residual, so only its own gradients are halved."""
    for rank in range(2):
        on_module(trainer, rank, "blocks.1.attn_norm", Halve.apply)


def all_gradients_halved(trainer: subject.Trainer) -> None:
    finish = trainer.states.finish_step

    def halved() -> None:
        finish()
        scale_gradients(trainer.states, 0.5)

    trainer.states.finish_step = halved  # type: ignore[method-assign]


def one_gradient(trainer: subject.Trainer) -> None:
    finish = trainer.states.finish_step

    def changed() -> None:
        finish()
        dict(trainer.states.gradients())["blocks.0.mlp_norm.weight"].to_local().mul_(1 + 1e-6)

    trainer.states.finish_step = changed  # type: ignore[method-assign]


def the_norm(trainer: subject.Trainer) -> None:
    squares = trainer.states.squares
    trainer.states.squares = lambda exact=False: 2 * squares(exact)  # type: ignore[method-assign]


def a_moment(trainer: subject.Trainer) -> None:
    take = trainer.optimiser.step_divided

    def drifting(rate: float, divisor: torch.Tensor, skipped: torch.Tensor) -> None:
        take(rate, divisor, skipped)
        if trainer.number == 2:
            trainer.optimiser.moments["exp_avg"][1].mul_(1 + 1e-6)

    trainer.optimiser.step_divided = drifting  # type: ignore[method-assign]


def a_replica(trainer: subject.Trainer) -> None:
    """On rank 1 alone, after the last step: nothing is computed from it."""
    apply = trainer.apply

    def drifting(sums: Sums, number: int) -> StepResult:
        done = apply(sums, number)
        if trainer.mesh.rank == 1 and number == 2:
            trainer.states.units[0].stored[0] += 1e-9
        return done

    trainer.apply = drifting  # type: ignore[method-assign]


CASES: dict[str, tuple[Plant, dict[str, object], tuple[int, str, str], list[str]]] = {
    # what is planted, flags, step, kind and name, what the sentence says
    "attention": (
        one_element_of_attention, {"layout__dp": 2}, (1, "forward", "blocks.1.attn"), ["on rank 1"],
    ),
    "permutation": (
        swapped_tokens, {"layout__dp": 2}, (1, "forward", "blocks.0.mlp"), ["in other places"],
    ),
    "microbatch": (
        one_microbatch, {"layout__dp": 2}, (1, "forward", "embed"),
        ["on rank 0 in microbatch 1", "it is 2 times what it should be (dp or the data ranks or"],
    ),
    "tensor": (
        swapped_tokens, {"layout__tp": 2}, (1, "forward", "blocks.0.mlp"), ["in other places"],
    ),
    "backward": (half_a_backward, {"layout__dp": 2}, (1, "backward", "blocks.1.attn_norm"), []),
    "gradients": (
        all_gradients_halved, {"layout__dp": 2}, (1, "gradient", "head.norm.weight"),
        ["of 21 compared 21 differ", "each is 1/2 times what it should be (1/dp"],
    ),
    "gradient": (one_gradient, {"layout__dp": 2}, (1, "gradient", "blocks.0.mlp_norm.weight"), []),
    "norm": (
        the_norm, {"layout__dp": 2}, (1, "grad norm", "grad norm"),
        ["it is 1.41421 times what it should be (the root of dp"],
    ),
    "moment": (a_moment, {"layout__dp": 2}, (2, "exp_avg", ""), ["the first moment of blocks.0."]),
    "replica": (
        a_replica, {"layout__dp": 2}, (2, "replicas", ""),
        ["step 2: embed.weight differs between its copies"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_the_first_difference_is_named(ranks: Ranks, case: str) -> None:
    plant, flags, (step, kind, name), words = CASES[case]
    spec = spec_of(BASE, **flags)
    found = ranks.run(spec.layout, with_planted, spec, plant, 2)[0]
    assert not found["equal"]
    first = found["first"]
    assert (first["step"], first["kind"]) == (step, kind), first["sentence"]
    assert first["name"] == name or not name
    for each in words:
        assert each in first["sentence"], first["sentence"]
    listed = found["differences"]
    assert {each["step"] for each in listed} == {step}
    assert (listed[0]["kind"], listed[0]["name"]) == (first["kind"], first["name"])


def test_a_factor_is_found_to_8_digits_and_noise_is_none() -> None:
    wanted = torch.randn(100, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    assert factor_of(wanted * 1.002, wanted) == pytest.approx(1.002, rel=1e-12)
    assert factor_of(torch.zeros(100, dtype=torch.float64), wanted) == 0.0
    assert factor_of(wanted + 1e-6 * wanted.roll(1), wanted) is None
    assert factor_of(wanted, 0 * wanted) is None


def test_the_gradient_nearest_the_head_is_the_first() -> None:
    comparison = Comparison()
    names = ["embed.weight", "blocks.0.mlp.down.weight", "head.weight"]
    one = {name: torch.ones(2, dtype=torch.float64) for name in names}
    comparison.add(1, "gradient", {**one, names[0]: 3 * one[names[0]], names[1]: 3 * one[names[1]]}, one)
    comparison.note(1, "parameter", [Difference(1, "parameter", "head.weight", math.inf)])
    assert comparison.first == Difference(1, "gradient", names[1], 2.0, 3.0)
    assert comparison.sentence(comparison.first, {"tp": 3}) == (
        "step 1: the first difference is in the gradient of blocks.0.mlp.down.weight (2.0e+00, of 3 compared "
        "2 differ); each is 3 times what it should be (tp)"
    )
    comparison.note(1, "backward", [Difference(1, "backward", "head", 0.0)])
    words = (
        "mlp.down.weight, though the gradients at modules' outputs are right: in the weight's own gradient"
    )
    assert words in comparison.sentence(comparison.first, {})


def test_a_wrong_backward_names_the_parameters_that_it_makes_wrong() -> None:
    names = [f"blocks.1.attn.{part}.weight" for part in ("q", "k", "v", "out")]
    found = Comparison()
    found.note(1, "backward", [Difference(1, "backward", "blocks.1.attn", 1e-3)])
    wrong = ("k", "v")
    found.note(1, "gradient", [Difference(1, "gradient", name, 0.5 * (name[14] in wrong)) for name in names])
    first = found.result({})["first"]
    assert first["parameters"] == ["blocks.1.attn.v.weight", "blocks.1.attn.k.weight"]
    assert first["sentence"].endswith("of its own parameters' gradients only v.weight, k.weight differ")
    found.note(1, "gradient", [Difference(1, "gradient", "blocks.1.attn_norm.weight", 0.5)])
    assert found.result({})["first"]["parameters"] == first["parameters"]  # of another module
