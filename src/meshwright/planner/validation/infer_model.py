"""The model of a published run, from its row's shape, name and number of parameters."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from meshwright.planner.validation.table import INTEGERS, PredictionError, Row, first_match, short
from meshwright.spec import ModelSpec, MoeSpec
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
    (r"gpt|mpt|bloom|\bopt|nlg|turing", [_GPT]),
)
"""Pattern of a model's name -> the families that it may be of; the first match counts. Without one, any."""
_VOCABULARY = 51200
"""GPT-2's 50,257, padded as Megatron-LM does for 8 tensor ranks."""
_UNKNOWN = "neither its layers nor its size tell which model it is"
_OF_EXPERTS = ("experts", "top_k", "moe_ffn", "shared_ffn")
_NEAR = 0.1
"""Largest relative difference between a row's number of parameters and that of its shape. Source: assumed."""
_OTHERS = (
    (r"mamba|jamba|zamba|hymba|bamba|samba|falcon[- _]?h1|granite[- _]?4", "state-space layers"),
    (r"nemotron[- _]?(h|nano|3)\b|\bssm\b|hybrid|recurrent|griffin|\blfm", "state-space layers"),
    (r"rwkv|retnet|hyena|xlstm|minimax|qwen3[- _]?next|kimi[- _]?linear|delta", "linear attention"),
    (r"\bm?t5\b|\but?l2\b|\bbart\b|encoder[- ]?decoder", "an encoder"),
    (r"\bbert|roberta|\bvit\b|\bdit\b|diffusion|\bflux\b|resnet|clip\b|whisper", "no causal decoder"),
    (r"\bvl\b|vision", "an encoder of images"),
    (r"\bq?lora\b|\bpeft\b|adapter", "adapters, not all of its parameters"),
)
"""Pattern of a model's name -> what it has, or trains, that no decoder of attention layers has."""


def model_of(row: Row, length: int) -> ModelSpec:
    """The model with sequences of `length` tokens.

    Raises `PredictionError` if the row does not tell it, if its number of parameters is not that of its
    shape, and for a model that is no decoder of attention layers.
    """
    if (other := first_match(_OTHERS, row.words["model"].lower())) is not None:
        raise PredictionError(
            f"the model '{short(row.words['model'])}' has {other}; decoders of attention layers are predicted"
        )
    if (preset := _preset(row)) is not None:
        return _limited(row, preset)
    if (hidden := row.whole("hidden")) is None:
        raise PredictionError(_UNKNOWN)
    candidates, layers, size = (
        _candidates(row, hidden, length),
        row.whole("layers"),
        row.numbers.get("params_b"),
    )
    chosen = candidates[0]
    if layers is None:
        row.infer("layers", chosen.layers)
    elif size is not None and layers > 1:  # one layer may be of a model of that size
        chosen = min(candidates, key=lambda model: _difference(model, size))
        if (difference := _difference(chosen, size)) > _NEAR:
            raise PredictionError(
                f"its {size:g} billion parameters are {difference:.0%} off the {chosen.parameters / 1e9:.4g} "
                "billion of its shape"
            )
    for name, value in {**_shape(chosen), "activation": chosen.activation, "tied": chosen.tied}.items():
        if (
            row.whole(name) is None
            and name not in row.inferred
            and (chosen.moe is not None or name not in _OF_EXPERTS)
        ):
            row.derive(name, value)
    return _limited(row, chosen)


def _preset(row: Row) -> ModelSpec | None:
    """The preset that a row names; None if none has its name, or the row has another shape of its own.

    Raises `PredictionError` if a row without a shape contradicts the preset.
    """
    name, hidden = _plain(row.words["model"].split("(")[0]), row.whole("hidden")
    preset = next((preset for preset in PRESETS if _plain(preset) == name), None)
    if preset is None:
        return None
    known = ModelSpec.model_validate({"preset": preset})
    contradiction = _contradiction(row, preset, known)
    if not contradiction:
        (row.infer if hidden is None else row.derive)("shape", preset)
        return known
    if hidden is None:
        raise PredictionError(f"{contradiction}; give the whole shape with hidden, or leave that cell empty")
    return None


