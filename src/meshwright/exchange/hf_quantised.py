"""Quantised linear layers in HF folders, as compressed-tensors describes and stores them (its version 0.20).

    recipe        format           a layer X (O outputs, I inputs) in the file
    int8          pack-quantized   X.weight_packed, four codes + 128 an int32; X.weight_scale (O, 1)
    int4          pack-quantized   X.weight_packed, eight codes + 8 an int32; X.weight_scale (O, I / group)
    int8-dynamic  int-quantized    X.weight, codes in int8; X.weight_scale (O, 1)
    fp8           float-quantized  X.weight, codes in e4m3; X.weight_scale (O, 1)

Packed codes have their shape in X.weight_shape.
A weight is code * scale, exact in fp32. config.json names the recipe under `quantization_config`, and there
under `ignore` the layers that are not quantised.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, get_args

import torch
from torch import Tensor

from meshwright.exchange.hf_state_dict import HfTensor, Shapes, hf_tensors, without_further
from meshwright.exchange.parameter_source import ParameterSource
from meshwright.exchange.tensor_store import DecodedTensors, Header, TensorStore
from meshwright.model.quantisation import BITS, DYNAMIC, Codes, quantise
from meshwright.spec import ModelSpec, UserError
from meshwright.spec.low_precision_rules import is_rounded
from meshwright.spec.precision import Quantised

KEY = "quantization_config"
FORMATS: dict[Quantised, str] = {
    "int8": "pack-quantized", "int4": "pack-quantized", "int8-dynamic": "int-quantized",
    "fp8": "float-quantized",
}  # fmt: skip
SUFFIXES = (".weight_packed", ".weight_scale", ".weight_shape", ".weight")
WORD = 32
"""Bits of a word that codes are packed in."""


@dataclass(frozen=True)
class Quantisation:
    """How a folder's linear layers are quantised: all of the blocks' but those of `kept` modules.

    `group` columns share a scale, or all of a row (0).
    """

    recipe: Quantised
    group: int
    kept: tuple[str, ...] = ()

    def config(self) -> dict[str, Any]:
        """The `quantization_config` of config.json."""
        weights = self._numbers(dynamic=False)
        weights |= {"strategy": "group", "group_size": self.group} if self.group else {"strategy": "channel"}
        dynamic = self.recipe in DYNAMIC
        inputs = self._numbers(dynamic=True) | {"strategy": "token"} if dynamic else None
        form = FORMATS[self.recipe]
        layers = {"targets": ["Linear"], "format": form, "weights": weights, "input_activations": inputs}
        return {
            "quant_method": "compressed-tensors",
            "quantization_status": "compressed",
            "format": form,
            "config_groups": {"group_0": layers | {"output_activations": None}},
            "ignore": list(self.kept),
        }

    def _numbers(self, dynamic: bool) -> dict[str, Any]:
        kind = "float" if self.recipe == "fp8" else "int"
        return {"num_bits": BITS[self.recipe], "type": kind, "symmetric": True, "dynamic": dynamic}

    def stored(self, name: str, found: Codes) -> dict[str, Tensor]:
        """The tensors of a file that hold the codes of the weight `name`."""
        stem, scales = name.removesuffix("weight"), found.scales.contiguous()
        if FORMATS[self.recipe] != "pack-quantized":
            return {name: found.codes.contiguous(), f"{stem}weight_scale": scales}
        return {
            f"{stem}weight_packed": pack(found.codes, BITS[self.recipe]),
            f"{stem}weight_scale": scales,
            f"{stem}weight_shape": torch.tensor(found.codes.shape),
        }

    def stored_bytes(self, shape: tuple[int, ...]) -> int:
        """Bytes that a weight of this shape takes in the file."""
        rows, columns = shape
        scales = 2 * rows * (columns // self.group if self.group else 1)
        if FORMATS[self.recipe] != "pack-quantized":
            return rows * columns + scales
        return rows * _words(columns, BITS[self.recipe]) * WORD // 8 + scales + 2 * 8


def quantised_tensors(spec: ModelSpec) -> Iterator[HfTensor]:
    """Yield the tensors of a family's files that recipes quantise: the matrices of blocks but for routers.

    What predicts further tokens is left as it is: no text is written with it, nor calibration done.
    """
    for piece in hf_tensors(without_further(spec)):
        name = piece.parameters[0]
        if is_rounded(name, 2) and piece.hf.endswith(".weight") and not name.endswith("norm.weight"):
            yield piece


def further_matrices(spec: ModelSpec) -> Iterator[str]:
    """Yield the names of the matrices of a layer that predicts further tokens, shared ones too."""
    own = tuple(f"blocks.{layer}." for layer in spec.mtp_layers)
    for piece in hf_tensors(spec) if own else ():
        matrix = piece.hf.endswith(".weight") and not piece.hf.endswith("norm.weight")
        if matrix and (piece.copy or piece.parameters[0].startswith(own)):
            yield piece.hf


class NearestCodes(Mapping[str, Codes]):
    """The codes of a model's layers by name of their weight in HF files, each number rounded to nearest.

    They are made of the source's parameters whenever they are asked for, so they take no memory.
    """

    def __init__(self, model: ModelSpec, source: ParameterSource, how: Quantisation) -> None:
        self._source, self._how = source, how
        pieces = quantised_tensors(model)
        self._pieces = {piece.hf: piece for piece in pieces if _stem(piece.hf) not in how.kept}

    def __getitem__(self, name: str) -> Codes:
        weight = self._pieces[name].join(self._source, torch.float32)
        return quantise(weight, self._how.recipe, self._how.group)

    def __contains__(self, name: object) -> bool:
        return name in self._pieces

    def __iter__(self) -> Iterator[str]:
        return iter(self._pieces)

    def __len__(self) -> int:
        return len(self._pieces)


def pack(codes_OI: Tensor, bits: int) -> Tensor:
    """Codes in int8 as int32 words (O, ceil(I bits / 32)), the first in the lowest bits, above zero."""
    columns = codes_OI.shape[1]
    short = _words(columns, bits) * WORD // bits - columns
    raised = torch.nn.functional.pad(codes_OI.to(torch.int16) + 2 ** (bits - 1), (0, short)).to(torch.uint8)
    if bits == 4:
        raised = raised[:, 0::2] | raised[:, 1::2] << 4
    return raised.contiguous().view(torch.int32)


def unpack(words: Tensor, bits: int, columns: int) -> Tensor:
    """The inverse of `pack`: codes (O, columns) in int8."""
    raised = words.contiguous().view(torch.uint8)
    if bits == 4:
        raised = torch.stack([raised & 15, raised >> 4], -1).flatten(1)
    return (raised[:, :columns].to(torch.int16) - 2 ** (bits - 1)).to(torch.int8)


def _words(columns: int, bits: int) -> int:
    return -(-columns * bits // WORD)


class _Layer(NamedTuple):
    """Where the codes and scales of a weight are, and its shape."""

    codes: Header
    scales: Header
    shape: tuple[int, ...]


class QuantisedLayers(DecodedTensors):
    """The tensors of an HF folder with quantised weights by names of what they stand for (`TensorStore`).

    Raises `UserError` for a `quantization_config` that is not one of the recipes here, and for tensors that
    do not fit together.
    """

    def __init__(self, folder: Path, config: Mapping[str, Any], files: TensorStore) -> None:
        super().__init__(files)
        self._folder = folder
        self.quantisation = read_quantisation(folder, config)
        self._layers = dict(self._find(files.headers))
        self._made_of = {name: (each.codes, each.scales) for name, each in self._layers.items()}
        parts = {stem + suffix for stem in map(_stem, self._layers) for suffix in SUFFIXES}
        plain = {name: header for name, header in files.headers.items() if name not in parts}
        self.headers = plain | {
            name: (each.codes[0], each.shape, "F32") for name, each in self._layers.items()
        }

    def weights(self, known: Iterable[str]) -> list[str]:
        """Those of the `known` tensors that are quantised."""
        return [name for name in known if name in self._layers]

    def decode(self, name: str) -> Tensor:
        """Return a quantised weight in fp32."""
        layer = self._layers[name]
        bits, packed = BITS[self.quantisation.recipe], _is_packed(self.quantisation.recipe)
        codes = self._files.read(f"{_stem(name)}.weight_packed" if packed else name)
        codes = unpack(codes, bits, layer.shape[1]) if packed else codes
        return Codes(codes, self._files.read(f"{_stem(name)}.weight_scale")).values()

    def _find(self, files: Mapping[str, Header]) -> Iterator[tuple[str, _Layer]]:
        recipe, group = self.quantisation.recipe, self.quantisation.group
        for name, scales in files.items():
            if not name.endswith(".weight_scale"):
                continue
            stem = _stem(name)
            codes = files.get(f"{stem}.weight_packed" if _is_packed(recipe) else f"{stem}.weight")
            shape = self._shape(stem, files) if _is_packed(recipe) else (codes or scales)[1]
            if codes is None or shape is None or len(shape) != 2:
                raise self._wrong(stem, "lacks a part of its weight")
            rows, columns = shape
            stored = (rows, _words(columns, BITS[recipe])) if _is_packed(recipe) else (rows, columns)
            wide = -(-columns // group) if group else 1
            dtype = {"pack-quantized": "I32", "int-quantized": "I8", "float-quantized": "F8_E4M3"}
            if codes[1:] != (stored, dtype[FORMATS[recipe]]) or (group and columns % group):
                raise self._wrong(stem, f"has codes of shape {list(codes[1])} in {codes[2]}")
            if scales[1] != (rows, wide) or scales[2] not in ("BF16", "F32", "F16"):
                raise self._wrong(stem, f"has scales of shape {list(scales[1])} in {scales[2]}")
            yield f"{stem}.weight", _Layer(codes, scales, shape)

    def _shape(self, stem: str, files: Mapping[str, Header]) -> tuple[int, ...] | None:
        name = f"{stem}.weight_shape"
        if name not in files or files[name][1] != (2,):
            return None
        rows, columns = self._files.read(name).tolist()
        return (int(rows), int(columns)) if rows > 0 and columns > 0 else None

    def _wrong(self, stem: str, what: str) -> UserError:
        return UserError(
            f"model.hf: {self._folder}: the layer {stem} {what}, which is not what its config.json says "
            f"({self.quantisation.recipe}); give another copy of the model"
        )


def read_quantisation(folder: Path, config: Mapping[str, Any]) -> Quantisation:
    """The recipe of a folder's `quantization_config`. Raises `UserError` for any other."""
    given = config[KEY]
    method = given.get("quant_method") if isinstance(given, dict) else None
    groups = given.get("config_groups") if isinstance(given, dict) else None
    for recipe in get_args(Quantised):
        for group in (32, 64, 128) if recipe == "int4" else (0,):
            known = Quantisation(recipe, group)
            if isinstance(groups, dict) and _same(known.config(), given):
                ignored = given.get("ignore") or ()
                return Quantisation(recipe, group, tuple(str(name) for name in ignored))
    raise UserError(
        f"model.hf: {folder} is quantised in a way that is not read ({KEY} of {method!r}); read are "
        f"compressed-tensors' int8 and int4 of symmetric weights, and int8 and fp8 with dynamic inputs, "
        f"fp8 of blocks, and mxfp4: give such a folder, or the model in bf16"
    )


