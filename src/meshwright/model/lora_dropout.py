"""Dropout of adapters' inputs (Hu et al. 2021, LoRA) as a function of the token, the layer and the channel.

Nothing is drawn from a generator: whether a number is dropped depends on (seed, update, slot of the sample in
the global batch, place in the sample, name of the weight, channel) alone, so neither a layout nor a resume
changes it, and a recomputing forward drops the same ones.

    token    splitmix64(key + (slot 2^31 + place) golden), with the key of "seed:dropout:update"
    quad     channel div 4
    draw     bits 16 (channel mod 4) and on of splitmix64((token xor key of "name") + quad golden)

For the name of routed experts' matrices, token xor key is replaced by splitmix64 of it + e golden for expert
e. Keys are the first 8 bytes, little endian, of SHA-256 of these texts. A number is dropped if its draw is
below p 2^16, rounded to a whole number, and else divided by the share that is kept.
"""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from meshwright.kernels.splitmix64 import GOLDEN, mix64_, signed, stream
from meshwright.model.token_dispatcher import RowGroups

LANES, STEPS = 4, 2**16
"""Draws of 16 bits from one hash, and the values that each may have."""


class TokenKeys:
    """Keys of the tokens that a forward computes, set before it; none where nothing is dropped."""

    def __init__(self) -> None:
        self.current: Tensor | None = None
        """(B, T) int64, of all tensor ranks' tokens."""

    def of(self, tokens: torch.Size, shard: int) -> Tensor | None:
        """Keys of `tokens` (B, T): all of them, or those of tensor rank `shard`, a piece of all samples'
        tokens, one after the other. None where nothing is dropped."""
        if self.current is None or tokens == self.current.shape:
            return self.current
        count = tokens.numel()
        return self.current.reshape(-1)[shard * count : (shard + 1) * count].view(tokens)


def key_of(text: str) -> int:
    """The key of a text, as an int64."""
    return signed(int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little"))


def token_keys(seed: int, update: int, slots_B: Tensor, places_T: Tensor) -> Tensor:
    """Keys (B, T) of tokens at these places (T,) of the samples in these slots (B,) of the global batch."""
    places = (slots_B.unsqueeze(1) << 31) + places_T
    return mix64_(stream(places, key_of(f"{seed}:dropout:{update}")))


class Dropout:
    """Drops numbers of the input (B, T, I) of the adapter beside the weight `name`."""

    def __init__(self, share: float, name: str, keys: TokenKeys) -> None:
        self.threshold, self.key, self.keys = round(share * STEPS), key_of(name), keys

    @property
    def active(self) -> bool:
        """True if numbers are dropped now."""
        return self.keys.current is not None and self.threshold > 0

    def __call__(self, x_BTI: Tensor, shard: int = 0, first: int = 0) -> Tensor:
        """x has the tokens of tensor rank `shard`, or all of them, and the channels from `first` on."""
        keys = self.keys.of(x_BTI.shape[:2], shard)
        if keys is None or not self.threshold:
            return x_BTI
        dropped: Tensor = _Dropped.apply(x_BTI, keys ^ self.key, first, self.threshold)
        return dropped


class ExpertDropout:
    """Drops numbers of the rows (R, I) of the adapters beside the experts' matrices `name`, of each expert
    others."""

    def __init__(self, share: float, name: str) -> None:
        self.threshold, self.key = round(share * STEPS), key_of(name)

    def factors(self, x_RI: Tensor, groups: RowGroups, first: tuple[int, int]) -> Tensor | None:
        """Factors (R, I): 0 for what is dropped, else 1 over the share that is kept; None for no dropout.

        `first` is the first of the rank's experts, and of the channels that it has of their input.
        """
        if groups.keys is None or not self.threshold:
            return None
        expert, channel = first
        numbers = groups.expert_of_rows(len(x_RI)).to(torch.int64).add_(expert)
        keys = mix64_((groups.keys ^ self.key) + numbers * signed(GOLDEN))
        return kept(keys, channel, x_RI.shape[1], self.threshold, x_RI.dtype)


class _Dropped(torch.autograd.Function):
    """Saves the keys of tokens alone, and draws again in the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, keys_BT: Tensor, first: int, threshold: int) -> Tensor:
        ctx.save_for_backward(keys_BT)
        ctx.first, ctx.threshold = first, threshold
        return x * kept(keys_BT, first, x.shape[-1], threshold, x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        (keys_BT,) = ctx.saved_tensors
        return grad * kept(keys_BT, ctx.first, grad.shape[-1], ctx.threshold, grad.dtype), None, None, None


def kept(keys_BT: Tensor, first: int, channels: int, threshold: int, dtype: torch.dtype) -> Tensor:
    """Factors (..., channels) of keys (...): 0 for what is dropped, else 1 over the share that is kept."""
    quads = torch.arange(first // LANES, -(-(first + channels) // LANES), device=keys_BT.device)
    bits = mix64_(keys_BT.unsqueeze(-1) + quads * signed(GOLDEN))
    draws = bits.view(torch.int16).narrow(-1, first % LANES, channels).int().bitwise_and_(STEPS - 1)
    return (draws >= threshold).to(dtype).mul_(STEPS / (STEPS - threshold))
