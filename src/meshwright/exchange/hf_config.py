"""Writing of HF `config.json` files, with the keys that transformers v4 and v5 both read."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from pydantic import ValidationError

from meshwright.spec.errors import UserError
from meshwright.spec.hf.config_keys import MLA_KEYS, ROPE_KEYS, written
from meshwright.spec.hf.config_read import PREDICTED, model_fields
from meshwright.spec.hf.families import FAMILIES, stored_shared_ffn
from meshwright.spec.hf.family import Family
from meshwright.spec.hf.json_object import Config
from meshwright.spec.layers import LongRope
from meshwright.spec.model import ModelSpec

_TABLES = {
    "moe": tuple(name for name, family in FAMILIES.items() if family.experts is not None),
    "mla": tuple(name for name, family in FAMILIES.items() if family.latents),
}
"""The families that have a table of the spec, and cannot do without it."""


def write_hf_config(model: ModelSpec, dtype: str) -> dict[str, Any]:
    """Return the `config.json` of `model`.

    Raises `UserError` if no HF family computes this combination of fields: all that is in its way, and which
    family computes it, or most of it.
    """
    if found := _missing(model):
        raise UserError(f"{found[0]}{_others(found)}; {_instead(model)}")
    return _config(_with_scale(model), dtype)


def _with_scale(model: ModelSpec) -> ModelSpec:
    """Return the model with the factor of its scores written out, where its family's files have one."""
    family = FAMILIES[model.family]
    stated = family.query_scalar is not None or "attention_scale" in family.keys
    if not stated or model.attention_scale is not None:
        return model
    return model.model_copy(update={"attention_scale": model.head_dim**-0.5})


def export_remark(model: ModelSpec) -> str | None:
    """Return a sentence if `model` cannot be exported, before it is trained; None if it can."""
    try:
        write_hf_config(model, "float32")
    except UserError as error:
        return f"this model cannot be exported: {error}"
    return None


def _config(model: ModelSpec, dtype: str) -> dict[str, Any]:
    family = FAMILIES[model.family]
    return {
        "architectures": [family.causal_lm],
        "model_type": model.family,
        **written(model, family.keys),
        **(_gpt2(model) if family.learned_positions else _llama_like(model, family)),
        "dtype": dtype,
        "torch_dtype": dtype,
    }


def _missing(model: ModelSpec) -> list[str]:
    """Return a clause for each key of `model` that its family does not compute."""
    found: list[str] = []
    model = _with_scale(model)
    for table, families in _TABLES.items():
        given = getattr(model, table) is not None
        if given and model.family not in families:
            found.append(f"model.family: HF's {model.family} has no model.{table}")
            model = model.model_copy(update={table: None})
        elif not given and model.family in families:
            return [*found, f"model.family: HF's {model.family} needs model.{table}"]
    try:
        different = list(_read_back(model, _config(model, "float32")))
    except (UserError, ValidationError) as error:  # no config says it
        return [*found, f"model.family: HF's {model.family} does not compute this model ({error})"]
    for key, value, computed in different:
        name = key.rpartition(".")[2]
        found.append(
            f"model.{key}: HF's {model.family} does not compute {name} = {value!r}; it computes {computed!r}"
        )
    return found


def _others(found: list[str]) -> str:
    """Return the keys besides the first that are in the way, in parentheses."""
    keys = [clause.partition(": ")[0] for clause in found[1:]]
    return f" (nor {', '.join(keys)} as it is)" if keys else ""


def _instead(model: ModelSpec) -> str:
    """Return which family computes a model that its own does not, or else which lacks least."""
    lacking = {name: _missing(model.model_copy(update={"family": name})) for name in FAMILIES}
    least = min(lacking, key=lambda name: (_is_other(lacking[name]), len(lacking[name])))
    if not lacking[least]:
        return f"set model.family to {least}, which computes it"
    if least == model.family:
        return "no other family computes more of it"
    return f"no family computes it; nearest is {least}, but {'; '.join(lacking[least])}"


def _is_other(found: list[str]) -> bool:
    """Return whether these clauses say that a family has another kind of attention or feed-forward layer."""
    return any(clause.startswith("model.family: ") for clause in found)


def _read_back(model: ModelSpec, config: dict[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """Yield key, value, and the value in the model that `config` describes, of each that differs."""
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
    if model.moe is not None and described.moe is not None:
        rows.append(("moe.", model.moe, described.moe))
        if stored_shared_ffn(model.moe, FAMILIES[model.family]) == described.moe.shared_ffn:
            ignored.add("moe.shared_ffn")
    for prefix, part, other in rows:
        for name in type(part).model_fields:
            value, computed = getattr(part, name), getattr(other, name)
            if value != computed and prefix + name not in ignored:
                yield prefix + name, value, computed


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
        scoring = family.expert_switches.get("router", "softmax")  # the only one that is read
        fields |= {"n_shared_experts": stored_shared_ffn(moe, family) // moe.ffn, "scoring_func": scoring}
    if family.deepseek_router == "v3":
        fields |= {"topk_method": "noaux_tc", PREDICTED: model.mtp_num_layers}
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
    if family.original_max_seq_len is not None and isinstance(scaling, LongRope):
        fields |= _phi3_longrope(model, scaling, rope or {})
    newer = {"rope_theta": model.rope_theta, **(rope or {"rope_type": "default"})}
    if family.rope_by_type:
        base = model.rope_local_base_freq or model.rope_theta
        local = {"rope_type": "default", "rope_theta": base}
        if family.rope_local is not None:
            fields["rope_local_base_freq"] = base
        fields["rope_parameters"] = {"full_attention": newer, "sliding_attention": local}
        return fields
    share = (model.rope_dim or model.head_dim) / model.head_dim
    if family.rope_share is not None:
        fields["partial_rotary_factor"] = newer["partial_rotary_factor"] = share
    if family.skips_rope == "no_rope_layers":
        fields["no_rope_layers"] = [int(kind.rope is not None) for kind in model.layer_kinds]
    return fields | {"rope_parameters": newer}


def _phi3_longrope(model: ModelSpec, scaling: LongRope, rope: dict[str, Any]) -> dict[str, Any]:
    """Return the keys of LongRoPE in Phi-3's configs; v4 takes three where the others have their defaults."""
    key = "original_max_position_embeddings"
    fields: dict[str, Any] = {key: scaling.original_max_seq_len}
    if scaling.attention_factor is None and scaling.factor == model.max_seq_len / fields[key]:
        three = {"type": "longrope", **{name: rope[name] for name in ("short_factor", "long_factor")}}
        fields["rope_scaling"] = three
    return fields


def _windows(model: ModelSpec, family: Family) -> dict[str, Any]:
    """Return the keys of the layers' windows."""
    slides = [kind.window is not None for kind in model.layer_kinds]
    if not family.windows or (family.window_switch and not any(slides)):
        return {}
    listed = family.full_layers_first is not None or family.window_pattern is not None
    # transformers wants a window where types of layers are listed, though no layer has it.
    fields: dict[str, Any] = {"sliding_window": model.sliding_window} if any(slides) or not listed else {}
    if family.window_switch:
        fields["use_sliding_window"] = True
    if family.full_layers_first is not None:
        fields["max_window_layers"] = slides.index(True)
    if family.layer_types and (listed or len({*slides}) > 1):
        types = ["sliding_attention" if each else "full_attention" for each in slides]
        fields["layer_types"] = types
    return fields