def _candidates(row: Row, hidden: int, length: int) -> list[ModelSpec]:
    """The models that the shape of a row may be: of each family, tied and not, the likelier ones first."""
    layers, size = row.whole("layers"), row.numbers.get("params_b")
    heads = row.whole_or("heads", max(1, hidden // 128))  # source: assumed, heads of 128 channels
    vocabulary, experts = row.whole_or("vocab", _VOCABULARY), row.whole("experts") or 0
    top_k = row.whole_or("top_k", 2) if experts > 1 else 0
    if experts > 1 and not top_k:
        raise PredictionError(
            f"its top_k = 0 is of none of its {experts} experts; give how many a token takes"
        )
    candidates: list[ModelSpec] = []
    for family in first_match(_FAMILIES, row.words["model"].lower()) or [_GPT, _LLAMA]:
        gated = family["activation"] == "swiglu"
        # Source: Touvron et al. 2023, two thirds of 4 x hidden, rounded up to a multiple of 256.
        ffn = row.whole("ffn") or (-(-8 * hidden // 768) * 256 if gated else 4 * hidden)
        shape = {
            "preset": None,
            "hidden": hidden,
            "heads": heads,
            "kv_heads": row.whole("kv_heads") or heads,
            "head_dim": row.whole("head_dim") or _head_dim(hidden, heads),
            "vocab_size": vocabulary,
            "max_seq_len": length,
            "ffn": ffn,
            **family,
        }
        if experts > 1:
            moe_ffn, shared = row.whole("moe_ffn") or ffn, row.whole("shared_ffn") or 0
            shape["moe"] = {"experts": experts, "top_k": top_k, "ffn": moe_ffn, "shared_ffn": shared}
        for tied in (True, False):
            shape["tied"] = tied
            candidates.append(ModelSpec.model_validate({**shape, "layers": layers or _depth(shape, size)}))
    return candidates


def _limited(row: Row, model: ModelSpec) -> ModelSpec:
    """The model with the capacity that the row states of its experts. Raises `PredictionError` for one of no
    experts, and for padding to none."""
    capacity = row.numbers.get("capacity_factor")
    if capacity is None:
        if row.words["moe_pad_to_capacity"] == "yes":
            raise PredictionError(
                "its moe_pad_to_capacity = yes pads rows to a capacity, of which it has none; "
                "give capacity_factor, or an empty cell"
            )
        return model
    if model.moe is None:
        raise PredictionError(
            f"its capacity_factor = {capacity:g} is of experts, of which it has none; give their number, or "
            "an empty cell"
        )
    return model.model_copy(update={"moe": model.moe.model_copy(update={"capacity_factor": capacity})})


def _difference(model: ModelSpec, size: float) -> float:
    """Relative difference of a model's number of parameters to `size` billions."""
    return abs(model.parameters / 1e9 / size - 1)


def _head_dim(hidden: int, heads: int) -> int:
    """Channels of a head: an equal part, or the next power of two where that is odd."""
    part = max(1, hidden // heads)
    return part if part % 2 == 0 else 1 << part.bit_length() - (part == 1)


def _depth(shape: dict[str, Any], size: float | None) -> int:
    """Number of layers, from the number of parameters in billions. Raises `PredictionError`."""
    if size is not None:
        one, two = (ModelSpec.model_validate({**shape, "layers": layers}).parameters for layers in (1, 2))
        depth = max(1, round((size * 1e9 - one) / (two - one)) + 1)
        if depth <= INTEGERS["layers"][1]:
            return depth
    raise PredictionError(_UNKNOWN)


def _shape(model: ModelSpec) -> dict[str, int]:
    """The numbers of a model's shape, by column; a dense model is one of one expert."""
    moe = model.moe or MoeSpec(experts=1, top_k=1, ffn=model.ffn)
    same = ("layers", "hidden", "ffn", "heads", "kv_heads", "head_dim")
    experts = {"experts": moe.experts, "top_k": moe.top_k, "moe_ffn": moe.ffn, "shared_ffn": moe.shared_ffn}
    return {**{name: getattr(model, name) for name in same}, "vocab": model.vocab_size, **experts}


def _contradiction(row: Row, preset: str, model: ModelSpec) -> str:
    """The first cell that a preset's model contradicts, with both values; or an empty text."""
    for name, known in _shape(model).items():
        others = (0,) if model.moe is None and name in ("experts", "top_k") else ()
        if name == "ffn" and model.moe is not None:
            others = (model.moe.ffn,)
        if (value := row.whole(name)) is not None and value not in (known, *others):
            return f"its {name} = {value} is not the {known} of {preset}"
    size = row.numbers.get("params_b")
    if size is not None and _difference(model, size) >= _NEAR:
        return f"its params_b = {size:g} is not the {model.parameters / 1e9:.4g} of {preset}"
    return ""


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower()).replace("llama31", "llama3")
