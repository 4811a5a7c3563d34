"""GPTQ: less error of a layer's outputs than rounding to nearest."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch

from meshwright.exchange.parameter_source import HeldParameters
from meshwright.model.decoder import Decoder
from meshwright.model.init import init_whole_
from meshwright.model.quantisation import quantise
from meshwright.spec import ModelSpec
from meshwright.spec.errors import NumericalError
from meshwright.spec.precision import Quantised
from meshwright.weights.gptq import gptq
from meshwright.weights.quantise import CalibratedCodes, calibrated, plan_quantisation

DRAW = torch.Generator().manual_seed(0)
WEIGHT = torch.randn(48, 320, generator=DRAW)
MIX = torch.randn(320, 320, generator=DRAW) + 6 * torch.randn(320, 1, generator=DRAW)
INPUTS = torch.randn(2000, 320, generator=DRAW) @ (MIX / 20)
RECIPES: list[tuple[Quantised, int]] = [("int4", 32), ("int4", 64), ("int8", 0), ("fp8", 0)]


@pytest.mark.parametrize(("recipe", "group"), RECIPES)
def test_outputs_for_correlated_inputs_are_nearer(recipe: Quantised, group: int) -> None:
    def error(values: torch.Tensor) -> float:
        return float((INPUTS @ (values - WEIGHT).T).square().sum())

    found = gptq(WEIGHT, INPUTS.T @ INPUTS, recipe, group)
    rounded = quantise(WEIGHT, recipe, group)
    assert found.codes.dtype == rounded.codes.dtype
    assert found.scales.shape == rounded.scales.shape and found.scales.dtype == torch.bfloat16
    assert error(found.values()) < 0.7 * error(rounded.values())


@pytest.mark.parametrize(("recipe", "group"), RECIPES)
def test_inputs_without_correlation_leave_each_number_to_itself(recipe: Quantised, group: int) -> None:
    found, rounded = gptq(WEIGHT, 3 * torch.eye(320), recipe, group), quantise(WEIGHT, recipe, group)
    assert torch.equal(found.scales, rounded.scales)
    assert torch.equal(found.codes.float(), rounded.codes.float())


def test_inputs_that_are_always_zero_are_no_division_by_zero() -> None:
    inputs = INPUTS.clone()
    inputs[:, 5:40] = 0
    for hessian in (inputs.T @ inputs, torch.zeros(320, 320)):
        assert torch.isfinite(gptq(WEIGHT, hessian, "int4", 32).values()).all()


def test_inputs_that_are_not_finite_are_a_sentence() -> None:
    with pytest.raises(NumericalError, match="gptq: the inputs of calibration are not finite"):
        gptq(WEIGHT, torch.full((320, 320), float("nan")), "int4", 32)


class _Noted(HeldParameters):
    """A source that notes what it was asked for."""

    def __init__(self, decoder: Decoder) -> None:
        super().__init__(decoder.tensors())
        self.asked: list[str] = []

    def __getitem__(self, name: str, /) -> torch.Tensor:
        self.asked.append(name)
        return super().__getitem__(name)


@pytest.mark.parametrize("recipe", ["int4", "fp8"])
def test_codes_block_by_block_are_those_of_a_decoder_in_memory(recipe: Quantised) -> None:
    """Each parameter is read once, a block's when its codes are asked for."""
    spec = ModelSpec.model_validate(
        {"preset": "tiny", "layers": 2, "hidden": 64, "ffn": 96, "vocab_size": 101}
    )
    decoder = init_whole_(Decoder(spec), 0)
    batches = list(torch.randint(0, 101, (2, 2, 48), generator=torch.Generator().manual_seed(0)))
    how, source = plan_quantisation(spec, recipe), _Noted(decoder)
    found = CalibratedCodes(spec, source, how, batches)
    wanted = calibrated(deepcopy(decoder), how, batches)
    assert list(found) == list(wanted) and not source.asked
    for name, codes in wanted.items():
        same = found[name]
        assert torch.equal(same.codes.view(torch.uint8), codes.codes.view(torch.uint8))
        assert torch.equal(same.scales, codes.scales)
        layer = int(name.split(".")[2])
        assert not any(asked.startswith(f"blocks.{layer + 1}.") for asked in source.asked)
    names = [name for name in decoder.tensors() if not name.startswith("head.")]
    assert sorted(source.asked) == sorted(names)
