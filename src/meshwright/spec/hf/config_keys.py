"""Keys of an HF `config.json` that several families have, as tables."""

from __future__ import annotations

from typing import Any

from meshwright.spec.hf.json_object import FACTOR, FACTORS, FLAG, NUMBER, PAIR, SIZE, JsonKey

Keys = dict[str, JsonKey]
"""Field of a part of the spec -> its key. Keys with defaults may be absent: those are of transformers."""


MLA_KEYS: Keys = {
    "kv_rank": JsonKey("kv_lora_rank", SIZE, 512),
    "q_rank": JsonKey("q_lora_rank", SIZE, 1536, nullable=True),
    "rope_dim": JsonKey("qk_rope_head_dim", PAIR, 64),
    "v_dim": JsonKey("v_head_dim", SIZE, 128),
}

_FACTOR = {"factor": JsonKey("factor", NUMBER)}
_ORIGINAL = {"original_max_seq_len": JsonKey("original_max_position_embeddings", SIZE)}
ROPE_KEYS: dict[str, Keys] = {
    "linear": _FACTOR,
    "llama3": {
        **_FACTOR,
        **_ORIGINAL,
        "low_freq_factor": JsonKey("low_freq_factor", NUMBER),
        "high_freq_factor": JsonKey("high_freq_factor", NUMBER),
    },
    "yarn": {
        **_FACTOR,
        **_ORIGINAL,
        "attention_factor": JsonKey("attention_factor", NUMBER, nullable=True),
        "truncate": JsonKey("truncate", FLAG, True),
        "beta_fast": JsonKey("beta_fast", NUMBER, 32.0),
        "beta_slow": JsonKey("beta_slow", NUMBER, 1.0),
        "mscale": JsonKey("mscale", FACTOR, 0.0),
        "mscale_all_dim": JsonKey("mscale_all_dim", FACTOR, 0.0),
    },
    "longrope": {
        **_FACTOR,
        **_ORIGINAL,
        "short_factors": JsonKey("short_factor", FACTORS),
        "long_factors": JsonKey("long_factor", FACTORS),
        "attention_factor": JsonKey("attention_factor", NUMBER, nullable=True),
    },
}
"""`rope_type` -> the keys of its scaling."""


def written(part: Any, keys: Keys) -> dict[str, Any]:
    """Return the keys of `config.json` for the fields of a part of the spec."""
    fields = {key.name: key.convert(getattr(part, field)) for field, key in keys.items()}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in fields.items()}
