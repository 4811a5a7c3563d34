"""Writing of HF `config.json` files, with the keys that transformers v4 and v5 both read."""

from __future__ import annotations

import math
from typing import Any

from meshwright.spec.errors import UserError
from meshwright.spec.hf.config_keys import MLA_KEYS, ROPE_KEYS, written
from meshwright.spec.hf.config_read import model_fields
from meshwright.spec.hf.families import FAMILIES, Family
from meshwright.spec.hf.json_object import Config
from meshwright.spec.model import ModelSpec

_TABLES = {
    "moe": tuple(name for name, family in FAMILIES.items() if family.experts is not None),
    "mla": tuple(name for name, family in FAMILIES.items() if family.latents),
}
"""The families that have a table of the spec, and cannot do without it."""


def write_hf_config(model: ModelSpec, dtype: str) -> dict[str, Any]:
    """Return the `config.json` of `model`.

    Raises `UserError` if no HF family computes this combination of fields.
    """
    for table, families in _TABLES.items():
        if (getattr(model, table) is not None) != (model.family in families):
            has = "needs" if model.family in families else "has no"
            raise UserError(
                f"model.family: HF's {model.family} {has} model.{table}; "
                f"families with it are {', '.join(families)}"
            )
    family = FAMILIES[model.family]
    config = {
        "architectures": [family.causal_lm],
        "model_type": model.family,
        **written(model, family.keys),
        **(_gpt2(model) if family.learned_positions else _llama_like(model, family)),
        "dtype": dtype,
        "torch_dtype": dtype,
    }
    _check_reads_back(model, config)
    return config


def _check_reads_back(model: ModelSpec, config: dict[str, Any]) -> None:
    """Raise `UserError` for the first field with another value in the model that `config` describes."""
    fields = model_fields(Config(f"the config.json of HF's {model.family}", config, "model.family"))
    described = ModelSpec.model_validate({"preset": None, **fields})
    trained = {"mup_base_hidden", "moe.bias_rate", "moe.z_loss"}  # these act in training only
    ignored = {"preset", "hf", "weights", "moe", *trained}
    if model.position == "learned":
        ignored |= {"rope_theta", "rope_scaling"}
    if not FAMILIES[model.family].dense_ffn:
        ignored.add("ffn")
    layers = range(model.layers)
    if all(model.has_experts(layer) == described.has_experts(layer) for layer in layers):
        ignored |= {"moe.dense_first", "moe.every"}
    if model.layer_kinds == described.layer_kinds:
        ignored |= {"sliding_window", "layer_types", "rope_layers", "rope_dim", "rope_local_base_freq"}
    rows: list[tuple[str, Any, Any]] = [("", model, described)]
    if model.moe is not None:
        rows.append(("moe.", model.moe, described.moe))
    for prefix, part, other in rows:
        for name in type(part).model_fields:
            value, computed = getattr(part, name), getattr(other, name)
            if value != computed and prefix + name not in ignored:
                raise UserError(
                    f"model.{prefix}{name}: HF's {model.family} does not compute {name} = {value!r}; "
                    f"it computes {computed!r}"
                )


def _gpt2(model: ModelSpec) -> dict[str, Any]:
    return {
        "n_inner": model.ffn,
        "activation_function": "gelu" if model.activation == "gelu" else "gelu_new",
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
    }


def _llama_like(model: ModelSpec, family: Family) -> dict[str, Any]:
    key, activations = family.activations
    fields = {
        "num_key_value_heads": model.kv_heads,
        key: next((name for name, value in activations.items() if value == model.activation), None),
        **_rope(model, family),
        "attention_dropout": 0.0,
        **_windows(model, family),
    }
    if family.attention_bias is not None:
        fields["attention_bias"] = model.qkv_bias
    if family.query_scalar is not None and model.attention_scale is not None:
        scalar = model.attention_scale**-2
        fields["query_pre_attn_scalar"] = round(scalar) if math.isclose(scalar, round(scalar)) else scalar
    if model.mla is None:
        fields["head_dim"] = model.head_dim
    else:
        fields |= written(model.mla, MLA_KEYS)
        fields |= {"qk_nope_head_dim": model.head_dim - model.mla.rope_dim, "rope_interleave": True}
    if (moe := model.moe) is None:
        return fields
    assert family.experts is not None
    fields |= written(moe, family.experts)
    if family.lists_sparse_layers:
        dense = [layer for layer in range(model.layers) if not moe.has_experts(layer)]
        fields |= {"decoder_sparse_step": 1, "mlp_only_layers": dense}
    if family.deepseek_router is not None:
        fields |= {"n_shared_experts": moe.shared_ffn // moe.ffn, "scoring_func": moe.router}
    if family.deepseek_router == "v3":
        fields |= {"topk_method": "noaux_tc", "num_nextn_predict_layers": 0}
    elif family.deepseek_router == "v2":
        method = "greedy" if moe.groups == 1 else "group_limited_greedy"
        fields |= {"topk_method": method, "n_group": moe.groups, "topk_group": moe.top_groups}
    return fields


def _rope(model: ModelSpec, family: Family) -> dict[str, Any]:
    """Return the keys of rotary positions, for transformers v4 and for v5."""
    rope: dict[str, Any] | None = None
    if (scaling := model.rope_scaling) is not None:
        keys = written(scaling, ROPE_KEYS[scaling.kind]).items()
        rope = {"rope_type": scaling.kind, **{name: value for name, value in keys if value is not None}}
    fields: dict[str, Any] = {"rope_theta": model.rope_theta, "rope_scaling": rope}
    newer = {"rope_theta": model.rope_theta, **(rope or {"rope_type": "default"})}
    if family.rope_local is not None:
        base = model.rope_local_base_freq or model.rope_theta
        local = {"rope_type": "default", "rope_theta": base}
        fields["rope_local_base_freq"] = base
        fields["rope_parameters"] = {"full_attention": newer, "sliding_attention": local}
        return fields
    share = (model.rope_dim or model.head_dim) / model.head_dim
    if family.rope_share is not None:
        fields["partial_rotary_factor"] = newer["partial_rotary_factor"] = share
    if family.skips_rope == "no_rope_layers":
        fields["no_rope_layers"] = [int(kind.rope is not None) for kind in model.layer_kinds]
    return fields | {"rope_parameters": newer}


def _windows(model: ModelSpec, family: Family) -> dict[str, Any]:
    """Return the keys of the layers' windows."""
    slides = [kind.window is not None for kind in model.layer_kinds]
    if not family.windows or (family.window_switch and not any(slides)):
        return {}
    fields: dict[str, Any] = {"sliding_window": model.sliding_window}
    if family.window_switch:
        fields["use_sliding_window"] = True
    if family.full_layers_first is not None:
        fields["max_window_layers"] = slides.index(True)
    if family.layer_types and (family.full_layers_first is not None or len({*slides}) > 1):
        types = ["sliding_attention" if each else "full_attention" for each in slides]
        fields["layer_types"] = types
    return fields
