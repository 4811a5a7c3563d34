"""HF `config.json` written, with the keys that transformers v4 and v5 both read."""

from __future__ import annotations

from typing import Any

from meshwright.spec.errors import UserError
from meshwright.spec.model import ModelSpec

_CLASSES = {
    "llama": "LlamaForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "mistral": "MistralForCausalLM",
    "gpt2": "GPT2LMHeadModel",
    "mixtral": "MixtralForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
}


def write_hf_config(model: ModelSpec, dtype: str) -> dict[str, Any]:
    """The `config.json` of `model`.

    Raises `UserError` when no HF family computes this combination of fields.
    """
    _check_exportable(model)
    fields = _gpt2(model) if model.family == "gpt2" else _llama_like(model)
    return {
        "architectures": [_CLASSES[model.family]],
        "model_type": model.family,
        **fields,
        "vocab_size": model.vocab_size,
        "initializer_range": model.init_std,
        "tie_word_embeddings": model.tied,
        "dtype": dtype,
        "torch_dtype": dtype,
    }


def _gpt2(model: ModelSpec) -> dict[str, Any]:
    return {
        "n_layer": model.layers,
        "n_embd": model.hidden,
        "n_inner": model.ffn,
        "n_head": model.heads,
        "n_positions": model.max_seq_len,
        "layer_norm_epsilon": model.norm_eps,
        "activation_function": "gelu" if model.activation == "gelu" else "gelu_new",
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
    }


def _llama_like(model: ModelSpec) -> dict[str, Any]:
    scaling = _rope_scaling(model)
    fields = {
        "num_hidden_layers": model.layers,
        "hidden_size": model.hidden,
        "intermediate_size": model.ffn,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_heads,
        "max_position_embeddings": model.max_seq_len,
        "hidden_act": "silu",
        "rms_norm_eps": model.norm_eps,
        "rope_theta": model.rope_theta,
        "rope_scaling": scaling,
        "rope_parameters": {"rope_theta": model.rope_theta, **(scaling or {"rope_type": "default"})},
        "attention_bias": model.qkv_bias,
        "attention_dropout": 0.0,
    }
    if model.family == "llama":
        fields["mlp_bias"] = model.mlp_bias
    if model.family in ("mistral", "mixtral"):
        fields["sliding_window"] = model.sliding_window
    if model.mla is None:
        fields["head_dim"] = model.head_dim
    return fields | _experts(model) | _latents(model)


def _rope_scaling(model: ModelSpec) -> dict[str, Any] | None:
    scaling = model.rope_scaling
    if scaling is None:
        return None
    fields = {key: value for key, value in scaling.model_dump(exclude={"kind"}).items() if value is not None}
    if "original_max_seq_len" in fields:
        fields["original_max_position_embeddings"] = fields.pop("original_max_seq_len")
    return {"rope_type": scaling.kind, **fields}


def _experts(model: ModelSpec) -> dict[str, Any]:
    """Keys of the mixture of experts; training-only ones that no family knows (z-loss, bias step) are
    omitted."""
    moe = model.moe
    if moe is None:
        return {}
    if model.family == "mixtral":
        return {
            "intermediate_size": moe.ffn,
            "num_local_experts": moe.experts,
            "num_experts_per_tok": moe.top_k,
            "router_aux_loss_coef": moe.aux_loss,
        }
    common = {
        "moe_intermediate_size": moe.ffn,
        "num_experts_per_tok": moe.top_k,
        "norm_topk_prob": moe.renormalise,
    }
    if model.family == "qwen3_moe":
        return common | {
            "num_experts": moe.experts,
            "router_aux_loss_coef": moe.aux_loss,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [layer for layer in range(model.layers) if not moe.has_experts(layer)],
        }
    return common | {
        "n_routed_experts": moe.experts,
        "n_shared_experts": moe.shared_ffn // moe.ffn,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "routed_scaling_factor": moe.scale,
        "n_group": moe.groups,
        "topk_group": moe.top_groups,
        "first_k_dense_replace": moe.dense_first,
        "aux_loss_alpha": moe.aux_loss,
        "num_nextn_predict_layers": 0,
    }


