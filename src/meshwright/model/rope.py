"""Rotary positions (Su et al. 2021): pairs of a head's channels turn by an angle that grows with position.

Channel i is paired with channel i + d/2 ("rotate half"), the convention of HF's Llama, so that HF weights
load unpermuted. Shapes: B batch, T sequence, H heads, d channels of a head.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from meshwright.kernels import elementwise_cpu
from meshwright.spec.layers import Llama3Rope, LongRope, RopeSpec, YarnRope

Rope = tuple[Tensor, Tensor]
"""(cosines (..., T, 1, d), sines (..., T, 1, d/2)): the angle's cosine stands twice, its sine once.
`with_signs` makes the sines (..., T, 1, d), first negated, which a training step would keep for nothing."""


def rope_table(spec: RopeSpec, positions: Tensor, dtype: torch.dtype, length: int = 1) -> Rope:
    """Cosines and sines for `positions` (T,) or (B, T) in sequences of `length` tokens, from fp32 angles
    (fp64 for fp64), in `dtype`."""
    exact = torch.promote_types(dtype, torch.float32)
    angles = positions.to(exact).unsqueeze(-1) * frequencies(spec, positions.device, exact, length)
    factor = attention_factor(spec)
    cosine, sine = (angles.cos() * factor).to(dtype), (angles.sin() * factor).to(dtype)
    return torch.cat([cosine, cosine], -1).unsqueeze(-2), sine.unsqueeze(-2)


def with_signs(rope: Rope) -> Rope:
    """The tables that `rotate_` takes; `rotate` takes them, too."""
    cosine, sine = rope
    return cosine, torch.cat([-sine, sine], -1)


def frequencies(
    spec: RopeSpec, device: torch.device, dtype: torch.dtype = torch.float32, length: int = 1
) -> Tensor:
    """Radians per position of each channel pair (d/2,) in sequences of `length` tokens, after the spec's
    scaling for long contexts."""
    steps = torch.arange(0, spec.dim, 2, dtype=dtype, device=device) / spec.dim
    base = 1.0 / (spec.theta**steps)
    scaling = spec.scaling
    if scaling is None:
        return base
    if isinstance(scaling, Llama3Rope):
        return _llama3(base, scaling)
    if isinstance(scaling, YarnRope):
        return _yarn(base, scaling, spec.theta)
    if isinstance(scaling, LongRope):
        factors = torch.tensor(scaling.factors(length), dtype=dtype)
        return base / factors.to(device, non_blocking=True)
    return base / scaling.factor


def _llama3(base: Tensor, scaling: Llama3Rope) -> Tensor:
    """Llama 3.1's ramp: wavelengths that fit the original context often stay, long ones are stretched.

    Turns in the original context: at least `high_freq_factor` stays, at most `low_freq_factor` is divided by
    `factor`, and a linear ramp joins them.
    """
    turns = scaling.original_max_seq_len * base / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return kept * base + (1 - kept) * (base / scaling.factor)


def _yarn(base: Tensor, scaling: YarnRope, theta: float) -> Tensor:
    """YaRN's ramp: channels with at least `beta_fast` turns are kept, with at most `beta_slow` divided."""
    dims = 2 * len(base)

    def channel(turns: float) -> float:
        """The fractional index of the channel pair that makes `turns` turns in the original context."""
        return dims * math.log(scaling.original_max_seq_len / (turns * 2 * math.pi)) / (2 * math.log(theta))

    first, last = channel(scaling.beta_fast), channel(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dims - 1)
    steps = torch.arange(len(base), dtype=base.dtype, device=base.device)
    divided = ((steps - first) / (last - first or 0.001)).clamp(0.0, 1.0)
    return divided * (base / scaling.factor) + (1 - divided) * base


def attention_factor(spec: RopeSpec) -> float:
    """Factor of cosines and sines with YaRN and LongRoPE; 1 without them."""
    scaling = spec.scaling
    if not isinstance(scaling, (YarnRope, LongRope)):
        return 1.0
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    if isinstance(scaling, LongRope):
        longer = max(math.log(scaling.factor), 0.0)
        return math.sqrt(1 + longer / math.log(scaling.original_max_seq_len))
    if scaling.mscale and scaling.mscale_all_dim:
        return _mscale(scaling.factor, scaling.mscale) / _mscale(scaling.factor, scaling.mscale_all_dim)
    return _mscale(scaling.factor, 1.0)


def score_factor(spec: RopeSpec) -> float:
    """Factor of latent attention's scores with YaRN, in addition to 1 / sqrt(head_dim); 1 without it."""
    scaling = spec.scaling
    if not isinstance(scaling, YarnRope) or not scaling.mscale_all_dim:
        return 1.0
    return _mscale(scaling.factor, scaling.mscale_all_dim) ** 2


def _mscale(factor: float, weight: float) -> float:
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0


class _Rotate(torch.autograd.Function):
    """Rotation of the last channels, as many as the tables have; the others are copied.

    Its gradient is the opposite rotation, so nothing of x is saved.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        ctx.save_for_backward(cosine, sine)
        return _turn(x, cosine, sine, 1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        cosine, sine = ctx.saved_tensors
        return _turn(grad, cosine, sine, -1), None, None


def _turn(x: Tensor, cosine: Tensor, sine: Tensor, sign: int) -> Tensor:
    if elementwise_cpu.takes(x, cosine, sine) and elementwise_cpu.tables_fit(x, cosine, sine):
        return elementwise_cpu.rotate(x, cosine, sine, sign)
    still, half = x.shape[-1] - cosine.shape[-1], cosine.shape[-1] // 2
    if still:
        return torch.cat([x[..., :still], _turn(x[..., still:], cosine, sine, sign)], -1)
    turned = x * cosine
    sine = sine[..., -half:]
    turned[..., :half].addcmul_(x[..., half:], sine, value=-sign)
    turned[..., half:].addcmul_(x[..., :half], sine, value=sign)
    return turned


def rotate(x_BTHd: Tensor, rope: Rope) -> Tensor:
    """Rotate channel pairs of x (B, T, H, d) by their position's angle; same shape and dtype.

    If the tables have fewer than d channels, the last ones of each head are rotated.
    """
    return _Rotate.apply(x_BTHd, *rope) if torch.is_grad_enabled() else _turn(x_BTHd, *rope, 1)


def rotate_(x_BTHd: Tensor, rope: Rope) -> None:
    """`rotate` in place by tables `with_signs`, without a gradient and in few operators: few tokens take as
    long as their number."""
    cosine, sine = rope
    channels = cosine.shape[-1]
    pairs = x_BTHd if x_BTHd.shape[-1] == channels else x_BTHd[..., -channels:]
    others = pairs.roll(channels // 2, -1)
    pairs.mul_(cosine).addcmul_(others, sine)
