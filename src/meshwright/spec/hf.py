"""HF `config.json` read, of transformers v4 and v5: Llama, Qwen3, Mistral, GPT-2 and mixtures of experts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from meshwright.spec.errors import UserError
from meshwright.spec.hf_json import Config, read_json_object
from meshwright.spec.hf_moe_mla import read_experts, read_latents

FAMILIES = ("llama", "qwen3", "mistral", "gpt2", "mixtral", "qwen3_moe", "deepseek_v3")

# What transformers takes for a key that is absent, by family.
_MAX_POSITIONS = {
    "llama": 2048, "qwen3": 32768, "mistral": 131072, "mixtral": 131072, "qwen3_moe": 32768,
    "deepseek_v3": 4096,
}  # fmt: skip
_KV_HEADS = {"qwen3": 32, "mistral": 8, "mixtral": 8, "qwen3_moe": 4}  # llama: as many as attention heads
_NORM_EPS = {"mixtral": 1e-5}  # the others: 1e-6
_ROPE_THETA = {"mixtral": 1e6}  # the others: 1e4
_WINDOWS = {"mistral": 4096, "mixtral": None}  # the others have none


def read_hf_config(where: str | Path) -> dict[str, Any]:
    """Read a `config.json` (or the folder that holds one) into fields of a `ModelSpec`.

    A key that is absent has the default of transformers. Raises `UserError` for a file that is missing, is
    not JSON, has a value that no model can have, or asks for something that the decoder does not compute.
    """
    if not isinstance(where, (str, Path)) or not str(where):
        raise UserError(f"model.hf: {where!r} is not a path; give a folder that holds a config.json")
    path = Path(where)
    try:
        path = path / "config.json" if path.is_dir() else path
        is_file = path.is_file()
    except OSError as error:
        raise UserError(f"model.hf: {path} cannot be read ({error.strerror})") from error
    if not is_file:
        raise UserError(f"model.hf: there is no file {path}; give a folder that holds a config.json")
    config = Config(path, read_json_object(path, "model.hf"))
    kind = config.values.get("model_type")
    if not isinstance(kind, str) or kind not in FAMILIES:
        known = ", ".join(FAMILIES)
        raise UserError(f"model.hf: {path} has model_type {kind!r}; the families read are {known}")
    return _gpt2(config) if kind == "gpt2" else _llama_like(config, kind)


def _llama_like(config: Config, kind: str) -> dict[str, Any]:
    _check_computed(config, kind)
    rope, scaling = config.section("rope_parameters"), config.section("rope_scaling")
    max_seq_len = config.size("max_position_embeddings", _MAX_POSITIONS[kind])
    layers, heads = config.size("num_hidden_layers"), config.size("num_attention_heads")
    fields = {
        "family": kind,
        "layers": layers,
        "hidden": config.size("hidden_size"),
        "ffn": config.size("intermediate_size"),
        "heads": heads,
        "vocab_size": config.size("vocab_size", smallest=2),
        "max_seq_len": max_seq_len,
        "norm_eps": config.number("rms_norm_eps", _NORM_EPS.get(kind, 1e-6)),
        "rope_theta": (rope if "rope_theta" in rope.values else config).number(
            "rope_theta", _ROPE_THETA.get(kind, 1e4)
        ),
        "rope_scaling": _rope_scaling(rope if rope.values else scaling, config, max_seq_len),
        "sliding_window": _sliding_window(config, kind),
        "qk_norm": kind in ("qwen3", "qwen3_moe"),
        "mlp_bias": kind == "llama" and config.flag("mlp_bias", False),  # the others never have one
        "tied": config.flag("tie_word_embeddings", False),
        "init_std": config.number("initializer_range", 0.02),
    }
    if kind == "deepseek_v3":
        fields |= read_latents(config, heads)
    else:
        bias = kind not in _WINDOWS and config.flag("attention_bias", False)  # Mistral's attention has none
        fields |= {"kv_heads": _kv_heads(config, kind, heads), "head_dim": _head_dim(config, kind, heads)}
        fields |= {"qkv_bias": bias, "out_bias": bias}
    if kind in ("mixtral", "qwen3_moe", "deepseek_v3"):
        fields["moe"] = read_experts(config, kind, layers)
    return fields


def _check_computed(config: Config, kind: str) -> None:
    """Refuse what changes outputs and is not computed; dropout and jitter act in training only."""
    if config.values.get("hidden_act", "silu") != "silu":
        raise config.wrong("hidden_act", "only 'silu' is computed")
    if kind in ("qwen3", "qwen3_moe") and config.flag("use_sliding_window", False):
        raise config.wrong("use_sliding_window", f"it is not computed for {kind}; set it to false")
    for place in (config.section("rope_parameters"), config):
        if place.values.get("partial_rotary_factor", 1.0) != 1.0:
            raise place.wrong("partial_rotary_factor", "only 1.0 is computed")


def _kv_heads(config: Config, kind: str, heads: int) -> int:
    absent = _KV_HEADS.get(kind, heads)
    kv_heads = config.size("num_key_value_heads", absent=absent, null=heads)
    if heads % kv_heads:
        raise UserError(
            f"model.hf: {config.path} has num_attention_heads {heads}, which num_key_value_heads {kv_heads} "
            f"does not divide (without that key it is {absent}, as in transformers)"
        )
    return kv_heads


def _head_dim(config: Config, kind: str, heads: int) -> int:
    if kind == "qwen3":
        return config.size("head_dim", absent=128)
    hidden = config.size("hidden_size")
    if config.values.get("head_dim") is None and (hidden < heads or (kind == "llama" and hidden % heads)):
        raise config.wrong("hidden_size", f"num_attention_heads {heads} does not divide it; give a head_dim")
    return config.size("head_dim", absent=hidden // heads, null=hidden // heads)


def _sliding_window(config: Config, kind: str) -> int | None:
    """A Mistral without the key has HF's default, 4,096; null means no window."""
    if kind not in _WINDOWS or config.values.get("sliding_window", _WINDOWS[kind]) is None:
        return None
    return config.size("sliding_window", absent=_WINDOWS[kind])


