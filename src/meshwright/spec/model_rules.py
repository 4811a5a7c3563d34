"""Rules about the fields of a model: one function per rule, one sentence with the key and the values."""

from __future__ import annotations

import json
from typing import Any

from meshwright.spec.arithmetic import check_at_most, check_divides
from meshwright.spec.errors import UserError
from meshwright.spec.layers import LongRope
from meshwright.spec.model import ModelSpec
from meshwright.spec.sections import Sections


def heads_share_keys(spec: Sections) -> None:
    """Grouped-query attention has as many query heads for each key-value head."""
    check_divides("model.kv_heads", spec.model.kv_heads, "model.heads", spec.model.heads)


def rope_turns_pairs(spec: Sections) -> None:
    """Rotary positions rotate pairs of channels of a head, all of them or some."""
    model = spec.model
    if model.rope_dim is not None:
        if model.rope_dim % 2:
            raise UserError(f"model.rope_dim: {model.rope_dim} is odd, and rotary positions need an even one")
        check_at_most("model.rope_dim", model.rope_dim, "model.head_dim", model.head_dim)
    elif model.position == "rope" and model.head_dim % 2:
        raise UserError(f"model.head_dim: {model.head_dim} is odd, and rotary positions need an even one")


def rotary_layers_are_layers(spec: Sections) -> None:
    """Each layer has rotary positions or none; what says so goes with rotary positions."""
    model = spec.model
    if model.rope_layers is not None and len(model.rope_layers) > model.layers:
        raise UserError(
            f"model.rope_layers: {len(model.rope_layers)} layers are more than model.layers = "
            f"{model.layers}; give one for each layer, or fewer, which repeat"
        )
    for key in ("rope_layers", "rope_dim"):
        if getattr(model, key) is not None:
            _check_fields(model, f"model.{key}, which is of rotary positions", {"position": "rope"})


def norms_have_what_they_are_given(spec: Sections) -> None:
    """An RMSNorm has no bias, a LayerNorm's weight has no offset, and a parallel block has one norm."""
    model = spec.model
    if not model.norm_bias:
        _check_fields(model, "model.norm_bias = false, which is of LayerNorms", {"norm": "layernorm"})
    if model.norm_unit_offset:
        _check_fields(model, "model.norm_unit_offset, which is of RMSNorms", {"norm": "rmsnorm"})
    if model.qk_norm_over == "all":
        _check_fields(model, "model.qk_norm_over = 'all', which is of that norm", {"qk_norm": True})
    if model.parallel_block:
        _check_fields(model, "model.parallel_block, which has one norm, before it", {"norm_placement": "pre"})


def yarn_has_wavelengths(spec: Sections) -> None:
    """YaRN's ramp is over wavelengths that grow with the channel."""
    model = spec.model
    if model.rope_scaling is not None and model.rope_scaling.kind == "yarn" and model.rope_theta <= 1:
        raise UserError(
            f"model.rope_theta: {model.rope_theta} gives no growing wavelengths, as model.rope_scaling.kind "
            f"= 'yarn' needs; give more than 1, such as 10000"
        )


def pairs_have_their_factors(spec: Sections) -> None:
    """LongRoPE has two factors for each pair of channels that turns."""
    model, scaling = spec.model, spec.model.rope_scaling
    if not isinstance(scaling, LongRope):
        return
    if scaling.original_max_seq_len == 1:
        raise UserError(
            "model.rope_scaling.original_max_seq_len: 1 has no logarithm to divide by, as longrope's factor "
            "on cosines and sines needs; give the length that the model was trained on"
        )
    pairs = (model.rope_dim or model.head_dim) // 2
    for key in ("short_factors", "long_factors"):
        if (given := len(getattr(scaling, key))) != pairs:
            raise UserError(
                f"model.rope_scaling.{key}: {given} factors are not one for each of the {pairs} pairs of "
                f"channels that turn; give {pairs}"
            )


