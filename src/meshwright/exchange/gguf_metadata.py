"""The architecture of a model as GGUF describes it to llama.cpp, and what llama.cpp does not compute.

Names of architectures and keys: the GGUF specification (ggml-org/ggml, docs/gguf.md) and llama.cpp's
converter (convert_hf_to_gguf.py). What llama.cpp computes: its graphs (src/models, version 0.5.0).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from meshwright.exchange.llama_cpp_graphs import GRAPHS, LlamaCppGraph, not_computed, window_period
from meshwright.model.rope import attention_factor, frequencies
from meshwright.spec import ModelSpec, UserError
from meshwright.spec.hf.families import FAMILIES
from meshwright.spec.layers import LinearRope, Llama3Rope, RopeSpec, YarnRope

if TYPE_CHECKING:
    from gguf import GGUFWriter

_LATENT_EPS = 1e-6
"""Epsilon of the norms of latents, in DeepSeek's code and here; llama.cpp takes the model's."""
_LITE = (26, 27)
"""Numbers of layers at which llama.cpp takes a DeepSeek for one without a latent of queries."""


def check_computed(spec: ModelSpec) -> None:
    """Raise `UserError` for a model that llama.cpp computes otherwise, or not at all."""
    arch = FAMILIES[spec.family].gguf
    if arch is None:
        raise UserError(
            f"model.family: GGUF files of {spec.family} are not written; export to a folder, for "
            "transformers and vLLM"
        )
    for key, what in _not_computed(spec):
        raise UserError(
            f"model.{key}: llama.cpp's {arch} does not compute {what}; export to a folder, for transformers "
            "and vLLM"
        )


def _not_computed(spec: ModelSpec) -> Iterator[tuple[str, str]]:
    """Yield keys of the model with what llama.cpp's graph of its family leaves out."""
    rope, scaling, moe = turning(spec), spec.rope_scaling, spec.moe
    arch = str(FAMILIES[spec.family].gguf)
    yield from not_computed(spec, arch)
    if spec.mla is not None and spec.norm_eps != _LATENT_EPS:
        yield "norm_eps", f"latents whose norms have another epsilon ({_LATENT_EPS:g}) than the model's"
    if isinstance(scaling, YarnRope) and spec.mla and rope is not None and attention_factor(rope) != 1:
        yield "rope_scaling.mscale", "YaRN with an mscale that is not mscale_all_dim"
    if moe is None:
        return
    if arch == "qwen3moe" and not moe.renormalise:
        yield "moe.renormalise", "experts whose weights do not add up to 1"
    if arch == "qwen3moe" and not all(map(spec.has_experts, range(spec.layers))):
        yield "moe", "layers without experts"
    if arch == "deepseek2" and not moe.shared_ffn:
        yield "moe.shared_ffn", "a mixture without a shared expert"
    if spec.mla is not None and spec.mla.q_rank is not None and spec.layers in _LITE:
        yield "layers", f"a latent of queries in a model of {spec.layers} layers"


def write_metadata(writer: GGUFWriter, spec: ModelSpec) -> None:
    """Add the keys of the architecture to a GGUF file.

    Where llama.cpp computes no windows the length is at most the sliding window: up to it all positions are
    attended to.
    """
    graph = GRAPHS[str(FAMILIES[spec.family].gguf)]
    window = spec.sliding_window
    if graph.window_period is None or window is None:
        writer.add_context_length(min(spec.max_seq_len, window or spec.max_seq_len))
    else:
        writer.add_context_length(spec.max_seq_len)
        writer.add_sliding_window(window)
        writer.add_sliding_window_pattern(window_period(spec) or 1)
    writer.add_embedding_length(spec.hidden)
    writer.add_block_count(spec.layers)
    writer.add_vocab_size(spec.vocab_size)
    routed = None if FAMILIES[spec.family].dense_ffn else spec.moe
    writer.add_feed_forward_length(spec.ffn if routed is None else routed.ffn)
    writer.add_head_count(spec.heads)
    if spec.norm == "layernorm":
        writer.add_layer_norm_eps(spec.norm_eps)
    else:
        writer.add_layer_norm_rms_eps(spec.norm_eps)
    if (rope := turning(spec)) is not None:
        _write_positions(writer, rope, spec.mla is not None)
    if graph.window_rope:
        writer.add_rope_freq_base_swa(spec.rope_local_base_freq or spec.rope_theta)
    _write_scales(writer, spec, graph)
    if spec.mla is None:
        writer.add_head_count_kv(spec.kv_heads)
        writer.add_key_length(spec.head_dim)
        writer.add_value_length(spec.head_dim)
    else:
        _write_latents(writer, spec)
    if spec.moe is not None:
        _write_experts(writer, spec)


