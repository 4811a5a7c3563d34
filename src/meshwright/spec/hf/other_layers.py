"""Hugging Face models that no family computes: those with other layers than attention, or other inputs."""

from __future__ import annotations

_FAMILIES = {
    "linear-attention": (
        "bailing_hybrid", "kimi_linear", "minimax", "olmo_hybrid", "qwen3_5", "qwen3_5_moe",
        "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next", "rwkv",
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

OTHER_INPUTS = ("vision_config", "audio_config", "image_token_id", "image_token_index")
"""Keys of a config by which a model takes images or sound."""
