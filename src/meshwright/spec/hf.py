"""HF `config.json` in and out, as plain JSON: Llama, Qwen3, Mistral and GPT-2, of transformers v4 and v5."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshwright.spec.errors import UserError

if TYPE_CHECKING:
    from meshwright.spec.model import ModelSpec

FAMILIES = {"llama": "llama", "qwen3": "qwen3", "mistral": "mistral", "gpt2": "gpt2"}


def read_hf_config(where: str | Path) -> dict[str, Any]:
    """Read a `config.json` (or the folder that holds one) into fields of a `ModelSpec`.

    Raises `UserError` for a file that is missing, is not JSON, or asks for something that the decoder
    does not compute.
    """
    path = Path(where)
    path = path / "config.json" if path.is_dir() else path
    if not path.is_file():
        raise UserError(f"model.hf: there is no file {path}; give a folder that holds a config.json")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"model.hf: {path} is not JSON ({error})") from error
    kind = config.get("model_type") if isinstance(config, dict) else None
    if kind not in FAMILIES:
        known = ", ".join(FAMILIES)
        raise UserError(f"model.hf: {path} has model_type {kind!r}; the families read are {known}")
    try:
        return _gpt2(config, path) if kind == "gpt2" else _llama_like(config, kind, path)
    except KeyError as error:
        raise UserError(f"model.hf: {path} lacks the key {error}") from error


def _llama_like(config: dict[str, Any], kind: str, path: Path) -> dict[str, Any]:
    if config.get("hidden_act", "silu") != "silu":
        raise UserError(f"model.hf: {path} has hidden_act {config['hidden_act']!r}; only 'silu' is computed")
    # A file without the key means HF's default, 4,096; null means no window.
    window = config.get("sliding_window", 4096) if kind == "mistral" else None
    if kind == "qwen3" and config.get("use_sliding_window"):
        raise UserError(
            f"model.hf: {path} has use_sliding_window for qwen3, which is not computed; set it to false"
        )
    rope = config.get("rope_parameters") or {}
    turned = rope.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
    if turned != 1.0:
        raise UserError(f"model.hf: {path} has partial_rotary_factor {turned}; only 1.0 is computed")
    scaling = rope if rope else (config.get("rope_scaling") or {})
    bias = bool(config.get("attention_bias", False))
    heads = config["num_attention_heads"]
    return {
        "family": FAMILIES[kind],
        "layers": config["num_hidden_layers"],
        "hidden": config["hidden_size"],
        "ffn": config["intermediate_size"],
        "heads": heads,
        "kv_heads": config.get("num_key_value_heads") or heads,
        "head_dim": config.get("head_dim") or config["hidden_size"] // heads,
        "vocab_size": config["vocab_size"],
        "max_seq_len": config.get("max_position_embeddings", 2048),
        "norm_eps": config.get("rms_norm_eps", 1e-6),
        "rope_theta": rope.get("rope_theta", config.get("rope_theta", 10000.0)),
        "rope_scaling": _rope_scaling(scaling, path),
        "sliding_window": window,
        "qk_norm": kind == "qwen3",
        "qkv_bias": bias,
        "out_bias": bias,
        "mlp_bias": bool(config.get("mlp_bias", False)),
        "tied": bool(config.get("tie_word_embeddings", False)),
        "init_std": config.get("initializer_range", 0.02),
    }


def _rope_scaling(scaling: dict[str, Any], path: Path) -> dict[str, Any] | None:
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind == "default":
        return None
    if kind == "linear":
        return {"kind": "linear", "factor": scaling["factor"]}
    if kind == "llama3":
        return {
            "kind": "llama3",
            "factor": scaling["factor"],
            "low_freq_factor": scaling["low_freq_factor"],
            "high_freq_factor": scaling["high_freq_factor"],
            "original_max_seq_len": scaling["original_max_position_embeddings"],
        }
    raise UserError(f"model.hf: {path} has rope type {kind!r}; computed are default, linear and llama3")


def _gpt2(config: dict[str, Any], path: Path) -> dict[str, Any]:
    activation = config.get("activation_function", "gelu_new")
    if activation not in ("gelu_new", "gelu", "gelu_pytorch_tanh"):
        raise UserError(
            f"model.hf: {path} has activation_function {activation!r}; computed are gelu and gelu_new"
        )
    for key, computed in (
        ("scale_attn_weights", True),
        ("scale_attn_by_inverse_layer_idx", False),
        ("add_cross_attention", False),
    ):
        if config.get(key, computed) != computed:
            raise UserError(f"model.hf: {path} has {key} = {config[key]}; only {computed} is computed")
    return {
        "family": "gpt2",
        "layers": config["n_layer"],
        "hidden": config["n_embd"],
        "ffn": config.get("n_inner") or 4 * config["n_embd"],
        "heads": config["n_head"],
        "kv_heads": config["n_head"],
        "head_dim": config["n_embd"] // config["n_head"],
        "vocab_size": config["vocab_size"],
        "max_seq_len": config["n_positions"],
        "norm": "layernorm",
        "norm_eps": config.get("layer_norm_epsilon", 1e-5),
        "activation": "gelu" if activation == "gelu" else "gelu_tanh",
        "position": "learned",
        "qkv_bias": True,
        "out_bias": True,
        "mlp_bias": True,
        "tied": bool(config.get("tie_word_embeddings", True)),
        "init_std": config.get("initializer_range", 0.02),
    }


def write_hf_config(model: ModelSpec, dtype: str) -> dict[str, Any]:
    """The `config.json` of `model`, with the keys that transformers v4 and v5 both read.

    Raises `UserError` when no HF family computes this combination of fields.
    """
    _check_exportable(model)
    if model.family == "gpt2":
        return {
            "architectures": ["GPT2LMHeadModel"],
            "model_type": "gpt2",
            "n_layer": model.layers,
            "n_embd": model.hidden,
            "n_inner": model.ffn,
            "n_head": model.heads,
            "n_positions": model.max_seq_len,
            "vocab_size": model.vocab_size,
            "layer_norm_epsilon": model.norm_eps,
            "activation_function": "gelu" if model.activation == "gelu" else "gelu_new",
            "initializer_range": model.init_std,
            "tie_word_embeddings": model.tied,
            "resid_pdrop": 0.0,
            "embd_pdrop": 0.0,
            "attn_pdrop": 0.0,
            "dtype": dtype,
            "torch_dtype": dtype,
        }
    scaling = _write_rope_scaling(model)
    name = {"llama": "Llama", "qwen3": "Qwen3", "mistral": "Mistral"}[model.family]
    config = {
        "architectures": [f"{name}ForCausalLM"],
        "model_type": model.family,
        "num_hidden_layers": model.layers,
        "hidden_size": model.hidden,
        "intermediate_size": model.ffn,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_heads,
        "head_dim": model.head_dim,
        "vocab_size": model.vocab_size,
        "max_position_embeddings": model.max_seq_len,
        "hidden_act": "silu",
        "rms_norm_eps": model.norm_eps,
        "rope_theta": model.rope_theta,
        "rope_scaling": scaling,
        "rope_parameters": {"rope_theta": model.rope_theta, **(scaling or {"rope_type": "default"})},
        "attention_bias": model.qkv_bias,
        "attention_dropout": 0.0,
        "initializer_range": model.init_std,
        "tie_word_embeddings": model.tied,
        "dtype": dtype,
        "torch_dtype": dtype,
    }
    if model.family == "llama":
        config["mlp_bias"] = model.mlp_bias
    if model.family == "mistral":
        config["sliding_window"] = model.sliding_window
    return config


def _write_rope_scaling(model: ModelSpec) -> dict[str, Any] | None:
    scaling = model.rope_scaling
    if scaling is None:
        return None
    fields = scaling.model_dump(exclude={"kind"})
    if "original_max_seq_len" in fields:
        fields["original_max_position_embeddings"] = fields.pop("original_max_seq_len")
    return {"rope_type": scaling.kind, **fields}


def _check_exportable(model: ModelSpec) -> None:
    gpt2 = model.family == "gpt2"
    wanted: dict[str, tuple[Any, ...]] = {
        "norm": ("layernorm",) if gpt2 else ("rmsnorm",),
        "activation": ("gelu", "gelu_tanh") if gpt2 else ("swiglu",),
        "position": ("learned",) if gpt2 else ("rope",),
        "qk_norm": (model.family == "qwen3",),
        "qkv_bias": (True,) if gpt2 else ((False,) if model.family == "mistral" else (True, False)),
        "out_bias": (model.qkv_bias,),
        "mlp_bias": (True,) if gpt2 else ((True, False) if model.family == "llama" else (False,)),
        "sliding_window": (model.sliding_window,) if model.family == "mistral" else (None,),
    }
    for key, allowed in wanted.items():
        if getattr(model, key) not in allowed:
            raise UserError(
                f"model.{key}: HF's {model.family} does not compute {key} = {getattr(model, key)!r}; "
                f"it computes {' or '.join(map(repr, allowed))}"
            )
    if gpt2 and (model.kv_heads != model.heads or model.head_dim * model.heads != model.hidden):
        raise UserError(
            f"model.kv_heads: HF's gpt2 needs kv_heads = heads and head_dim = hidden / heads, "
            f"got {model.kv_heads} of {model.heads} heads and head_dim {model.head_dim}"
        )
