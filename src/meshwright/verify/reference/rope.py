"""Rotary positions of the reference decoder (Su et al. 2021), and their scaling for long contexts.

Shapes: n sequences of T tokens, r rotary channels of a head.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from meshwright.spec.layers import Llama3Rope, LongRope, RopeSpec, YarnRope


def rotate(x: Tensor, turns: Tensor) -> Tensor:
    """Turn the last r channels of x (n, T, heads, d) by `turns` (n, T, r/2): of these channels i and i + r/2
    are a complex number."""
    still = x.shape[-1] - 2 * turns.shape[-1]
    turned = torch.complex(*x[..., still:].chunk(2, -1)) * turns.unsqueeze(2)
    return torch.cat([x[..., :still], turned.real, turned.imag], -1)


def rotations(spec: RopeSpec, positions: Tensor, dtype: torch.dtype) -> Tensor:
    """Complex factors (n, T, r/2) that `rotate` multiplies by, for `positions` (n, T)."""
    angles = positions.unsqueeze(-1) * radians(spec, positions.shape[-1]).to(positions.device, dtype)
    return torch.polar(torch.full_like(angles, turn_length(spec)), angles)


def radians(spec: RopeSpec, length: int) -> Tensor:
    """Angle per position of each channel pair (r/2,) in float64, scaled for long contexts.

    LongRoPE divides it by a factor of the pair, which is another in sequences longer than the original
    `length` (Ding et al. 2024). Linear scaling divides all angles (Chen et al. 2023), Llama 3.1's those of
    pairs that turn less than `low_freq_factor` times in the original context, with a ramp up to
    `high_freq_factor` turns.
    """
    pair = torch.arange(spec.dim // 2, dtype=torch.float64)
    angle = spec.theta ** (-2 * pair / spec.dim)
    scaling = spec.scaling
    if scaling is None:
        return angle
    if isinstance(scaling, LongRope):
        is_long = length > scaling.original_max_seq_len
        divisors = scaling.long_factors if is_long else scaling.short_factors
        return angle / torch.tensor(divisors, dtype=torch.float64)
    stretched = angle / scaling.factor
    if isinstance(scaling, Llama3Rope):
        low, high = scaling.low_freq_factor, scaling.high_freq_factor
        turns = scaling.original_max_seq_len * angle / (2 * math.pi)
        kept = (turns - low) / (high - low)
        between = kept * angle + (1 - kept) * stretched
        return torch.where(turns > high, angle, torch.where(turns < low, stretched, between))
    if isinstance(scaling, YarnRope):
        first, last = yarn_ramp(spec, scaling)
        share = torch.clamp((pair - first) / (last - first), 0, 1)
        return share * stretched + (1 - share) * angle
    return stretched


def yarn_ramp(spec: RopeSpec, scaling: YarnRope) -> tuple[float, float]:
    """The pairs between which YaRN goes from kept to stretched angles (Peng et al. 2023, §3.2).

    A pair i turns L theta^(-2i/r) / 2 pi times in a context of L tokens, solved for i at `beta_fast` and at
    `beta_slow` turns. The bounds of the ramp, and its least width, are those of DeepSeek's and HF's code.
    """
    ends = []
    for turns in (scaling.beta_fast, scaling.beta_slow):
        ratio = scaling.original_max_seq_len / (2 * math.pi * turns)
        ends.append(spec.dim / 2 * math.log(ratio) / math.log(spec.theta))
    first, last = ends
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, spec.dim - 1)
    return first, last if last != first else first + 0.001


def yarn_magnitude(scaling: YarnRope, weight: float) -> float:
    """0.1 weight ln(factor) + 1 where contexts grow (Peng et al. 2023, §3.4), and 1 where they do not."""
    return 1.0 if scaling.factor <= 1 else 0.1 * weight * math.log(scaling.factor) + 1


def turn_length(spec: RopeSpec) -> float:
    """Factor of the rotated channels: the length of a rotation as a complex number; 1 without YaRN and
    LongRoPE."""
    scaling = spec.scaling
    if isinstance(scaling, LongRope):
        if scaling.attention_factor is not None:
            return scaling.attention_factor
        grown = math.log(scaling.factor) / math.log(scaling.original_max_seq_len)
        return math.sqrt(1 + grown) if scaling.factor > 1 else 1.0
    if not isinstance(scaling, YarnRope):
        return 1.0
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    if scaling.mscale > 0 and scaling.mscale_all_dim > 0:
        every = yarn_magnitude(scaling, scaling.mscale_all_dim)
        return yarn_magnitude(scaling, scaling.mscale) / every
    return yarn_magnitude(scaling, 1.0)


def score_factor(spec: RopeSpec) -> float:
    """Factor of latent attention's scores beside 1 / sqrt(d), with YaRN's `mscale_all_dim`; else 1."""
    scaling = spec.scaling
    if not isinstance(scaling, YarnRope) or scaling.mscale_all_dim == 0:
        return 1.0
    return yarn_magnitude(scaling, scaling.mscale_all_dim) ** 2