def attention_has_a_kernel(spec: Sections) -> None:
    """No kernel of attention that torch calls caps scores: this program's own operators do."""
    softcap, chosen = spec.model.attention_softcap, spec.train.attention_backend
    if softcap is not None and chosen != "auto":
        raise UserError(
            f"train.attention_backend: {chosen!r} has no effect with model.attention_softcap = {softcap:g}, "
            f"as torch calls no attention that caps scores; leave it out"
        )


def sequence_fits_positions(spec: Sections) -> None:
    """Learned positions end at `max_seq_len`."""
    if spec.model.position == "learned":
        what = "the learned positions of model.max_seq_len"
        check_at_most("data.seq_len", spec.data.seq_len, what, spec.model.max_seq_len)


def _check_fields(model: ModelSpec, part: str, computed: dict[str, Any]) -> None:
    """Raise `UserError` for a field that has another value than the one that goes with `part`."""
    for key, value in computed.items():
        if getattr(model, key) != value:
            given = json.dumps(getattr(model, key))
            raise UserError(f"model.{key}: {given} does not go with {part}; give {json.dumps(value)}")


def experts_are_gated(spec: Sections) -> None:
    """Layers beside experts, and shared experts, are computed as SwiGLU without biases."""
    if spec.model.moe is not None:
        part = "model.moe, beside whose experts layers are SwiGLU without biases"
        _check_fields(spec.model, part, {"activation": "swiglu", "mlp_bias": False})
        _check_fields(spec.model, "model.moe, which has norms before it", {"norm_placement": "pre"})


def gates_have_shared_experts(spec: Sections) -> None:
    """A gate of shared experts has such experts."""
    moe = spec.model.moe
    if moe is not None and moe.shared_gate and not moe.shared_ffn:
        raise UserError(
            "model.moe.shared_gate: true has no shared experts to multiply, as model.moe.shared_ffn is 0; "
            "give model.moe.shared_ffn, or shared_gate = false"
        )


