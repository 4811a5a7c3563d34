"""Models whose published weights are in MXFP4 (Open Compute Project 2023, Microscaling Formats v1.0), and the
bytes that vLLM holds them in.

Matrices of routed experts are in blocks of 32 numbers of 4 bits, in their inputs, with a scale of 8 bits
each: 4.25 bits a weight. Biases, attention, routers, norms and both ends stay in bf16 (OpenAI 2025,
gpt-oss-120b and gpt-oss-20b model card, section 2.1; `modules_to_not_convert` of their config.json). vLLM
serves them so on GPUs of compute capability 8.0 and more, and pads experts for its Marlin kernels, which it
takes where Triton's are not confirmed: on 8.x and from 11.0 on
(vllm/model_executor/layers/quantization/mxfp4.py at commit 007d5005).
"""

from __future__ import annotations

from math import ceil
from pathlib import Path

from meshwright.hardware.cluster import Device
from meshwright.planner.rank_view import RankView
from meshwright.spec import ModelSpec
from meshwright.spec.hf.json_object import read_json_object
from meshwright.spec.model_names import REPOSITORIES
from meshwright.spec.parameters import Parameter

PRESETS = ("gpt-oss-20b", "gpt-oss-120b")
"""Presets of models that are published in MXFP4."""
BLOCK = 32
"""Numbers that share a scale of one byte."""
_LEAST = 8, 0
"""Least compute capability of a GPU on which vLLM serves them."""
_TRITON = (9, 0), (11, 0)
"""Compute capabilities from the first to below the second on which it pads nothing."""
_SIDES = 256, 128
"""Numbers whose multiples hidden and feed-forward channels are padded to."""


def published_mxfp4(model: ModelSpec) -> str | None:
    """The repository or the folder of a model's weights in MXFP4; None where it has none."""
    if model.preset in PRESETS:
        whole = ModelSpec.model_validate({"preset": model.preset})
        return REPOSITORIES[model.preset][0] if model.parameters == whole.parameters else None
    path = Path(model.hf or "", "config.json")
    if model.hf is None or not path.is_file():
        return None
    described = read_json_object(path, "model.hf").get("quantization_config")
    packed = isinstance(described, dict) and described.get("quant_method") == "mxfp4"
    return str(model.hf) if packed else None


def not_served(device: Device) -> str | None:
    """Why vLLM does not serve MXFP4 on a device; None where it does."""
    if device.capability is None or device.capability >= _LEAST:
        return None
    return f"vLLM serves MXFP4 on GPUs of compute capability 8.0 and more, and {device.name} has less"


def is_packed(parameter: Parameter) -> bool:
    """True for a weight that is published in blocks: a matrix of routed experts."""
    return parameter.expert and len(parameter.shape) == 3


def packed_bytes(view: RankView, device: Device, elements: int) -> float:
    """Bytes of so many elements of experts' matrices, with vLLM's padding for the device's kernels."""
    model, (first, last) = view.spec.model, _TRITON
    assert model.moe is not None
    padded = 1.0
    if device.capability is not None and not first <= device.capability < last:
        ffn = model.moe.ffn // view.spec.layout.etp
        for side, multiple in zip((model.hidden, ffn), _SIDES, strict=True):
            padded *= multiple * ceil(side / multiple) / side
    return padded * elements * (1 / 2 + 1 / BLOCK)
