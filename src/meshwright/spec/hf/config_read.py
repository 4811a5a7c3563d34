"""Reading of HF `config.json` files of transformers v4 and v5 into the fields of a `ModelSpec`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, get_args

from meshwright.spec.errors import UserError, did_you_mean
from meshwright.spec.files import user_path
from meshwright.spec.hf.config_keys import MLA_KEYS, Keys
from meshwright.spec.hf.config_rope import read_rope
from meshwright.spec.hf.families import FAMILIES, SAME_AS
from meshwright.spec.hf.family import Family
from meshwright.spec.hf.json_object import COUNT, FLAG, NUMBER, SIZE, Config, read_json_object
from meshwright.spec.hf.other_layers import OTHER_INPUTS, OTHER_LAYERS
from meshwright.spec.hf.special_tokens import check_within
from meshwright.spec.hf.weight_names import holds_layer
from meshwright.spec.layers import Activation, LayerType

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
"""The form of a repository's id on the hub, org/name."""


def read_hf_config(where: str | Path) -> dict[str, Any]:
    """Read a `config.json` (or the folder that holds one) into fields of a `ModelSpec`.

    A key that is absent has the default of transformers. A layer that predicts further tokens is there if the
    folder's weights hold it: transformers writes the key and not the layer. Raises `UserError` for a file
    that is missing, is not JSON, has a value that no model can have, or asks for something that the decoder
    does not compute.
    """
    if not isinstance(where, (str, Path)) or not str(where):
        raise UserError(f"model.hf: {where!r} is not a path; give a folder that holds a config.json")
    path = user_path(where, "model.hf")
    folder, path = path, path / "config.json" if path.is_dir() else path
    if not path.is_file():
        hub = f", or a model of the hub as --from {where}" if HUB_ID.fullmatch(str(where)) else ""
        raise UserError(f"model.hf: there is no file {path}; give a folder that holds a config.json{hub}")
    if path != folder:
        check_within(path, folder, "model.hf")
    fields = model_fields(Config(str(path), read_json_object(path, "model.hf")))
    if fields.get("mtp_num_layers") and not holds_layer(folder, fields["layers"]):
        fields["mtp_num_layers"] = 0
    return fields


WEIGHT_FILES = (
    "*.safetensors", "*.safetensors.index.json", "*.bin", "*.bin.index.json", "*.pt", "*.pth", "*.ckpt",
    "*.gguf", "*.h5", "*.msgpack",
)  # fmt: skip
"""Names of files with weights in published folders; safetensors and pytorch_model.bin are read there."""


def has_weights(where: str | Path) -> bool:
    """Return True for a folder that holds weights in any format, also in one that is not read."""
    path = user_path(where, "model.hf")
    return path.is_dir() and any(next(path.glob(pattern), None) for pattern in WEIGHT_FILES)


def other_weights(folder: Path) -> list[str]:
    """Return the names of files with weights in a folder that are in a format, or of a name, not read."""
    return sorted(path.name for pattern in WEIGHT_FILES for path in folder.glob(pattern))


def model_fields(config: Config) -> dict[str, Any]:
    """Return the fields of a `ModelSpec` for a config of any family."""
    name = config.values.get("model_type")
    name = SAME_AS.get(name, name) if isinstance(name, str) else name
    if isinstance(name, str) and name in OTHER_LAYERS:
        layers = f"it has {OTHER_LAYERS[name]} layers, which this decoder does not compute"
        raise config.wrong("model_type", f"{layers}; give a model of attention layers alone")
    if not isinstance(name, str) or name not in FAMILIES:
        if own := next((key for key in OTHER_INPUTS if key in config.values), None):
            text = f"its {own} says that it takes more than text, which is not read"
            raise config.wrong("model_type", f"{text}; give a model of text alone")
        listed = f"none of the {len(FAMILIES)} families that are read has this name"
        hint = did_you_mean(str(name), FAMILIES) or "; `meshwright train --help family` lists them"
        raise config.wrong("model_type", f"{listed}{hint}")
    family = FAMILIES[name]
    read = _gpt2 if family.learned_positions else _llama_like
    return {"family": name, **read(config, family), **family.fixed}


