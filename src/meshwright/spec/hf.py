"""HF `config.json` in and out, as plain JSON: Llama, Qwen3, Mistral and GPT-2, of transformers v4 and v5."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshwright.spec.errors import UserError

if TYPE_CHECKING:
    from meshwright.spec.model import ModelSpec

FAMILIES = {"llama": "llama", "qwen3": "qwen3", "mistral": "mistral", "gpt2": "gpt2"}

# What transformers takes for a key that is absent, by family.
_MAX_POSITIONS = {"llama": 2048, "qwen3": 32768, "mistral": 131072}
_KV_HEADS = {"qwen3": 32, "mistral": 8}  # llama: as many as attention heads


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
    config = _Config(path, read_json_object(path, "model.hf"))
    kind = config.values.get("model_type")
    if not isinstance(kind, str) or kind not in FAMILIES:
        known = ", ".join(FAMILIES)
        raise UserError(f"model.hf: {path} has model_type {kind!r}; the families read are {known}")
    return _gpt2(config) if kind == "gpt2" else _llama_like(config, kind)


def read_json_object(path: Path, key: str) -> dict[str, Any]:
    """The JSON object in the file `path`; raises `UserError`, which starts with `key`, for anything else."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{key}: {path} cannot be read ({error.strerror or error})") from error
    except RecursionError as error:
        raise UserError(f"{key}: {path} is nested too deeply to be read") from error
    except ValueError as error:  # of the JSON, of UTF-8, or of a number with too many digits
        raise UserError(f"{key}: {path} is not JSON ({error})") from error
    if not isinstance(content, dict):
        raise UserError(f"{key}: {path} is not a JSON object")
    return content


@dataclass(frozen=True)
class _Config:
    """The keys of a `config.json`, or of the object `inside` it, each checked as it is read."""

    path: Path
    values: dict[str, Any]
    inside: str = ""

    def size(self, key: str, absent: int | None = None, null: int | None = None, smallest: int = 1) -> int:
        """A whole number; `absent` and `null` stand in for a key that is not there and for a null."""
        value = self._value(key, absent)
        value = null if value is None and null is not None else value
        if isinstance(value, bool) or not isinstance(value, int) or value < smallest:
            raise self.wrong(key, f"it must be a whole number of at least {smallest}")
        return value

    def number(self, key: str, absent: float | None = None) -> float:
        """A finite number above 0."""
        value = self._value(key, absent)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
            raise self.wrong(key, "it must be a number above 0")
        return value

    def flag(self, key: str, absent: bool) -> bool:
        """A boolean; null is false, as in transformers."""
        value = self.values.get(key, absent)
        if value is not None and not isinstance(value, bool):
            raise self.wrong(key, "it must be true or false")
        return bool(value)

    def section(self, key: str) -> _Config:
        """The object under `key`; one that is absent or null is empty."""
        value = self.values.get(key)
        if value is not None and not isinstance(value, dict):
            raise self.wrong(key, "it must be an object or null")
        return _Config(self.path, value or {}, key)

    def wrong(self, key: str, why: str) -> UserError:
        """The error to raise for the value of `key`."""
        return UserError(f"model.hf: {self._place()} has {key} {self.values.get(key)!r}; {why}")

    def _value(self, key: str, absent: Any) -> Any:
        if key not in self.values and absent is None:
            raise UserError(f"model.hf: {self._place()} lacks the key {key!r}")
        return self.values.get(key, absent)

    def _place(self) -> str:
        return f"{self.inside} of {self.path}" if self.inside else str(self.path)


def _llama_like(config: _Config, kind: str) -> dict[str, Any]:
    if config.values.get("hidden_act", "silu") != "silu":
        raise config.wrong("hidden_act", "only 'silu' is computed")
    if kind == "qwen3" and config.flag("use_sliding_window", False):
        raise config.wrong("use_sliding_window", "it is not computed for qwen3; set it to false")
    rope, scaling = config.section("rope_parameters"), config.section("rope_scaling")
    for place in (rope, config):
        if place.values.get("partial_rotary_factor", 1.0) != 1.0:
            raise place.wrong("partial_rotary_factor", "only 1.0 is computed")
    bias = kind != "mistral" and config.flag("attention_bias", False)  # Mistral's attention has none
    heads = config.size("num_attention_heads")
    return {
        "family": FAMILIES[kind],
        "layers": config.size("num_hidden_layers"),
        "hidden": config.size("hidden_size"),
        "ffn": config.size("intermediate_size"),
        "heads": heads,
        "kv_heads": _kv_heads(config, kind, heads),
        "head_dim": _head_dim(config, kind, heads),
        "vocab_size": config.size("vocab_size", smallest=2),
        "max_seq_len": config.size("max_position_embeddings", _MAX_POSITIONS[kind]),
        "norm_eps": config.number("rms_norm_eps", 1e-6),
        "rope_theta": (rope if "rope_theta" in rope.values else config).number("rope_theta", 10000.0),
        "rope_scaling": _rope_scaling(rope if rope.values else scaling),
        "sliding_window": _sliding_window(config) if kind == "mistral" else None,
        "qk_norm": kind == "qwen3",
        "qkv_bias": bias,
        "out_bias": bias,
        "mlp_bias": kind == "llama" and config.flag("mlp_bias", False),  # the others never have one
        "tied": config.flag("tie_word_embeddings", False),
        "init_std": config.number("initializer_range", 0.02),
    }


def _kv_heads(config: _Config, kind: str, heads: int) -> int:
    absent = _KV_HEADS.get(kind, heads)
    kv_heads = config.size("num_key_value_heads", absent=absent, null=heads)
    if heads % kv_heads:
        raise UserError(
            f"model.hf: {config.path} has num_attention_heads {heads}, which num_key_value_heads {kv_heads} "
            f"does not divide (without that key it is {absent}, as in transformers)"
        )
    return kv_heads


def _head_dim(config: _Config, kind: str, heads: int) -> int:
    if kind == "qwen3":
        return config.size("head_dim", absent=128)
    hidden = config.size("hidden_size")
    if config.values.get("head_dim") is None and (hidden < heads or (kind == "llama" and hidden % heads)):
        raise config.wrong("hidden_size", f"num_attention_heads {heads} does not divide it; give a head_dim")
    return config.size("head_dim", absent=hidden // heads, null=hidden // heads)


def _sliding_window(config: _Config) -> int | None:
    """A file without the key means HF's default, 4,096; null means no window."""
    if config.values.get("sliding_window", 4096) is None:
        return None
    return config.size("sliding_window", absent=4096)


def _rope_scaling(scaling: _Config) -> dict[str, Any] | None:
    key = "rope_type" if "rope_type" in scaling.values else "type"
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
    raise scaling.wrong(key, "computed are default, linear and llama3")


def _gpt2(config: _Config) -> dict[str, Any]:
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
