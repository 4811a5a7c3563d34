"""Codes of a frozen base against an implementation in numpy, and the levels that the paper publishes."""

from __future__ import annotations

from statistics import NormalDist

import numpy as np
import pytest
import torch
from torch import Tensor

from blocks_in_numpy import in_numpy, levels_of
from meshwright.model.blockwise_quantisation import (
    NF4_LEVELS,
    codes_a_byte,
    dequantise_blocks,
    quantise_blocks,
    rounded_to_blocks,
    values_of_bytes,
)
from meshwright.spec.lora import BASE_BITS
from meshwright.spec.parameters import BaseFormat
from meshwright.spec.tiling import Tiling, tiled

FORMS: list[BaseFormat] = ["int8", "int4", "nf4"]
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def weights_in(dtype: torch.dtype, rows: int = 48, columns: int = 192) -> Tensor:
    """Normal weights of rows of different sizes, one of which is zero."""
    generator = torch.Generator().manual_seed(5)
    sizes = torch.logspace(-3, 2, rows, dtype=torch.float64).unsqueeze(1)
    drawn = torch.randn(rows, columns, generator=generator, dtype=torch.float64) * sizes
    drawn[3] = 0
    return drawn.to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_values_are_those_of_numpy(form: BaseFormat, dtype: torch.dtype) -> None:
    weight = weights_in(dtype)
    exact = weight.double() if dtype is torch.float64 else weight.float()
    wanted = torch.from_numpy(in_numpy(exact.numpy(), form)).to(dtype)
    with tiled(Tiling(base_elements=1000)):  # several pieces, the last one smaller
        found = rounded_to_blocks(weight, form)
    differ = found != wanted
    if form == "nf4" or dtype in (torch.float64, torch.float32):
        assert not differ.any()
        return
    # Between two levels of whole numbers a narrow format has middles, of which numpy takes the lower level.
    blocks = weight.double().view(weight.shape[0], -1, 64)
    half = len(levels_of(form)) // 2
    places = blocks * half / blocks.abs().amax(-1, keepdim=True).clamp(min=1e-30)
    assert bool(((places.frac().abs() == 0.5).view(weight.shape) | ~differ).all())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_values_of_codes_have_the_same_codes_again(form: BaseFormat, dtype: torch.dtype) -> None:
    once = rounded_to_blocks(weights_in(dtype), form)
    assert torch.equal(rounded_to_blocks(once, form), once)
    assert not torch.equal(once, weights_in(dtype))


@pytest.mark.parametrize("form", FORMS)
def test_codes_take_their_bits(form: BaseFormat) -> None:
    weight = weights_in(torch.bfloat16).view(-1)
    codes = torch.empty(len(weight) * BASE_BITS[form] // 8, dtype=torch.uint8)
    largest, found = weight.new_empty(len(weight) // 64), torch.empty_like(weight)
    quantise_blocks(weight, form, codes, largest)
    dequantise_blocks(codes, largest, values_of_bytes(form, found.dtype, found.device), found)
    assert torch.equal(found, rounded_to_blocks(weight, form))
    assert torch.equal(largest, weight.view(-1, 64).abs().amax(1))
    first, second = codes[0].item() // 16, codes[0].item() % 16
    if codes_a_byte(form) == 2:  # the first in the upper half, as in bitsandbytes
        shown = [levels_of(form)[int(code)] * float(largest[0]) for code in (first, second)]
        assert torch.equal(torch.tensor(shown).bfloat16(), found[:2])


def test_the_levels_of_nf4_are_those_of_the_paper() -> None:
    """Quantiles of a normal distribution, as the paper's code takes them, to the digits of its table."""
    offset = 0.9677083
    upper, lower = ([NormalDist().inv_cdf(p) for p in np.linspace(offset, 0.5, n)[:-1]] for n in (9, 8))
    made = np.array(sorted([*upper, 0.0, *(-each for each in lower)]))
    assert np.allclose(made / made.max(), NF4_LEVELS, rtol=0, atol=1e-6)