def tokens_find_their_experts(spec: Sections) -> None:
    """Groups are equal, and the groups that a token chooses from hold as many experts as it takes."""
    moe = spec.model.moe
    if moe is None:
        return
    check_at_most("model.moe.top_k", moe.top_k, "model.moe.experts", moe.experts)
    check_divides("model.moe.groups", moe.groups, "model.moe.experts", moe.experts)
    check_at_most("model.moe.top_groups", moe.top_groups, "model.moe.groups", moe.groups)
    eligible = moe.top_groups * (moe.experts // moe.groups)
    if moe.top_k > eligible:
        raise UserError(
            f"model.moe.top_k: {moe.top_k} is more than the {eligible} experts of model.moe.top_groups = "
            f"{moe.top_groups} groups; give at most {eligible}, or top_groups = "
            f"{-(-moe.top_k * moe.groups // moe.experts)}"
        )


def some_layer_has_experts(spec: Sections) -> None:
    """A mixture of experts is in at least one layer."""
    model, moe = spec.model, spec.model.moe
    if moe is None or any(map(moe.has_experts, range(model.layers))):
        return
    key, most = ("dense_first", model.layers - moe.every)
    if most < 0:
        key, most = "every", max(1, model.layers - moe.dense_first)
    raise UserError(
        f"model.moe.{key}: with dense_first = {moe.dense_first} and every = {moe.every} none of "
        f"model.layers = {model.layers} has experts; give {key} = {most} or less, or more layers"
    )


def latents_make_heads(spec: Sections) -> None:
    """Latent attention has rotary positions in a part of each head, and keys for every head."""
    model, mla = spec.model, spec.model.mla
    if mla is None:
        return
    if mla.rope_dim >= model.head_dim or mla.rope_dim % 2:
        raise UserError(
            f"model.mla.rope_dim: {mla.rope_dim} should be even, and less than model.head_dim = "
            f"{model.head_dim}, of which it is a part"
        )
    check_at_most("model.mla.v_dim", mla.v_dim, "model.head_dim", model.head_dim)
    part = "model.mla, which has keys and values for each of model.heads"
    _check_fields(model, part, {"kv_heads": model.heads})
    computed = {"position": "rope", "qkv_bias": False, "out_bias": False, "qk_norm": False, "rope_dim": None}
    computed |= {"rope_layers": None, "attention_scale": None, "norm_unit_offset": False}
    computed |= {"attention_softcap": None, "attention_sinks": False}
    _check_fields(model, "model.mla", computed)
    if isinstance(model.rope_scaling, LongRope):
        raise UserError(
            "model.rope_scaling.kind: 'longrope' is not computed with model.mla; give another kind, or none"
        )


def layer_types_have_windows(spec: Sections) -> None:
    """Layers have a type each at most; a window and a rotary base of sliding layers have such layers."""
    model, types = spec.model, spec.model.layer_types
    if types is not None and len(types) > model.layers:
        raise UserError(
            f"model.layer_types: {len(types)} types are more than model.layers = {model.layers}; give one "
            f"for each layer, or fewer, which repeat"
        )
    slides = types is not None and "sliding_attention" in types
    if slides and model.sliding_window is None:
        raise UserError(
            "model.layer_types: 'sliding_attention' attends to the last model.sliding_window positions, and "
            "there is none; give model.sliding_window, or 'full_attention' alone"
        )
    for key, idle in (("sliding_window", types is not None), ("rope_local_base_freq", True)):
        if getattr(model, key) is not None and idle and not slides:
            raise UserError(
                f"model.{key}: {getattr(model, key)} has no effect without 'sliding_attention' in "
                f"model.layer_types; give layers of that type, or none in model.{key}"
            )
    if model.rope_local_base_freq is not None:
        part = f"model.rope_local_base_freq = {model.rope_local_base_freq:g}, a base of rotary positions"
        _check_fields(model, part, {"position": "rope"})


def further_tokens_have_a_loss(spec: Sections) -> None:
    """A layer that predicts further tokens is one, and goes with losses and positions that it knows."""
    model, train = spec.model, spec.train
    factor, usual = train.mtp_loss_scaling_factor, type(train).model_fields["mtp_loss_scaling_factor"].default
    if model.mtp_num_layers == 0:
        if factor != usual:
            raise UserError(
                f"train.mtp_loss_scaling_factor: {factor:g} has no effect without a layer that predicts "
                f"further tokens; give model.mtp_num_layers = 1, or leave it out"
            )
        return
    part = f"model.mtp_num_layers = {model.mtp_num_layers}"
    if model.mtp_num_layers > 1:
        raise UserError(
            f"{part.replace(' =', ':')} layers each predict one more token than the one before, and one such "
            f"layer is computed; give 1, or 0"
        )
    if model.position == "learned":
        raise UserError(
            f"model.position: 'learned' does not go with {part}, whose layer takes embeddings of tokens "
            f"without their positions; give 'rope', or model.mtp_num_layers = 0"
        )
    for table, source in spec.tables_of_models.items():
        raise UserError(
            f"{table}: {source} answers about the next token alone, and {part} predicts one more; give "
            f"model.mtp_num_layers = 0, or --{table} none"
        )
    if train.offload_activations != "none":
        raise UserError(
            f"train.offload_activations: '{train.offload_activations}' does not go with {part}, whose layer "
            f"follows the head; give 'none', or model.mtp_num_layers = 0"
        )


MODEL_RULES = (
    heads_share_keys,
    rope_turns_pairs,
    rotary_layers_are_layers,
    norms_have_what_they_are_given,
    yarn_has_wavelengths,
    pairs_have_their_factors,
    attention_has_a_kernel,
    layer_types_have_windows,
    sequence_fits_positions,
    experts_are_gated,
    gates_have_shared_experts,
    tokens_find_their_experts,
    some_layer_has_experts,
    latents_make_heads,
    further_tokens_have_a_loss,
)