def _write_positions(writer: GGUFWriter, rope: RopeSpec, latent: bool) -> None:
    import gguf

    writer.add_rope_freq_base(rope.theta)
    writer.add_rope_dimension_count(rope.dim)
    scaling = rope.scaling
    if isinstance(scaling, LinearRope):
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(scaling.factor)
    if isinstance(scaling, YarnRope):
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(scaling.factor)
        writer.add_rope_scaling_orig_ctx_len(scaling.original_max_seq_len)
        if latent:
            writer.add_rope_scaling_yarn_log_mul(0.1 * scaling.mscale_all_dim)
        else:  # llama.cpp multiplies it by YaRN's usual factor
            usual = 0.1 * math.log(scaling.factor) + 1
            writer.add_rope_scaling_attn_factors(attention_factor(rope) / usual)


def _write_scales(writer: GGUFWriter, spec: ModelSpec, graph: LlamaCppGraph) -> None:
    """Add the factors that a graph multiplies by; Granite's divides logits by its own."""
    add = {
        "embedding_scale": writer.add_embedding_scale,
        "residual_scale": writer.add_residual_scale,
        "attention_scale": writer.add_attention_scale,
        "logit_scale": writer.add_logit_scale,
    }
    for key in graph.scales:
        value = getattr(spec, key) or spec.head_dim**-0.5
        divides = key == "logit_scale" and FAMILIES[spec.family].gguf == "granite"
        add[key](1 / value if divides else value)


def _write_latents(writer: GGUFWriter, spec: ModelSpec) -> None:
    """Add the keys of latent attention, which llama.cpp computes as one group of wide keys, the latents."""
    assert spec.mla is not None
    writer.add_head_count_kv(1)
    writer.add_q_lora_rank(spec.mla.q_rank or 0)
    writer.add_kv_lora_rank(spec.mla.kv_rank)
    writer.add_key_length(spec.mla.kv_rank + spec.mla.rope_dim)
    writer.add_value_length(spec.mla.kv_rank)
    writer.add_key_length_mla(spec.head_dim)
    writer.add_value_length_mla(spec.mla.v_dim)


def _write_experts(writer: GGUFWriter, spec: ModelSpec) -> None:
    import gguf

    moe = spec.moe
    assert moe is not None
    writer.add_expert_count(moe.experts)
    writer.add_expert_used_count(moe.top_k)
    if not FAMILIES[spec.family].dense_ffn:
        return
    writer.add_expert_feed_forward_length(moe.ffn)
    if FAMILIES[spec.family].deepseek_router:
        writer.add_leading_dense_block_count(moe.dense_first)
        writer.add_expert_shared_count(moe.shared_ffn // moe.ffn)
        writer.add_expert_weights_scale(moe.scale)
        writer.add_expert_weights_norm(moe.renormalise)
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
        if moe.top_groups < moe.groups:
            writer.add_expert_group_count(moe.groups)
            writer.add_expert_group_used_count(moe.top_groups)


def turning(spec: ModelSpec) -> RopeSpec | None:
    """Return the rotary positions of the layers that attend to all tokens, or else of others."""
    kinds = sorted(spec.kinds, key=lambda kind: kind.window is not None)
    return next((kind.rope for kind in kinds if kind.rope is not None), None)


def rope_factors(spec: ModelSpec) -> Tensor | None:
    """Return what Llama 3's scaling divides each frequency by, (channels that turn / 2,) fp32; None without
    it."""
    rope = turning(spec)
    if rope is None or not isinstance(rope.scaling, Llama3Rope):
        return None
    device, dtype = torch.device("cpu"), torch.float64
    plain = replace(rope, scaling=None)
    return (frequencies(plain, device, dtype) / frequencies(rope, device, dtype)).float()
