"""The model of a published run, from its row's shape, name and number of parameters."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from meshwright.planner.validation.table import INTEGERS, PredictionError, Row, first_match
from meshwright.spec import ModelSpec
from meshwright.spec.presets import PRESETS

_GPT: Mapping[str, Any] = {
    "norm": "layernorm",
    "activation": "gelu",
    "position": "learned",
    "qkv_bias": True,
    "out_bias": True,
    "mlp_bias": True,
}
_LLAMA: Mapping[str, Any] = {"norm": "rmsnorm", "activation": "swiglu", "position": "rope"}
_FAMILIES = (
    (r"llama|qwen|mistral|mixtral|deepseek|nemotron-h|olmo|yi-|gemma", [_LLAMA]),
    (r"gpt|mpt|bloom|opt|nlg|turing|palm", [_GPT]),
)
"""Pattern of a model's name -> the families that it may be of; the first match counts. Without one, any."""
_VOCABULARY = 51200
"""GPT-2's 50,257, padded as Megatron-LM does for 8 tensor ranks."""
_UNKNOWN = "neither its layers nor its size tell which model it is"
_NEAR = 0.1
"""Relative difference to the row's number of parameters up to which that number settles whether the MLP is
gated and the embeddings are tied. Source: assumed."""


def model_of(row: Row, length: int) -> ModelSpec:
    """The model with sequences of `length` tokens. Raises `PredictionError` if the row does not tell it."""
    hidden, layers, size = row.whole("hidden"), row.whole("layers"), row.numbers.get("params_b")
    if hidden is None:
        return _preset(row)
    heads = row.whole_or("heads", max(1, hidden // 128))  # source: assumed, heads of 128 channels
    vocabulary, experts = row.whole_or("vocab", _VOCABULARY), row.whole("experts") or 0
    candidates: list[tuple[float, ModelSpec]] = []
    for family in first_match(_FAMILIES, row.words["model"].lower()) or [_GPT, _LLAMA]:
        gated = family["activation"] == "swiglu"
        # Source: Touvron et al. 2023, two thirds of 4 x hidden, rounded up to a multiple of 256.
        ffn = row.whole("ffn") or (-(-8 * hidden // 768) * 256 if gated else 4 * hidden)
        shape = {
            "preset": None,
            "hidden": hidden,
            "heads": heads,
            "kv_heads": row.whole("kv_heads") or heads,
            "head_dim": hidden // heads,
            "vocab_size": vocabulary,
            "max_seq_len": length,
            "ffn": ffn,
            **family,
        }
        if experts > 1:
            shape["moe"] = {"experts": experts, "top_k": row.whole("top_k") or 2, "ffn": ffn}
        for tied in (True, False):
            shape["tied"] = tied
            model = ModelSpec.model_validate({**shape, "layers": layers or _depth(shape, size)})
            candidates.append((abs(model.parameters / 1e9 / size - 1) if size else 1.0, model))
    if layers is None:
        row.infer("layers", candidates[0][1].layers)
        return candidates[0][1]
    difference, nearest = min(candidates, key=lambda candidate: candidate[0])
    return nearest if difference < _NEAR else candidates[0][1]


def _depth(shape: dict[str, Any], size: float | None) -> int:
    """Number of layers, from the number of parameters in billions. Raises `PredictionError`."""
    if size is not None:
        one, two = (ModelSpec.model_validate({**shape, "layers": layers}).parameters for layers in (1, 2))
        depth = max(1, round((size * 1e9 - one) / (two - one)) + 1)
        if depth <= INTEGERS["layers"][1]:
            return depth
    raise PredictionError(_UNKNOWN)


def _preset(row: Row) -> ModelSpec:
    """The preset of the row's name. Raises `PredictionError`."""
    name = re.sub(r"[^a-z0-9]", "", row.words["model"].lower()).replace("llama31", "llama3")
    for preset in sorted(PRESETS, key=len, reverse=True):
        if re.sub(r"[^a-z0-9]", "", preset) == name:
            return ModelSpec.model_validate({"preset": row.infer("shape", preset)})
    raise PredictionError(_UNKNOWN)