def _latents(model: ModelSpec) -> dict[str, Any]:
    mla = model.mla
    if mla is None:
        return {}
    return {
        "kv_lora_rank": mla.kv_rank,
        "q_lora_rank": mla.q_rank,
        "qk_rope_head_dim": mla.rope_dim,
        "qk_nope_head_dim": model.head_dim - mla.rope_dim,
        "v_head_dim": mla.v_dim,
        "rope_interleave": True,
    }


def _check_exportable(model: ModelSpec) -> None:
    """One sentence for the first field that the family does not compute."""
    family, moe = model.family, model.moe
    for table, families in _TABLES.items():
        if (getattr(model, table) is not None) != (family in families):
            has = "needs" if family in families else "has no"
            raise UserError(
                f"model.family: HF's {family} {has} model.{table}; families with it are {', '.join(families)}"
            )
    for key, allowed in _computed(model).items():
        part, name = (moe, key.removeprefix("moe.")) if key.startswith("moe.") else (model, key)
        if getattr(part, name) not in allowed:
            raise UserError(
                f"model.{key}: HF's {family} does not compute {name} = {getattr(part, name)!r}; "
                f"it computes {' or '.join(map(repr, allowed))}"
            )
    if family == "gpt2" and (model.kv_heads != model.heads or model.head_dim * model.heads != model.hidden):
        raise UserError(
            f"model.kv_heads: HF's gpt2 needs kv_heads = heads and head_dim = hidden / heads, "
            f"got {model.kv_heads} of {model.heads} heads and head_dim {model.head_dim}"
        )
    if family == "deepseek_v3" and moe is not None:
        if moe.shared_ffn < moe.ffn or moe.shared_ffn % moe.ffn:
            raise UserError(
                f"model.moe.shared_ffn: HF's deepseek_v3 has one or more shared experts of model.moe.ffn = "
                f"{moe.ffn} channels, got {moe.shared_ffn} in all"
            )
        if moe.experts < 2 * moe.groups:
            raise UserError(
                f"model.moe.groups: HF's deepseek_v3 needs 2 experts in a group, got {moe.experts} in "
                f"{moe.groups} groups"
            )


_TABLES = {"moe": ("mixtral", "qwen3_moe", "deepseek_v3"), "mla": ("deepseek_v3",)}
"""The families that have a table of the spec, and cannot do without it."""


def _computed(model: ModelSpec) -> dict[str, tuple[Any, ...]]:
    """The values of each field that the family computes."""
    family = model.family
    if family == "gpt2":
        return {
            "norm": ("layernorm",), "activation": ("gelu", "gelu_tanh"), "position": ("learned",),
            "qk_norm": (False,), "qkv_bias": (True,), "out_bias": (True,), "mlp_bias": (True,),
            "sliding_window": (None,),
        }  # fmt: skip
    found: dict[str, tuple[Any, ...]] = {
        "norm": ("rmsnorm",),
        "activation": ("swiglu",),
        "position": ("rope",),
        "qk_norm": (family in ("qwen3", "qwen3_moe"),),
        "qkv_bias": (True, False) if family in ("llama", "qwen3", "qwen3_moe") else (False,),
        "out_bias": (model.qkv_bias,),
        "mlp_bias": (True, False) if family == "llama" else (False,),
        "sliding_window": (model.sliding_window,) if family in ("mistral", "mixtral") else (None,),
    }
    if model.moe is None:
        return found
    found["moe.capacity_factor"] = (None,)
    if family == "deepseek_v3":
        return found | {"moe.router": ("sigmoid",), "moe.bias": (True,), "moe.every": (1,)}
    found |= {
        "moe.shared_ffn": (0,), "moe.router": ("softmax",), "moe.bias": (False,), "moe.scale": (1.0,),
        "moe.groups": (1,),
    }  # fmt: skip
    if family == "mixtral":
        found |= {"moe.renormalise": (True,), "moe.dense_first": (0,), "moe.every": (1,)}
    return found
