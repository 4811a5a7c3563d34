"""Operands as kernels of products take them: their bits are the emulation's, and their layout cuBLAS's."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from torchao.prototype.mx_formats.kernels import f4_unpacked_to_f32, unpack_uint4
from torchao.prototype.mx_formats.nvfp4_tensor import nvfp4_quantize
from torchao.prototype.mx_formats.utils import from_blocked, to_blocked

from interpreted_casts import CASES, by_interpreter, drawn
from meshwright.kernels.low_precision import (
    E4M3,
    E5M2,
    Form,
    rotate,
    round_nvfp4,
    round_tensor,
    round_tiles,
    scale_of,
)
from meshwright.kernels.low_precision_casts import (
    Cast,
    blocked,
    by_nvfp4,
    by_row,
    by_tensor,
    by_tile,
    unblocked,
)

SHAPES = [(176, 272), (128, 128), (48, 80)]


@pytest.mark.parametrize(
    ("case", "shape"),
    [pytest.param(case, SHAPES[0 if number % 4 == 0 else 2]) for number, case in enumerate(CASES)],
)
def test_a_kernel_has_every_bit_of_the_emulation(
    interpreted: Callable[..., Any], case: str, shape: tuple[int, int]
) -> None:
    different, numbers = interpreted(by_interpreter, case, *shape)
    assert numbers > 0 and different == 0


def values(cast: Cast, block: int = 0, square: bool = False, mx: bool = False) -> Tensor:
    """The numbers of a cast times their scales, fp32 (..., M, K)."""
    if cast.numbers.dtype is torch.float4_e2m1fn_x2:
        numbers = f4_unpacked_to_f32(unpack_uint4(cast.numbers.view(torch.uint8)))
    else:
        numbers = cast.numbers.float()
    height, width = numbers.shape[-2:]
    if block == 0:
        return numbers * (cast.scales.unsqueeze(-1) if cast.scales.ndim else cast.scales)
    if mx or block == 16:
        unit = 32 if mx else 16
        scales = unblocked(cast.scales.float(), height, -(-width // unit)).repeat_interleave(unit, -1)
    elif square:
        scales = cast.scales.repeat_interleave(128, -2).repeat_interleave(128, -1)
    else:
        scales = cast.scales.mT.repeat_interleave(128, -1)
    return numbers * scales[..., :height, :width]


def same(found: Tensor, wanted: Tensor) -> bool:
    return torch.equal(found.nan_to_num(-7.0), wanted.float().nan_to_num(-7.0))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("form", [E4M3, E5M2])
def test_casts_are_the_rounded_operands(shape: tuple[int, int], form: Form) -> None:
    x, scale = drawn(*shape), torch.tensor(2.0**-6)
    along, across = by_tensor(x, form, scale)
    assert along and across
    wanted = round_tensor(x, form, scale)
    assert same(values(along), wanted) and same(values(across).T, wanted)
    assert same(values(by_row(x, form)), round_tiles(x, form, 1, 0))
    assert same(values(by_row(x, form, columns=True)).T, round_tiles(x, form, 0, 1))
    for block, square, mx in ((128, False, False), (128, True, False), (128, True, True), (32, False, True)):
        along, across = by_tile(x, form, block, square, mx)
        assert along and across
        side = block if square else 1
        assert same(values(along, block, square, mx), round_tiles(x, form, side, block))
        assert same(values(across, block, square, mx).T, round_tiles(x, form, block, side))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("square", "stochastic"), [(False, False), (True, False), (False, True)])
def test_casts_to_nvfp4_are_the_rounded_operands(
    shape: tuple[int, int], square: bool, stochastic: bool
) -> None:
    x, scale, side = drawn(*shape), torch.tensor(2.0**-6), 16 if square else 1
    along, across = by_nvfp4(x, scale, (), square, stochastic, rotated=not square)
    assert along and across
    assert same(values(along, 16) * scale, round_nvfp4(x, scale, side, 16, stochastic))
    turned = x if square else rotate(x)
    assert same((values(across, 16) * scale).T, round_nvfp4(turned, scale, 16, side, stochastic))


def test_matrices_are_cast_one_by_one() -> None:
    x = torch.stack([drawn(128, 256, True), drawn(128, 256, True) / 4])
    for make in (
        lambda x: [by_row(x, E4M3), by_row(x, E4M3, columns=True)],
        lambda x: by_tile(x, E4M3, 32, False, True),
        lambda x: by_tile(x, E4M3, 128, True, False),
    ):
        for whole, *each in zip(make(x), *map(make, x), strict=True):
            for tensor, own in product((0, 1), (0, 1)):
                assert torch.equal(whole[tensor][own].float(), each[own][tensor].float())


def test_scales_lie_in_blocks_as_torchao_lays_them() -> None:
    scales = torch.randint(0, 100, (256, 12), generator=torch.Generator().manual_seed(0)).to(torch.uint8)
    assert torch.equal(blocked(scales), to_blocked(scales))
    assert torch.equal(unblocked(blocked(scales), 256, 12), scales)
    assert torch.equal(from_blocked(blocked(scales), 256, 12), scales)


def test_numbers_of_4_bits_are_packed_as_torchao_packs_them() -> None:
    x = torch.randn(64, 256, generator=torch.Generator().manual_seed(0)).bfloat16()
    scale = scale_of(x.abs().amax().float(), 6 * 448.0)
    scales, packed = nvfp4_quantize(x, 16, scale)
    along, _ = by_nvfp4(x, scale, columns=False)
    assert along is not None
    assert torch.equal(along.numbers.view(torch.uint8), packed.view(torch.uint8))
    assert torch.equal(unblocked(along.scales.float(), 64, 16), scales.float())


def test_the_largest_number_is_noted() -> None:
    x = drawn(48, 80, finite=True)
    seen = [torch.zeros(()), torch.tensor(torch.inf)]
    by_tensor(x, E4M3, torch.tensor(1.0), seen)
    assert seen[0] == x.abs().max() and seen[1] == torch.inf
    seen = [torch.zeros(())]
    by_nvfp4(x, torch.tensor(1.0), seen, rotated=True)
    assert seen[0] == torch.maximum(x.abs().max(), rotate(x).abs().max())
    by_tensor(drawn(48, 80), E4M3, torch.tensor(1.0), seen)
    assert seen[0].isnan()