def _llama_like(config: Config, family: Family) -> dict[str, Any]:
    fields = {**config.fields(family.keys), "activation": _activation(config, family)}
    heads, layers = fields["heads"], fields["layers"]
    read = {key.name for key in family.keys.values()}
    for key, value in {**NOT_COMPUTED, **family.computed}.items():
        if key not in read and config.values.get(key) is not None:  # null is as if it were absent
            config.check(key, value)
    fields["sliding_window"] = None
    if family.windows:
        fields |= _windows(config, family, layers)
    elif "sliding_attention" in (config.values.get("layer_types") or ()):
        raise config.wrong("layer_types", "only full_attention is computed of this family")
    if family.latents:
        fields |= _latents(config, family, heads)
    else:
        fields |= {"kv_heads": _kv_heads(config, family, heads), "head_dim": _head_dim(config, family, heads)}
    if family.attention_bias is not None and not family.latents:
        bias = config.read("attention_bias", FLAG, family.attention_bias)
        fields |= {"qkv_bias": bias, "out_bias": bias and family.bias_of_output}
    fields |= read_rope(config, family, fields)
    if family.scaled_embedding:
        fields["embedding_scale"] = fields["hidden"] ** 0.5
    if family.query_scalar is not None:
        fields["attention_scale"] = config.read("query_pre_attn_scalar", NUMBER, family.query_scalar) ** -0.5
    if family.experts is not None:
        fields["moe"] = _experts(config, family, family.experts, layers)
    if family.deepseek_router == "v3":
        fields["mtp_num_layers"] = config.read(PREDICTED, COUNT, 0, nullable=True) or 0
        if fields["mtp_num_layers"] > 1:
            raise config.wrong(PREDICTED, "one such layer is computed; set it to 0, which leaves them out")
    return fields


PREDICTED = "num_nextn_predict_layers"
"""The key of DeepSeek's and GLM's layers that predict further tokens."""
NOT_COMPUTED = {
    "final_logit_softcapping": None, "attn_logit_softcapping": None, "use_bidirectional_attention": False,
}  # fmt: skip
"""Keys that change outputs, with the value that is computed; dropout and jitter act in training only."""


def _activation(config: Config, family: Family) -> Activation:
    key, values = family.activations
    given = config.values.get(key, next(iter(values)))
    if not isinstance(given, str) or given not in values:
        raise config.wrong(key, f"computed is {' or '.join(values)}")
    return values[given]


def _windows(config: Config, family: Family, layers: int) -> dict[str, Any]:
    """Return the window, and the types of layers where they differ."""
    window: int | None = config.read("sliding_window", SIZE, family.window, nullable=True)
    if family.window_switch and not config.read("use_sliding_window", FLAG, False):
        window = None
    types = config.values.get("layer_types") if family.layer_types else None
    if types is None and family.window_pattern is not None:
        every = config.read("sliding_window_pattern", SIZE, family.window_pattern)
        types = ["full_attention" if (n + 1) % every == 0 else "sliding_attention" for n in range(layers)]
    if types is None and (first := family.full_layers_first) is not None:
        full = layers if window is None else min(layers, config.read("max_window_layers", COUNT, first))
        types = ["full_attention"] * full + ["sliding_attention"] * (layers - full)
    if types is None:
        return {"sliding_window": window}
    names = get_args(LayerType)
    if not isinstance(types, list) or len(types) != layers or not {*map(str, types)} <= {*names}:
        computed = f"computed are {' or '.join(names)} for each of the {layers} layers"
        raise config.wrong("layer_types", computed)
    if "sliding_attention" not in types:
        return {"sliding_window": None}
    if window is None:
        missing = "use_sliding_window is false" if family.window_switch else "sliding_window is null"
        raise config.wrong("layer_types", f"sliding_attention has no window, as {missing}")
    repeated = next(n for n in range(1, layers + 1) if all(types[i] == types[i % n] for i in range(layers)))
    return {"sliding_window": window, "layer_types": types[:repeated] if repeated > 1 else None}


def _kv_heads(config: Config, family: Family, heads: int) -> int:
    default = family.kv_heads or heads
    kv_heads: int = config.read("num_key_value_heads", SIZE, default, nullable=True) or heads
    if heads % kv_heads:
        raise config.wrong(
            "num_attention_heads",
            f"num_key_value_heads {kv_heads} does not divide it"
            + ("" if "num_key_value_heads" in config.values else ", which is transformers' default"),
        )
    return kv_heads


def _head_dim(config: Config, family: Family, heads: int) -> int:
    if family.head_dim is not None:
        return int(config.read("head_dim", SIZE, family.head_dim))
    hidden = config.values["hidden_size"]
    given = config.read("head_dim", SIZE, nullable=True)
    if given is None and (hidden < heads or (family.even_heads and hidden % heads)):
        raise config.wrong("hidden_size", f"num_attention_heads {heads} does not divide it; give a head_dim")
    return given or hidden // heads


def _experts(config: Config, family: Family, keys: Keys, layers: int) -> dict[str, Any]:
    """Return the fields of a `MoeSpec`."""
    moe = {**config.fields(keys), **family.expert_switches}
    if family.lists_sparse_layers:
        moe |= _sparse_layers(config, layers)
    if family.deepseek_router is not None:
        shared = config.read("n_shared_experts", SIZE, family.shared_experts)
        moe["shared_ffn"] = shared * moe["ffn"]
        moe |= _groups(config) if family.deepseek_router == "v2" else {}
        _check_deepseek(config, family, moe, layers)
    if moe["top_k"] > moe["experts"]:
        raise config.wrong("num_experts_per_tok", f"a layer has {moe['experts']} experts")
    return moe


