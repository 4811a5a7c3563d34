"""Rules on experts and on latent attention: one rule, one function, one sentence."""

from __future__ import annotations

from math import gcd
from typing import TYPE_CHECKING

from meshwright.spec.errors import UserError
from meshwright.spec.numbers import divisors, nearest

if TYPE_CHECKING:
    from meshwright.spec.run import RunSpec


def experts_are_gated(spec: RunSpec) -> None:
    """Experts are computed as SwiGLU without biases."""
    model = spec.model
    if model.moe is not None and (model.activation != "swiglu" or model.mlp_bias):
        key = "activation" if model.activation != "swiglu" else "mlp_bias"
        raise UserError(
            f"model.{key}: {getattr(model, key)!r} does not go with model.moe, whose experts are SwiGLU "
            f"without biases; give model.activation = 'swiglu' and model.mlp_bias = false"
        )


def tokens_find_their_experts(spec: RunSpec) -> None:
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


def some_layer_has_experts(spec: RunSpec) -> None:
    """A mixture of experts has a layer to be in."""
    model, moe = spec.model, spec.model.moe
    if moe is not None and not any(map(moe.has_experts, range(model.layers))):
        raise UserError(
            f"model.moe.dense_first: with {moe.dense_first} dense layers and each {moe.every}th of the "
            f"others none of model.layers = {model.layers} has experts; give dense_first = 0 and "
            f"every = 1, or more layers"
        )


def expert_axis_divides(spec: RunSpec) -> None:
    """Expert ranks have equal shares, and are folded out of the ranks of one stage."""
    layout, moe = spec.layout, spec.model.moe
    for key in ("ep", "etp"):
        if moe is None and getattr(layout, key) > 1:
            raise UserError(
                f"layout.{key}: {getattr(layout, key)} expert ranks have nothing to share, as the model has "
                f"no experts; set layout.{key} = 1, or give model.moe"
            )
    if moe is None:
        return
    if moe.experts % layout.ep:
        raise UserError(
            f"layout.ep: {layout.ep} expert ranks do not divide model.moe.experts = {moe.experts}; "
            f"try {nearest(layout.ep, divisors(moe.experts))}"
        )
    if moe.ffn % layout.etp:
        raise UserError(
            f"layout.etp: {layout.etp} ranks do not divide the model.moe.ffn = {moe.ffn} channels of an "
            f"expert; try {nearest(layout.etp, divisors(moe.ffn))}"
        )
    ranks = layout.expert_ranks
    if ranks % (layout.ep * layout.etp):
        fits = [n for n in divisors(ranks) if moe.experts % n == 0 and ranks % (n * layout.etp) == 0]
        hint = f"layout.ep = {nearest(layout.ep, fits)}" if fits else f"layout.etp = {layout.tp}"
        times = f" x etp {layout.etp}" if layout.etp > 1 else ""
        raise UserError(
            f"layout.ep: {layout.ep}{times} expert ranks are folded out of dp {layout.dp} x cp {layout.cp} x "
            f"tp {layout.tp} = {ranks} ranks, which they do not divide; try {hint}"
        )


def shared_experts_divide(spec: RunSpec) -> None:
    """Tensor ranks have equal shares of the shared experts' channels."""
    moe, tp = spec.model.moe, spec.layout.tp
    if moe is not None and moe.shared_ffn % tp:
        fits = divisors(gcd(moe.shared_ffn, spec.model.heads))
        raise UserError(
            f"layout.tp: {tp} tensor ranks do not divide the model.moe.shared_ffn = {moe.shared_ffn} "
            f"channels of the shared experts; try {nearest(tp, fits)}"
        )


def latents_make_heads(spec: RunSpec) -> None:
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
                f"model.{key}: {getattr(model, key)!r} does not go with model.mla; give {wanted!r}"
            )


SPARSE_RULES = (
    experts_are_gated,
    tokens_find_their_experts,
    some_layer_has_experts,
    latents_make_heads,
    expert_axis_divides,
    shared_experts_divide,
)