def _same(known: Mapping[str, Any], given: Mapping[str, Any]) -> bool:
    """True if two `quantization_config`s have the same format and one group of the same numbers."""
    groups = [each.get("config_groups") for each in (known, given)]
    layers = [next(iter(group.values())) for group in groups if isinstance(group, dict) and len(group) == 1]
    if given.get("quant_method") != known["quant_method"] or given.get("format") != known["format"]:
        return False
    if len(layers) != 2 or not isinstance(layers[1], dict) or layers[1].get("targets") != ["Linear"]:
        return False
    if any(given.get(key) for key in ("kv_cache_scheme", "sparsity_config")):
        return False
    return all(_agree(layers[0][part], layers[1].get(part)) for part in ("weights", "input_activations"))


def _agree(known: Mapping[str, Any] | None, given: object) -> bool:
    if known is None or not isinstance(given, dict):
        return known is None and given is None
    usual = {"symmetric": True, "dynamic": False}
    return not given.get("actorder") and all(
        given.get(key, usual.get(key)) == value for key, value in known.items()
    )


def _is_packed(recipe: Quantised) -> bool:
    return FORMATS[recipe] == "pack-quantized"


def _stem(name: str) -> str:
    return name.rpartition(".")[0]


def stored_bytes(spec: ModelSpec, shapes: Shapes, quantisation: Quantisation | None) -> int:
    """Bytes of all tensors of a model's folder in bf16, with its linear layers quantised, if they are."""
    quantised = {piece.hf for piece in quantised_tensors(spec)} if quantisation is not None else set()
    total = 0
    for piece in hf_tensors(spec):
        if quantisation is not None and piece.hf in quantised and _stem(piece.hf) not in quantisation.kept:
            rows, columns = piece.shape(shapes)
            total += quantisation.stored_bytes((rows, columns))
        else:
            total += piece.elements(shapes) * (4 if piece.exact else 2)
    return total
