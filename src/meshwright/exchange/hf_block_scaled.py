"""Weights in HF folders whose blocks share a scale, as their authors published them: read, not written.

    quant_method   a weight X in the file
    fp8            X (O, I) in e4m3, X_scale_inv (O / 128, I / 128): a factor of each block (DeepSeek-AI 2024,
                   DeepSeek-V3, §3.3), whose sides `weight_block_size` says
    mxfp4          X_blocks (E, O, I / 32, 16), two e2m1 numbers a byte, the first in the lower bits, and
                   X_scales (E, O, I / 32), exponents + 127 (OCP 2023, microscaling formats); the weight is
                   stored transposed, (E, I, O), by programs that do not compute in it (OpenAI 2025, gpt-oss)

A weight is code * scale, in fp32 or, of mxfp4, in bf16, in which it is exact. Programs that compute in fp8
round the inputs, too; here they are those of the model's own format.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from meshwright.exchange.hf_quantised import KEY, QuantisedLayers
from meshwright.exchange.tensor_store import DecodedTensors, Header, TensorStore
from meshwright.spec import UserError

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""The numbers of 3 bits; the fourth is the sign."""
_BLOCK, _EXPONENT = 32, 127
"""Numbers that share a scale of mxfp4, and what is added to its exponent."""
_TILE = 128
"""Default of `weight_block_size`."""


class _Weight(NamedTuple):
    """Names of the tensors of a weight in its file, with their headers, and its shape."""

    codes: str
    scales: str
    file: Path
    shape: tuple[int, ...]


class BlockScaled(DecodedTensors):
    """The tensors of an HF folder whose weights have a scale for each block, by names of what they stand for
    (`TensorStore`).

    Raises `UserError` for tensors that do not fit together.
    """

    def __init__(self, folder: Path, config: Mapping[str, Any], files: TensorStore) -> None:
        super().__init__(files)
        self._folder = folder
        given = config.get(KEY)
        described = given if isinstance(given, dict) else {}
        self._mxfp4 = described.get("quant_method") == "mxfp4"
        self._tile = (1, 1) if self._mxfp4 else self._sides(described)
        find = self._packed if self._mxfp4 else self._tiled
        self._weights = dict(find(files.headers))
        names = {name: (each.codes, each.scales) for name, each in self._weights.items()}
        self._made_of = {name: [files.headers[each] for each in pair] for name, pair in names.items()}
        parts = {name for pair in names.values() for name in pair}
        plain = {name: header for name, header in files.headers.items() if name not in parts}
        dtype = "BF16" if self._mxfp4 else "F32"
        self.headers = plain | {name: (each.file, each.shape, dtype) for name, each in self._weights.items()}

    def decode(self, name: str) -> Tensor:
        """Return a weight of codes and scales."""
        weight = self._weights[name]
        codes, scales = self._files.read(weight.codes), self._files.read(weight.scales)
        return from_mxfp4(codes, scales).mT if self._mxfp4 else from_tiles(codes, scales, self._tile)

    def _sides(self, described: Mapping[str, Any]) -> tuple[int, int]:
        sides = described.get("weight_block_size", [_TILE, _TILE])
        whole = isinstance(sides, list) and len(sides) == 2
        if not whole or not all(isinstance(side, int) and side > 0 for side in sides):
            raise UserError(
                f"model.hf: {self._folder / 'config.json'} has weight_block_size {sides!r}; it must be two "
                "whole numbers of at least 1"
            )
        return sides[0], sides[1]

    def _tiled(self, files: Mapping[str, Header]) -> Iterator[tuple[str, _Weight]]:
        high, wide = self._tile
        for scales, header in files.items():
            if not scales.endswith(".weight_scale_inv"):
                continue
            name = scales.removesuffix("_scale_inv")
            if name not in files or len(files[name][1]) != 2 or files[name][2] != "F8_E4M3":
                raise self._wrong(name, "has scales but no codes in fp8")
            file, (rows, columns), _ = files[name]
            if header[1] != (-(-rows // high), -(-columns // wide)) or header[2] not in ("F32", "BF16"):
                raise self._wrong(name, f"has scales of shape {list(header[1])} in {header[2]}")
            yield name, _Weight(name, scales, file, (rows, columns))

    def _packed(self, files: Mapping[str, Header]) -> Iterator[tuple[str, _Weight]]:
        for codes, (file, shape, dtype) in files.items():
            if not codes.endswith("_blocks"):
                continue
            name = codes.removesuffix("_blocks")
            scales = f"{name}_scales"
            if len(shape) != 4 or shape[3] != _BLOCK // 2 or dtype != "U8":
                raise self._wrong(name, f"has blocks of shape {list(shape)} in {dtype}")
            if scales not in files or files[scales][1:] != (shape[:3], "U8"):
                raise self._wrong(name, "has blocks but no scales that fit them")
            experts, rows, blocks, _ = shape
            yield name, _Weight(codes, scales, file, (experts, blocks * _BLOCK, rows))

    def _wrong(self, name: str, what: str) -> UserError:
        return UserError(
            f"model.hf: {self._folder}: the tensor {name} {what}; give another copy of the model"
        )


def coded_weights(
    folder: Path, config: Mapping[str, Any], files: TensorStore
) -> BlockScaled | QuantisedLayers:
    """The tensors of a folder by names of what they stand for, by its `quantization_config`."""
    given = config.get(KEY)
    if given is None or (isinstance(given, dict) and given.get("quant_method") in ("fp8", "mxfp4")):
        return BlockScaled(folder, config, files)
    return QuantisedLayers(folder, config, files)


def from_tiles(codes_OI: Tensor, scales: Tensor, sides: tuple[int, int]) -> Tensor:
    """The weight (O, I) in fp32 of codes in fp8 whose blocks have a scale each."""
    rows, columns = codes_OI.shape
    wide = scales.float().repeat_interleave(sides[1], 1)[:, :columns]
    return codes_OI.float().mul_(wide.repeat_interleave(sides[0], 0)[:rows])


def from_mxfp4(blocks: Tensor, scales: Tensor) -> Tensor:
    """The weights (E, O, I) in bf16 of blocks (E, O, I / 32, 16) and scales (E, O, I / 32)."""
    numbers = torch.tensor([*_E2M1, *(-each for each in _E2M1)])
    experts, rows, count, _ = blocks.shape
    found = blocks.new_empty(experts, rows, count * _BLOCK, dtype=torch.bfloat16)
    for into, packed, exponents in zip(found, blocks, scales, strict=True):
        codes = torch.stack([packed & 15, packed >> 4], -1).int()
        factor = torch.ldexp(torch.ones(()), exponents.int() - _EXPONENT)
        into.copy_((numbers[codes].flatten(2) * factor.unsqueeze(2)).flatten(1))
    return found
