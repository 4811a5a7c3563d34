"""Updates are compared with one device's by the same gradients, so that their rounding is no mistake."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from meshwright.spec import RunSpec
from meshwright.verify.compare import TOLERANCE, Comparison
from meshwright.verify.own_gradients import ROUNDING, OwnGradients
from meshwright.verify.reference.updates import ReferenceUpdates
from optimiser_cases import BASE
from small import spec_of

MATRIX, NORM, BIAS = "blocks.0.attn.q.weight", "blocks.0.attn_norm.weight", "blocks.0.attn.q.bias"
STEPS = 3
PLAIN = {"train__warmup_steps": 0, "train__schedule": "constant", "train__clip": "none"}
WIDE: dict[str, object] = {**PLAIN, "train__lr": 1.0, "train__weight_decay": 0.5, "train__beta2": 0.5}
"""Flags of steps that move weights by about their own size, so that little of one shows."""

Tensors = dict[str, Tensor]


def weights() -> Tensors:
    draw = torch.Generator().manual_seed(1)
    return {
        MATRIX: torch.randn(6, 4, dtype=torch.float64, generator=draw),
        NORM: torch.ones(4, dtype=torch.float64),
        BIAS: torch.zeros(5, dtype=torch.float64),
    }


def gradients(off: float) -> Iterator[tuple[Tensors, Tensors]]:
    """The gradients of each step as one device has them, and as a layout does, `off` times their size away.

    One element of each is about as small as eps, and sizes differ between steps.
    """
    draw = torch.Generator().manual_seed(2)
    for size in (1.0, 0.01, 0.1):
        due = {
            name: size * torch.randn(each.shape, dtype=torch.float64, generator=draw)
            for name, each in weights().items()
        }
        for each in due.values():
            each.view(-1)[0] = 1.5e-8
        yield due, {name: each + off * each.abs().max() for name, each in due.items()}


def adamw(spec: RunSpec, held: Tensors, **changed: float) -> Callable[[Tensors], None]:
    """A step of torch's AdamW on these weights, where factors of its numbers may be `changed`."""
    train = spec.train
    numbers = {"lr": train.lr, "weight_decay": train.weight_decay, "beta2": train.beta2, "eps": train.eps}
    numbers = {key: value * changed.get(key, 1.0) for key, value in numbers.items()}
    groups = [
        {"params": [each], "weight_decay": numbers["weight_decay"] if each.ndim > 1 else 0.0}
        for each in held.values()
    ]
    betas = train.beta1, numbers["beta2"]
    optimiser = torch.optim.AdamW(groups, lr=numbers["lr"], betas=betas, eps=numbers["eps"])

    def step(found: Tensors) -> None:
        for name, weight in held.items():
            weight.grad = found[name].clone()
        optimiser.step()

    return step


def compared(
    flags: dict[str, object],
    off: float,
    change: Callable[[int, Tensors], None] = lambda *_: None,
    **changed: float,
) -> tuple[Comparison, Comparison]:
    """Steps of a layout with gradients that are `off`, against one device's by its own, and by these."""
    spec, ours = spec_of(BASE, **flags), weights()
    step, alone = adamw(spec, ours, **changed), ReferenceUpdates(spec, weights())
    own, plain, found = OwnGradients(spec, weights()), Comparison(), Comparison()
    for number, (due, given) in enumerate(gradients(off), 1):
        alone.take(number, due)
        step(given)
        change(number, ours)
        wanted = {
            "gradient": due,
            "parameter": {name: each.clone() for name, each in alone.parameters.items()},
        }
        follows = own.step(number, {"gradient": given}, wanted)
        plain.add(number, "parameter", ours, wanted["parameter"])
        found.add(number, "parameter", ours, follows["parameter"])
    return plain, found


@pytest.mark.parametrize("flags", [PLAIN, WIDE])
def test_rounding_of_a_gradient_about_as_small_as_eps_is_no_mistake(flags: dict[str, object]) -> None:
    plain, found = compared(flags, 1e-15)
    assert BIAS in {each.name for place in plain.kinds for each in plain.failing(*place)}
    worst = max(each.relative for kind in found.kinds.values() for each in kind)
    assert worst < 1e-13


