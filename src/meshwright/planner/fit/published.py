"""Models whose published weights are in blocks of 4 or 8 bits, and the bytes that vLLM holds them in.

MXFP4 (Open Compute Project 2023, Microscaling Formats v1.0): matrices of routed experts are in blocks of 32
numbers of 4 bits, in their inputs, with a scale of 8 bits each: 4.25 bits a weight. Biases, attention,
routers, norms and both ends stay in bf16 (OpenAI 2025, gpt-oss-120b and gpt-oss-20b model card, section
2.1; `modules_to_not_convert` of their config.json). vLLM pads experts for its Marlin kernels, which it takes
where Triton's are not confirmed: on 8.x and from 11.0 on (vllm/model_executor/layers/quantization/mxfp4.py
at commit 007d5005).

Blockwise fp8 (DeepSeek-AI 2024, DeepSeek-V3, section 3.3): matrices of blocks, of attention too, are in
tiles of 128 by 128 numbers of 8 bits with a scale in fp32; routers, norms and both ends stay in bf16.
vLLM's kernels take ranks' shares of whole tiles (`validate_fp8_block_shape`).

vLLM serves both on GPUs of compute capability 8.0 and more.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, prod
from pathlib import Path
from typing import Literal

from meshwright.hardware.cluster import Device
from meshwright.planner.rank_view import RankView
from meshwright.spec import ModelSpec
from meshwright.spec.hf.json_object import read_json_object
from meshwright.spec.low_precision_rules import rounded_in_blocks
from meshwright.spec.model_names import REPOSITORIES
from meshwright.spec.parameters import Parameter, Piece
from meshwright.spec.precision import FP8_TILE

PublishedFormat = Literal["mxfp4", "fp8-blockwise"]
PRESETS: dict[str, PublishedFormat] = {
    "gpt-oss-20b": "mxfp4",
    "gpt-oss-120b": "mxfp4",
    "deepseek-v3": "fp8-blockwise",
    "kimi-k2": "fp8-blockwise",
}
"""Presets of models that are published in blocks -> their format."""
WORDS: dict[str, str] = {
    "mxfp4": "experts in 4.25 bits a weight",
    "fp8-blockwise": "matrices of blocks in 8 bits with a scale for 128 by 128",
}
"""Published format -> its words."""
BLOCK = 32
"""Numbers that share a scale of one byte in MXFP4."""
_TILE_SCALE = 4
"""Bytes of the scale of a tile in fp8."""
_LEAST = 8, 0
"""Least compute capability of a GPU on which vLLM serves them."""
_TRITON = (9, 0), (11, 0)
"""Compute capabilities from the first to below the second on which it pads nothing."""
_SIDES = 256, 128
"""Numbers whose multiples hidden and feed-forward channels are padded to."""


@dataclass(frozen=True)
class PublishedWeights:
    """Weights of a model as they are published."""

    form: PublishedFormat
    source: str
    """The repository on the hub, or the folder."""

    @property
    def words(self) -> str:
        """The words for its format."""
        return WORDS[self.form]


def published_weights(model: ModelSpec) -> PublishedWeights | None:
    """A model's weights as they are published in blocks; None where they are not."""
    if (form := PRESETS.get(model.preset or "")) is not None:
        whole = ModelSpec.model_validate({"preset": model.preset})
        source = REPOSITORIES[str(model.preset)][0]
        return PublishedWeights(form, source) if model.parameters == whole.parameters else None
    described = _quantisation(model)
    found = None if described is None else _form_of(described, model)
    return None if found is None else PublishedWeights(found, str(model.hf))


def other_format(model: ModelSpec) -> str | None:
    """The format that an HF folder's config.json says of its weights, where no bytes of it are known."""
    described = _quantisation(model)
    if described is None or _form_of(described, model) is not None:
        return None
    return str(described.get("quant_method"))


def _quantisation(model: ModelSpec) -> dict[str, object] | None:
    """The table `quantization_config` of the config.json of an HF folder; None where there is none."""
    path = Path(model.hf or "", "config.json")
    if model.hf is None or not path.is_file():
        return None
    found = read_json_object(path, "model.hf").get("quantization_config")
    return found if isinstance(found, dict) else None


def _form_of(described: dict[str, object], model: ModelSpec) -> PublishedFormat | None:
    if (method := described.get("quant_method")) == "mxfp4":
        return "mxfp4" if model.moe is not None else None
    tiles = described.get("weight_block_size") == [FP8_TILE, FP8_TILE]
    return "fp8-blockwise" if method == "fp8" and tiles else None


def not_served(device: Device, form: str) -> str | None:
    """Why vLLM does not serve a published format on a device; None where it does."""
    if device.capability is None or device.capability >= _LEAST:
        return None
    return f"vLLM serves {form} on GPUs of compute capability 8.0 and more, and {device.name} has less"


def is_packed(parameter: Parameter, form: str) -> bool:
    """True for a weight that is published in blocks: in MXFP4 a matrix of routed experts."""
    if form == "mxfp4":
        return parameter.expert and len(parameter.shape) == 3
    return rounded_in_blocks(parameter)


def is_served(parameter: Parameter, piece: Piece, form: str) -> bool:
    """True if vLLM's kernels take a rank's share of a weight: in fp8 whole tiles where it is cut."""
    if form == "mxfp4" or not is_packed(parameter, form):
        return True
    sides = zip(parameter.shape[-2:], piece.local_shape[-2:], strict=True)
    return all(whole == own or own % FP8_TILE == 0 for whole, own in sides)


def packed_bytes(view: RankView, device: Device, piece: Piece, form: str) -> float:
    """Bytes of a rank's share of a packed weight, in MXFP4 with vLLM's padding for the device's kernels."""
    elements = prod(piece.local_shape)
    if form == "mxfp4":
        return elements * _padding(view, device) * (1 / 2 + 1 / BLOCK)
    rows, columns = piece.local_shape[-2:]
    tiles = ceil(rows / FP8_TILE) * ceil(columns / FP8_TILE) * elements / (rows * columns)
    return elements + _TILE_SCALE * tiles


def _padding(view: RankView, device: Device) -> float:
    """Elements that vLLM holds of experts' matrices for each that there is."""
    model, (first, last) = view.spec.model, _TRITON
    assert model.moe is not None
    padded = 1.0
    if device.capability is not None and not first <= device.capability < last:
        ffn = model.moe.ffn // view.spec.layout.etp
        for side, multiple in zip((model.hidden, ffn), _SIDES, strict=True):
            padded *= multiple * ceil(side / multiple) / side
    return padded
