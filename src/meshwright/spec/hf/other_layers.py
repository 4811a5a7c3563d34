"""Families of Hugging Face models whose layers are of other kinds than attention, by the kind."""

from __future__ import annotations

_FAMILIES = {
    "linear-attention": (
        "bailing_hybrid", "kimi_linear", "minimax", "olmo_hybrid", "qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text",
        "qwen3_5_text", "qwen3_next", "rwkv",
    ),
    "state-space": (
        "bamba", "falcon_h1", "falcon_mamba", "granitemoehybrid", "jamba", "mamba", "mamba2", "nemotron_h",
        "zamba", "zamba2",
    ),
    "convolution": ("lfm2", "lfm2_moe"),
    "recurrent": ("recurrent_gemma", "xlstm"),
}  # fmt: skip

OTHER_LAYERS = {name: kind for kind, names in _FAMILIES.items() for name in names}
"""`model_type` of a config -> the kind of layers that the decoder does not compute."""
