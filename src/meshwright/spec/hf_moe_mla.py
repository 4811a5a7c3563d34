"""The keys of an HF `config.json` for mixtures of experts and for attention over latents."""

from __future__ import annotations

from typing import Any

from meshwright.spec.hf_json import Config


def read_experts(config: Config, kind: str, layers: int) -> dict[str, Any]:
    """Fields of a `MoeSpec`. Keys that are absent have the defaults of transformers."""
    if kind == "mixtral":
        moe = {
            "experts": config.size("num_local_experts", 8),
            "top_k": config.size("num_experts_per_tok", 2),
            "ffn": config.size("intermediate_size"),
            "aux_loss": config.number("router_aux_loss_coef", 0.001, zero=True),
        }
    elif kind == "qwen3_moe":
        moe = {
            "experts": config.size(config.present("num_experts", "num_local_experts"), 128),
            "top_k": config.size("num_experts_per_tok", 8),
            "ffn": config.size("moe_intermediate_size", 768),
            "renormalise": config.flag("norm_topk_prob", False),
            "aux_loss": config.number("router_aux_loss_coef", 0.001, zero=True),
            **_sparse_layers(config, layers),
        }
    else:
        moe = _deepseek(config, layers)
    if moe["top_k"] > moe["experts"]:
        raise config.wrong("num_experts_per_tok", f"a layer has {moe['experts']} experts")
    return moe


def _sparse_layers(config: Config, layers: int) -> dict[str, int]:
    """Each n-th layer has experts but those in a list; they must be each m-th after some dense ones."""
    step, dense = config.size("decoder_sparse_step", 1), config.values.get("mlp_only_layers") or []
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


def _deepseek(config: Config, layers: int) -> dict[str, Any]:
    for key, computed in (("scoring_func", "sigmoid"), ("topk_method", "noaux_tc"), ("moe_layer_freq", 1)):
        if config.values.get(key, computed) != computed:
            raise config.wrong(key, f"only {computed!r} is computed")
    experts = config.size(config.present("n_routed_experts", "num_local_experts"), 256)
    groups, top_groups = config.size("n_group", 8), config.size("topk_group", 4)
    if experts % groups or experts < 2 * groups:
        raise config.wrong("n_group", f"equal groups of at least 2 of the {experts} experts are computed")
    top_k = config.size("num_experts_per_tok", 8)
    if top_groups > groups or top_k > experts // groups * top_groups:
        raise config.wrong("topk_group", f"a token takes {top_k} experts, of n_group = {groups} groups")
    ffn = config.size("moe_intermediate_size", 2048)
    dense = config.size("first_k_dense_replace", 3, smallest=0)
    if dense >= layers:
        raise config.wrong("first_k_dense_replace", f"with it none of the {layers} layers has experts")
    return {
        "experts": experts,
        "top_k": top_k,
        "ffn": ffn,
        "shared_ffn": config.size("n_shared_experts", 1) * ffn,
        "router": "sigmoid",
        "renormalise": config.flag("norm_topk_prob", True),
        "scale": config.number("routed_scaling_factor", 2.5),
        "groups": groups,
        "top_groups": top_groups,
        "bias": True,
        "aux_loss": config.number("aux_loss_alpha", 0.0, zero=True),
        "dense_first": dense,
    }


def read_latents(config: Config, heads: int) -> dict[str, Any]:
    """Heads and the fields of an `MlaSpec`. Keys that are absent have the defaults of transformers."""
    if config.flag("attention_bias", False):
        raise config.wrong("attention_bias", "latent attention is computed without biases; set it to false")
    if config.size("num_key_value_heads", absent=128, null=heads) != heads:
        raise config.wrong(
            "num_key_value_heads",
            f"latent attention has keys for each of the {heads} heads; give that (without the key it is 128, "
            f"as in transformers)",
        )
    rope_dim, v_dim = config.size("qk_rope_head_dim", 64, smallest=2), config.size("v_head_dim", 128)
    head_dim = config.size("qk_nope_head_dim", 128) + rope_dim
    if rope_dim % 2:
        raise config.wrong("qk_rope_head_dim", "it must be even")
    if v_dim > head_dim:
        raise config.wrong("v_head_dim", f"at most the {head_dim} channels of a query are computed")
    q_rank = None if config.values.get("q_lora_rank", 1536) is None else config.size("q_lora_rank", 1536)
    mla = {
        "kv_rank": config.size("kv_lora_rank", 512),
        "q_rank": q_rank,
        "rope_dim": rope_dim,
        "v_dim": v_dim,
    }
    return {"kv_heads": heads, "head_dim": head_dim, "mla": mla}
