"""Rules on experts and on latent attention: one rule, one function, one sentence."""

from __future__ import annotations

import json
from math import gcd

from meshwright.spec.arithmetic import divisors, nearest
from meshwright.spec.errors import UserError
from meshwright.spec.sections import Sections


def experts_are_gated(spec: Sections) -> None:
    """Experts are computed as SwiGLU without biases."""
    model = spec.model
    if model.moe is not None and (model.activation != "swiglu" or model.mlp_bias):
        key = "activation" if model.activation != "swiglu" else "mlp_bias"
        raise UserError(
            f"model.{key}: {json.dumps(getattr(model, key))} does not go with model.moe, whose experts are "
            f"SwiGLU without biases; give model.activation = 'swiglu' and model.mlp_bias = false"
        )


def tokens_find_their_experts(spec: Sections) -> None:
    """Groups are equal, and what a token chooses from holds as many experts as it takes."""
    moe = spec.model.moe
    if moe is None:
        return
    if moe.top_k > moe.experts:
        raise UserError(
            f"model.moe.top_k: {moe.top_k} is more than model.moe.experts = {moe.experts}; "
            f"give at most {moe.experts}"
        )
    if moe.experts % moe.groups:
        raise UserError(
            f"model.moe.groups: {moe.groups} groups do not divide model.moe.experts = {moe.experts}; "
            f"try {nearest(moe.groups, divisors(moe.experts))}"
        )
    if moe.top_groups > moe.groups:
        raise UserError(
            f"model.moe.top_groups: {moe.top_groups} is more than model.moe.groups = {moe.groups}; "
            f"give at most {moe.groups}"
        )
    open_to_all = moe.top_groups * (moe.experts // moe.groups)
    if moe.top_k > open_to_all:
        raise UserError(
            f"model.moe.top_k: {moe.top_k} is more than the {open_to_all} experts of model.moe.top_groups = "
            f"{moe.top_groups} groups; give at most {open_to_all}, or top_groups = "
            f"{-(-moe.top_k * moe.groups // moe.experts)}"
        )


def some_layer_has_experts(spec: Sections) -> None:
    """A mixture of experts has a layer to be in."""
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


def only_experts_are_shared(spec: Sections) -> None:
    """Without experts there is nothing that the expert axis could share, or send in parts."""
    for key in ("ep", "etp", "expert_parts"):
        given = getattr(spec.layout, key)
        if spec.model.moe is None and given > 1:
            raise UserError(
                f"layout.{key}: {given} has no effect, as the model has no experts; set layout.{key} = 1, or "
                f"give model.moe"
            )


def expert_axis_divides(spec: Sections) -> None:
    """Expert ranks have equal shares, and are folded out of the ranks of one stage."""
    layout, moe = spec.layout, spec.model.moe
    if moe is None:
        return
    ranks, ep, etp = layout.expert_ranks, layout.ep, layout.etp
    folded = f"dp {layout.dp} x cp {layout.cp} x tp {layout.tp} = {ranks} ranks"
    fits = [n for n in divisors(gcd(ranks, moe.experts)) if ranks % (n * etp) == 0]
    slices = [n for n in divisors(gcd(ranks, moe.ffn)) if ranks % (n * ep) == 0]
    if moe.experts % ep:
        hint = nearest(ep, fits) if fits else 1
        raise UserError(
            f"layout.ep: {ep} expert ranks do not divide model.moe.experts = {moe.experts}; of "
            f"{folded} try {hint}"
        )
    if moe.ffn % etp:
        hint = nearest(etp, slices) if slices else 1
        raise UserError(
            f"layout.etp: {etp} ranks do not divide the model.moe.ffn = {moe.ffn} channels of an expert; "
            f"of {folded} try {hint}"
        )
    if ranks % (ep * etp):
        key, hint = ("ep", nearest(ep, fits)) if fits else ("etp", nearest(etp, slices or [1]))
        other = f" with etp {etp}" if etp > 1 else ""
        given = f"layout.ep: {ep}{other} is" if ep > 1 or etp == 1 else f"layout.etp: {etp} is"
        raise UserError(
            f"{given} folded out of {folded} of a stage and replica, which it does not divide; "
            f"try layout.{key} = {hint}"
        )


def shared_experts_divide(spec: Sections) -> None:
    """Tensor ranks have equal shares of the shared experts' channels."""
    moe, tp = spec.model.moe, spec.layout.tp
    if moe is not None and moe.shared_ffn % tp:
        fits = divisors(gcd(moe.shared_ffn, spec.model.heads))
        raise UserError(
            f"layout.tp: {tp} tensor ranks do not divide the model.moe.shared_ffn = {moe.shared_ffn} "
            f"channels of the shared experts; try {nearest(tp, fits)}"
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
    if mla.v_dim > model.head_dim:
        raise UserError(
            f"model.mla.v_dim: {mla.v_dim} is more than model.head_dim = {model.head_dim}; give at most that"
        )
    if model.kv_heads != model.heads:
        raise UserError(
            f"model.kv_heads: {model.kv_heads} does not go with model.mla, which makes keys and values for "
            f"each of model.heads = {model.heads}; give {model.heads}"
        )
    for key, wanted in (("position", "rope"), ("qkv_bias", False), ("out_bias", False), ("qk_norm", False)):
        if getattr(model, key) != wanted:
            raise UserError(
                f"model.{key}: {json.dumps(getattr(model, key))} does not go with model.mla; give "
                f"{json.dumps(wanted)}"
            )


SPARSE_RULES = (
    experts_are_gated,
    tokens_find_their_experts,
    some_layer_has_experts,
    latents_make_heads,
    only_experts_are_shared,
    expert_axis_divides,
    shared_experts_divide,
)
