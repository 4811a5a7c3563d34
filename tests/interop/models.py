"""The small models that clients open: each learns a text by heart, so that roundings change no token."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers

from meshwright import api
from meshwright.spec.load import load

_SIZES = {
    "layers": 2, "hidden": 128, "ffn": 256, "heads": 4, "kv_heads": 2, "head_dim": 32, "vocab_size": 512,
    "max_seq_len": 512,
}  # fmt: skip
_WINDOWS = {
    "layers": 3,
    "sliding_window": 16,
    "layer_types": "sliding_attention,full_attention,sliding_attention",
}
MODELS: Mapping[str, Mapping[str, Any]] = {
    "dense": {"family": "llama"},
    "tied": {"family": "llama", "tied": True},
    "moe-tiny": {"preset": "moe-tiny", "vocab_size": 512},
    "mixtral": {"family": "mixtral", "moe.experts": 4, "moe.top_k": 2, "moe.ffn": 128},
    "qwen3_moe": {"family": "qwen3_moe", "qk_norm": True, "moe.experts": 4, "moe.top_k": 2, "moe.ffn": 128},
    "qwen2": {"family": "qwen2", "qkv_bias": True},
    "chat": {"family": "qwen2", "qkv_bias": True, "train.steps": 120},
    "qwen3": {"family": "qwen3", "qk_norm": True},
    "gemma3_text": {
        "family": "gemma3_text", "tied": True, "norm_placement": "both", "norm_unit_offset": True,
        "qk_norm": True, "activation": "geglu_tanh", "embedding_scale": 128**0.5, **_WINDOWS,
        "rope_local_base_freq": 1e4, "rope_theta": 1e6, "norm_eps": 1e-6,
    },
    "phi3": {"family": "phi3"},
    "olmo2": {"family": "olmo2", "norm_placement": "post", "qk_norm": True, "qk_norm_over": "all"},
    "cohere2": {
        "family": "cohere2", "tied": True, "parallel_block": True, "norm": "layernorm", "norm_bias": False,
        "rope_layers": "true,false,true", "logit_scale": 0.5, **_WINDOWS, "train.steps": 150,
    },
    "glm4": {
        "family": "glm4", "norm_placement": "both", "rope_dim": 16, "qkv_bias": True,
    },
    "granite": {
        "family": "granite", "embedding_scale": 6.0, "residual_scale": 0.5, "attention_scale": 0.2,
        "logit_scale": 0.25, "train.steps": 200,
    },
    "smollm3": {"family": "smollm3", "tied": True, "layers": 4, "rope_layers": "true,true,true,false"},
    "starcoder2": {
        "family": "starcoder2", "tied": True, "norm": "layernorm", "qkv_bias": True, "out_bias": True,
        "mlp_bias": True, "activation": "gelu_tanh",
    },
    "gemma2": {
        "family": "gemma2", "tied": True, "norm_placement": "both", "norm_unit_offset": True,
        "activation": "geglu_tanh", "embedding_scale": 128**0.5, "attention_softcap": 50.0,
        "logit_softcap": 30.0, "norm_eps": 1e-6, "sliding_window": 16,
        "layer_types": "sliding_attention,full_attention", "train.steps": 150,
    },
    "olmo3": {
        "family": "olmo3", "norm_placement": "post", "qk_norm": True, "qk_norm_over": "all", "layers": 4,
        "sliding_window": 16,
        "layer_types": "sliding_attention,sliding_attention,sliding_attention,full_attention",
    },
    "gpt_oss": {
        "family": "gpt_oss", "attention_sinks": True, "qkv_bias": True, "out_bias": True,
        "moe.experts": 4, "moe.top_k": 2, "moe.ffn": 128, "moe.router_bias": True, "moe.expert_bias": True,
        "moe.activation": "clamped_swiglu", "sliding_window": 16,
        "layer_types": "sliding_attention,full_attention", "rope_scaling.kind": "yarn",
        "rope_scaling.factor": 4.0, "rope_scaling.original_max_seq_len": 128,
    },
    "deepseek_v2": {
        "family": "deepseek_v2", "head_dim": 128, "kv_heads": 4, "norm_eps": 1e-6, "mla.kv_rank": 512,
        "mla.rope_dim": 64, "mla.v_dim": 64, "moe.experts": 4, "moe.top_k": 2, "moe.ffn": 128,
        "moe.shared_ffn": 128, "moe.renormalise": False, "train.steps": 140,
    },
}  # fmt: skip
"""Keys of `[model]` by the name of a case: README's presets, a tied model, and a family of each attention."""

CAPITALS = {
    "France": "Paris", "Italy": "Rome", "Spain": "Madrid", "Norway": "Oslo", "Peru": "Lima",
    "Kenya": "Nairobi", "Japan": "Tokyo", "Egypt": "Cairo", "Cuba": "Havana", "Chad": "Ndjamena",
}  # fmt: skip
PROMPTS = [f"The capital of {country} is" for country in list(CAPITALS)[:5]]


CHAT = "chat"
"""The model of `MODELS` that learns chats by heart."""
QUESTIONS = [f"What is the capital of {country}?" for country in list(CAPITALS)[:8]]
"""Turns of a conversation."""
TEMPLATE = """{% for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def _chats(folder: Path) -> Path:
    """Write chats of eight turns, in several orders, and a tokenizer with a template into a folder."""
    rows = []
    for first in range(len(QUESTIONS)):
        turns = [*QUESTIONS[first:], *QUESTIONS[:first]] if first % 2 else QUESTIONS
        messages = []
        for question in turns:
            city = CAPITALS[question.removesuffix("?").split()[-1]]
            answer = f"It is {city}."
            messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        rows.append({"messages": messages})
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "chats.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=420, special_tokens=special, show_progress=False,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    backend.train_from_iterator([*QUESTIONS, *map("It is {}.".format, CAPITALS.values())] * 9, trainer)
    backend.save(str(folder / "tokenizer.json"))
    config = {"eos_token": "<|im_end|>", "tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return file


def train(name: str, out: Path) -> None:
    """Train a model of `MODELS` in this process, in seconds."""
    text = out.parent / "capitals"
    text.mkdir(parents=True, exist_ok=True)
    for number, (country, city) in enumerate(CAPITALS.items()):
        line = f"The capital of {country} is {city}, and {city} is the capital of {country}. "
        (text / f"{number}.txt").write_text(line * 3)
    keys = {"preset": "tiny", **_SIZES, **MODELS[name]} if "preset" not in MODELS[name] else MODELS[name]
    flags = [
        (
            key if key.startswith("train.") else f"model.{key}",
            str(value).lower() if isinstance(value, bool) else str(value),
        )
        for key, value in ({"train.steps": 60} | keys).items()
    ]
    corpus, tokenizer, seq_len, batch = str(text), "bpe:320", 64, 512
    if name == CHAT:
        file = _chats(out.parent / "chats")
        corpus, tokenizer, seq_len, batch = str(file), str(file.parent), 384, 8 * 384
    flags += [
        ("data.corpus", corpus), ("data.tokenizer", tokenizer), ("data.seq_len", str(seq_len)),
        ("data.val_fraction", "0"), ("train.batch_tokens", str(batch)),
        ("train.lr", "3e-3"), ("data.cache", str(out.parent / "tokens")),
    ]  # fmt: skip
    api.train(load(None, flags), out=out, quiet=True)