def test_gradients_that_are_equal_change_nothing() -> None:
    plain, found = compared(WIDE, 0.0)
    assert plain.kinds == found.kinds and found.first is None


def grown(name: str) -> Callable[[int, Tensors], None]:
    def change(number: int, ours: Tensors) -> None:
        ours[name].mul_(1 + 1e-9)

    return change


@pytest.mark.parametrize("off", [0.0, 1e-15])
@pytest.mark.parametrize(
    ("plant", "names"),
    [
        ({"lr": 1 + 1e-9}, {MATRIX, NORM, BIAS}),
        ({"weight_decay": 1 + 1e-9}, {MATRIX}),
        ({"beta2": 1 + 1e-9}, {MATRIX, NORM, BIAS}),
        ({"eps": 1.0001}, {MATRIX, NORM, BIAS}),
        *(({"change": grown(name)}, {name}) for name in (MATRIX, NORM, BIAS)),
    ],
    ids=["lr", "weight_decay", "beta2", "eps", "matrix", "norm", "bias"],
)
def test_mistakes_of_an_update_are_found_beside_rounding(
    off: float, plant: dict[str, Any], names: set[str]
) -> None:
    _, found = compared(WIDE, off, **plant)
    assert {each.name for place in found.kinds for each in found.failing(*place)} == names


def test_a_gradient_that_is_off_by_more_than_rounding_is_no_excuse() -> None:
    """Though it is off by less than the tolerance of gradients."""
    off = 3 * ROUNDING
    assert off < TOLERANCE
    _, found = compared(WIDE, off)
    assert found.first is not None and found.first.relative > 1e-6
    _, found = compared(WIDE, ROUNDING / 3)
    assert found.first is None


def test_averages_follow_as_parameters_do() -> None:
    spec = spec_of(BASE, **PLAIN, train__ema=0.5)
    own, alone = OwnGradients(spec, weights()), ReferenceUpdates(spec, weights())
    for number, (due, given) in enumerate(gradients(1e-15), 1):
        alone.take(number, given)
        wanted = {"gradient": due, "parameter": weights(), "ema": weights()}
        follows = own.step(number, {"gradient": given}, wanted)
        for kind, there in (("parameter", alone.parameters), ("ema", alone.averages)):
            assert all(torch.equal(follows[kind][name], there[name]) for name in there)
        assert wanted["ema"][BIAS].abs().max() == 0 < follows["ema"][BIAS].abs().max()


@pytest.mark.parametrize(
    ("flags", "followed"),
    [
        ({}, {MATRIX, NORM, BIAS}),
        ({"train__optimiser": "adamw8bit"}, {MATRIX, NORM, BIAS}),
        ({"train__optimiser": "muon"}, {NORM, BIAS}),
        ({"train__optimiser": "lion"}, set()),
        ({"train__optimiser": "sgd"}, set()),
        ({"train__frozen": '["*.q.*"]'}, {NORM}),
        ({"outer__staleness": 1}, set()),
        ({"layout__replicate": 2, "outer__every": 2}, set()),
    ],
)
def test_parameters_with_second_moments_are_followed(flags: dict[str, object], followed: set[str]) -> None:
    spec = spec_of(BASE, **flags)
    assert OwnGradients(spec, weights())._updates.parameters.keys() == followed


def test_gradients_that_were_not_found_leave_what_one_device_does() -> None:
    spec = spec_of(BASE, **PLAIN)
    own, alone = OwnGradients(spec, weights()), ReferenceUpdates(spec, weights())
    due, _ = next(gradients(0.0))
    alone.take(1, due)
    follows = own.step(1, {"gradient": {MATRIX: due[MATRIX][:2]}}, {"gradient": due, "parameter": {}})
    assert all(torch.equal(follows["parameter"][name], there) for name, there in alone.parameters.items())
