"""Which model a published run trained, from its row's shape, name and number of parameters."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from meshwright.planner.validation.table import MOST
from meshwright.spec import ModelSpec
from meshwright.spec.presets import PRESETS

if TYPE_CHECKING:
    from meshwright.planner.validation.cases import Row
    from meshwright.planner.validation.infer_layout import Guess

_GPT: Mapping[str, Any] = {
    "norm": "layernorm",
    "activation": "gelu",
    "position": "learned",
    "qkv_bias": True,
    "out_bias": True,
    "mlp_bias": True,
}
_LLAMA: Mapping[str, Any] = {"norm": "rmsnorm", "activation": "swiglu", "position": "rope"}
_GATED = r"llama|qwen|mistral|mixtral|deepseek|nemotron-h|olmo|yi-|gemma"
_PLAIN = r"gpt|mpt|bloom|opt|nlg|turing|palm"
_VOCABULARY = 51200
"""GPT-2's 50,257, rounded up as Megatron-LM does for 8 tensor ranks."""


def model_of(row: Row, length: int, guess: Guess) -> ModelSpec | None:
    """The model, or None where the row does not tell enough."""
    hidden, layers = row.whole("hidden"), row.whole("layers")
    if hidden is None:
        return _preset(row, guess)
    heads = row.whole("heads") or max(1, hidden // 128)
    if row.whole("heads") is None:
        guess.say("heads", heads)
    vocabulary = row.whole("vocab")
    if vocabulary is None:
        vocabulary = _VOCABULARY
        guess.say("vocab", vocabulary)
    shape: dict[str, Any] = {
        "preset": None,
        "hidden": hidden,
        "heads": heads,
        "kv_heads": row.whole("kv_heads") or heads,
        "head_dim": hidden // heads,
        "vocab_size": vocabulary,
        "max_seq_len": length,
    }
    kinds = _kinds(row)
    size = row.numbers.get("params_b")
    found: list[tuple[float, ModelSpec]] = []
    for kind in kinds:
        ffn = row.whole("ffn") or (
            4 * hidden if kind["activation"] != "swiglu" else -(-8 * hidden // 768) * 256
        )
        for tied in (True, False):
            made = {**shape, **kind, "ffn": ffn, "tied": tied, **_experts(row, ffn)}
            depth = layers or _depth(made, size)
            if depth is None or depth > MOST["layers"]:
                return None
            model = ModelSpec.model_validate({**made, "layers": depth})
            found.append((abs(model.parameters / 1e9 / size - 1) if size else 1.0, model))
    if layers is None:
        guess.say("layers", found[0][1].layers)
        return found[0][1]
    off, nearest = min(found, key=lambda each: each[0])
    return nearest if off < _NEAR else found[0][1]


_NEAR = 0.1
"""Share by which a model's parameters may differ from the row's for it to tell gated layers and tied ends."""


def _kinds(row: Row) -> list[Mapping[str, Any]]:
    """Gated or not, by the model's name; both where that does not tell."""
    name = row.words["model"].lower()
    if re.search(_GATED, name):
        return [_LLAMA]
    return [_GPT] if re.search(_PLAIN, name) else [_GPT, _LLAMA]


def _experts(row: Row, ffn: int) -> dict[str, Any]:
    experts, top = row.whole("experts"), row.whole("top_k")
    if not experts or experts < 2:
        return {}
    return {"moe": {"experts": experts, "top_k": top or 2, "ffn": ffn}}


def _depth(made: dict[str, Any], size: float | None) -> int | None:
    """Layers, from the number of parameters."""
    if size is None:
        return None
    one, two = (ModelSpec.model_validate({**made, "layers": layers}).parameters for layers in (1, 2))
    return max(1, round((size * 1e9 - one) / (two - one)) + 1)


def _preset(row: Row, guess: Guess) -> ModelSpec | None:
    """A model that its name tells."""
    name = re.sub(r"[^a-z0-9]", "", row.words["model"].lower()).replace("llama31", "llama3")
    for preset in sorted(PRESETS, key=len, reverse=True):
        if re.sub(r"[^a-z0-9]", "", preset) == name:
            guess.say("shape", preset)
            return ModelSpec.model_validate({"preset": preset})
    return None