def _sparse_layers(config: Config, layers: int) -> dict[str, int]:
    """Return `dense_first` and `every` for each n-th layer with experts, but those in a list."""
    step = config.read("decoder_sparse_step", SIZE, 1)
    dense = config.values.get("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(isinstance(i, int) and not isinstance(i, bool) for i in dense):
        raise config.wrong("mlp_only_layers", "it must be a list of layers, or null")
    sparse = [i for i in range(layers) if i not in dense and (i + 1) % step == 0]
    key = "mlp_only_layers" if dense else "decoder_sparse_step"
    if not sparse:
        raise config.wrong(key, f"with it none of the {layers} layers has experts")
    every = sparse[1] - sparse[0] if len(sparse) > 1 else layers - sparse[0]
    first = sparse[0] - every + 1
    if first < 0 or sparse != list(range(sparse[0], layers, every)):
        raise config.wrong(key, "computed are dense layers first, and then experts in each n-th layer")
    return {"dense_first": first, "every": every}


def _groups(config: Config) -> dict[str, Any]:
    """Return how the router of a DeepSeek-V2 chooses: among all experts, or within groups by their best."""
    method = config.values.get("topk_method", "greedy")
    if method == "greedy":
        return {"groups": 1, "top_groups": 1}
    if method != "group_limited_greedy":
        raise config.wrong("topk_method", "computed are greedy and group_limited_greedy")
    groups = {"groups": config.read("n_group", SIZE), "top_groups": config.read("topk_group", SIZE)}
    return groups | {"group_score": "max"}


def _check_deepseek(config: Config, family: Family, moe: dict[str, Any], layers: int) -> None:
    config.check("scoring_func", moe.get("router", "softmax"))
    config.check("moe_layer_freq", 1)
    if family.deepseek_router == "v3":
        config.check("topk_method", "noaux_tc")
    experts, groups, top_k = moe["experts"], moe["groups"], moe["top_k"]
    if experts % groups or experts < 2 * groups:
        raise config.wrong("n_group", f"equal groups of at least 2 of the {experts} experts are computed")
    if moe["top_groups"] > groups or top_k > experts // groups * moe["top_groups"]:
        raise config.wrong("topk_group", f"a token takes {top_k} experts, of n_group = {groups} groups")
    if moe["dense_first"] >= layers:
        raise config.wrong("first_k_dense_replace", f"with it none of the {layers} layers has experts")


def _latents(config: Config, family: Family, heads: int) -> dict[str, Any]:
    """Return the fields of latent attention: `kv_heads`, `head_dim` and those of an `MlaSpec`."""
    if config.read("attention_bias", FLAG, False):
        raise config.wrong("attention_bias", "latent attention is computed without biases; set it to false")
    default = family.kv_heads or heads
    if (config.read("num_key_value_heads", SIZE, default, nullable=True) or heads) != heads:
        raise config.wrong(
            "num_key_value_heads",
            f"latent attention has keys for each of the {heads} heads; give that"
            + ("" if "num_key_value_heads" in config.values else f" (transformers' default is {default})"),
        )
    mla = config.fields(MLA_KEYS)
    head_dim = config.read("qk_nope_head_dim", SIZE, 128) + mla["rope_dim"]
    if mla["rope_dim"] % 2:
        raise config.wrong("qk_rope_head_dim", "it must be even")
    if mla["v_dim"] > head_dim:
        raise config.wrong("v_head_dim", f"at most the {head_dim} channels of a query are computed")
    return {"kv_heads": heads, "head_dim": head_dim, "mla": mla}


def _gpt2(config: Config, family: Family) -> dict[str, Any]:
    activation = config.values.get("activation_function", "gelu_new")
    if activation not in ("gelu_new", "gelu", "gelu_pytorch_tanh"):
        raise config.wrong("activation_function", "computed are gelu and gelu_new")
    config.check("scale_attn_weights", True)
    config.check("scale_attn_by_inverse_layer_idx", False)
    config.check("add_cross_attention", False)
    fields = config.fields(family.keys)
    hidden, heads = fields["hidden"], fields["heads"]
    if hidden % heads:
        raise config.wrong("n_embd", f"n_head {heads} does not divide it, and GPT-2's heads share it evenly")
    return fields | {
        "ffn": config.read("n_inner", SIZE, nullable=True) or 4 * hidden,
        "kv_heads": heads,
        "head_dim": hidden // heads,
        "norm": "layernorm",
        "activation": "gelu" if activation == "gelu" else "gelu_tanh",
        "position": "learned",
        "qkv_bias": True,
        "out_bias": True,
        "mlp_bias": True,
    }