def _rope_scaling(scaling: Config, config: Config, max_seq_len: int) -> dict[str, Any] | None:
    key = scaling.present("rope_type", "type")
    kind = scaling.values.get(key, "default")
    if kind == "default":
        return None
    if kind == "linear":
        return {"kind": "linear", "factor": scaling.number("factor")}
    if kind == "llama3":
        return {
            "kind": "llama3",
            "factor": scaling.number("factor"),
            "low_freq_factor": scaling.number("low_freq_factor"),
            "high_freq_factor": scaling.number("high_freq_factor"),
            "original_max_seq_len": scaling.size("original_max_position_embeddings"),
        }
    if kind == "yarn":
        place = config if "original_max_position_embeddings" in config.values else scaling
        factor = scaling.values.get("attention_factor")
        return {
            "kind": "yarn",
            "factor": scaling.number("factor"),
            "original_max_seq_len": place.size("original_max_position_embeddings", absent=max_seq_len),
            "attention_factor": None if factor is None else scaling.number("attention_factor"),
            "truncate": scaling.flag("truncate", True),
            **{key: scaling.number(key, absent) for key, absent in (("beta_fast", 32.0), ("beta_slow", 1.0))},
            **{key: scaling.number(key, 0.0, zero=True) for key in ("mscale", "mscale_all_dim")},
        }
    raise scaling.wrong(key, "computed are default, linear, llama3 and yarn")


def _gpt2(config: Config) -> dict[str, Any]:
    activation = config.values.get("activation_function", "gelu_new")
    if activation not in ("gelu_new", "gelu", "gelu_pytorch_tanh"):
        raise config.wrong("activation_function", "computed are gelu and gelu_new")
    for key, computed in (
        ("scale_attn_weights", True),
        ("scale_attn_by_inverse_layer_idx", False),
        ("add_cross_attention", False),
    ):
        if config.values.get(key, computed) != computed:
            raise config.wrong(key, f"only {computed} is computed")
    hidden, heads = config.size("n_embd"), config.size("n_head")
    if hidden % heads:
        raise config.wrong("n_embd", f"n_head {heads} does not divide it, and GPT-2's heads share it evenly")
    return {
        "family": "gpt2",
        "layers": config.size("n_layer"),
        "hidden": hidden,
        "ffn": config.size("n_inner", absent=4 * hidden, null=4 * hidden),
        "heads": heads,
        "kv_heads": heads,
        "head_dim": hidden // heads,
        "vocab_size": config.size("vocab_size", smallest=2),
        "max_seq_len": config.size("n_positions"),
        "norm": "layernorm",
        "norm_eps": config.number("layer_norm_epsilon", 1e-5),
        "activation": "gelu" if activation == "gelu" else "gelu_tanh",
        "position": "learned",
        "qkv_bias": True,
        "out_bias": True,
        "mlp_bias": True,
        "tied": config.flag("tie_word_embeddings", True),
        "init_std": config.number("initializer_range", 0.02),
    }
