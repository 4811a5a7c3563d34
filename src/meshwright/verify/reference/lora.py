"""Adapters of low rank (Hu et al. 2021, LoRA) on one device, written apart from `spec/lora.py` and
`model/lora.py`.

A linear layer with weight W and an adapter computes W x + s B A d(x), where s is alpha / rank, or alpha /
sqrt(rank) (Kalajdzievski 2023, rsLoRA), and d the dropout of this layer by the rule of docs/lora.md. With
DoRA (Liu et al. 2024) it computes W x + (g - 1) W d(x) + g s B A d(x), where g is m over the lengths of the
rows of W + s B A, which are constants. All but A, B and m is frozen. Each matrix of a routed expert has an A
and a B of its own, with a dropout of its own.

Shapes: n sequences of T tokens, I inputs and O outputs of a linear layer, r the rank, E experts.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable, Mapping
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from meshwright.spec.lora import LoraSpec
from meshwright.verify.reference.patterns import matches

LINEAR = re.compile(r"blocks\.\d+\.(attn\.(q|k|v|o|q_a|kv_a|kv)|mlp\.(shared\.)?(gate|up|down))\.weight")
"""Names of the matrices that may have adapters."""
OF_EXPERTS = re.compile(r"blocks\.\d+\.mlp\.experts\.(gate|up|down)")
"""Names of the matrices of routed experts (E, O, I), which only a pattern gives adapters."""
GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def has_adapter(lora: LoraSpec, name: str) -> bool:
    """True for a matrix beside which there is an adapter."""
    wanted = any(matches(pattern, name) for pattern in lora.targets)
    if OF_EXPERTS.fullmatch(name):
        return wanted
    return (wanted or "all-linear" in lora.targets) and LINEAR.fullmatch(name) is not None


def names_of(name: str) -> tuple[str, str]:
    """The names of A and of B beside the matrix of this name."""
    layer = f"{name}_adapter." if OF_EXPERTS.fullmatch(name) else name[: -len("weight")]
    return f"{layer}lora_a.weight", f"{layer}lora_b.weight"


def is_adapter(name: str) -> bool:
    """True for the name of an A, a B or an m."""
    return re.search(r"\.lora_(a|b|magnitude)\.", name) is not None


def initial_adapters(
    lora: LoraSpec, weights: Mapping[str, Tensor], uniforms: Callable[[str, int], Tensor]
) -> dict[str, Tensor]:
    """A and B beside each of the `weights` that has them, in float64.

    B is zero, and the numbers of A are uniform between -1 / sqrt(I) and 1 / sqrt(I); `uniforms` gives the
    first numbers between 0 and 1 of a name.
    """
    found: dict[str, Tensor] = {}
    for name, weight in weights.items():
        if has_adapter(lora, name):
            (*experts, outputs, inputs), (a, b) = weight.shape, names_of(name)
            shape = [*experts, lora.rank, inputs]
            found[a] = (2 * uniforms(a, math.prod(shape)).reshape(shape) - 1) / math.sqrt(inputs)
            found[b] = torch.zeros(*experts, outputs, lora.rank, dtype=torch.float64)
    return found


def magnitudes(lora: LoraSpec, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The initial m beside each of the `weights` that has one: the lengths of its rows."""
    own = [name for name in weights if lora.dora and has_adapter(lora, name)]
    return {_magnitude_of(name): weights[name].pow(2).sum(1).sqrt() for name in own}


def _magnitude_of(name: str) -> str:
    return f"{name[: -len('weight')]}lora_magnitude.weight"


class Drop(Protocol):
    """(name of a matrix, x (n, T, I), number of the expert that it is of, if any) -> the input of its
    adapter's A."""

    def __call__(self, name: str, x: Tensor, expert: int | None = None, /) -> Tensor: ...


def added(
    lora: LoraSpec | None,
    name: str,
    x: Tensor,
    weights: Mapping[str, Tensor],
    drop: Drop,
    linear: Callable[[Tensor], Tensor],
) -> Tensor | float:
    """The share (n, T, O) of the adapter beside the matrix of this name for x (n, T, I); 0 without one.

    `linear` is the product with the matrix itself.
    """
    if lora is None or not has_adapter(lora, name):
        return 0.0
    a, b = (weights[each] for each in names_of(name))
    dropped = drop(name, x)
    change = _scale(lora) * (dropped @ a.T @ b.T)
    if not lora.dora:
        return change
    lengths = (weights[name] + _scale(lora) * (b @ a)).detach().pow(2).sum(1).sqrt()
    factor = weights[_magnitude_of(name)] / lengths
    return (factor - 1) * linear(dropped) + factor * change


def added_by_expert(
    lora: LoraSpec | None,
    name: str,
    expert: int,
    x: Tensor,
    weights: Mapping[str, Tensor],
    drop: Callable[[str, Tensor, int], Tensor],
) -> Tensor | float:
    """The share (R, O) of the adapter of one expert's matrix of this name for its rows x (R, I); 0 without
    one. `drop` is called with this expert's rows and number."""
    if lora is None or not has_adapter(lora, name):
        return 0.0
    a, b = (weights[each][expert] for each in names_of(name))
    return _scale(lora) * (drop(name, x, expert) @ (b @ a).T)


def _scale(lora: LoraSpec) -> float:
    return lora.alpha / math.sqrt(lora.rank) if lora.rslora else lora.alpha / lora.rank


def no_dropout(_name: str, x: Tensor, _expert: int | None = None) -> Tensor:
    """x itself."""
    return x


class ReferenceDropout:
    """Dropout of whole samples in these `slots` (n,) of the batch, after a number of updates."""

    def __init__(self, lora: LoraSpec, seed: int, update: int, slots: Tensor) -> None:
        self.dropped = round(lora.dropout * 2**16)
        self._key = _key(f"{seed}:dropout:{update}")
        self._slots: NDArray[np.uint64] = slots.cpu().numpy().astype(np.uint64)

    def __call__(self, name: str, x: Tensor, expert: int | None = None, /) -> Tensor:
        """x (n, T, I) with numbers that are 0, and the others divided by the share of them."""
        _, length, channels = x.shape
        slots = np.left_shift(self._slots[:, None], np.uint64(31))
        places = np.add(slots, np.arange(length, dtype=np.uint64), dtype=np.uint64)
        tokens = _mixed(self._key + places * GOLDEN) ^ _key(name)
        if expert is not None:
            tokens = _mixed(tokens + np.uint64(expert) * GOLDEN)
        channel = np.arange(channels, dtype=np.uint64)
        bits = _mixed(tokens[:, :, None] + channel // np.uint64(4) * GOLDEN)
        drawn = (bits >> (np.uint64(16) * (channel % np.uint64(4)))) & np.uint64(0xFFFF)
        kept = torch.from_numpy(drawn.astype(np.int64)).to(x.device) >= self.dropped
        return torch.where(kept, x, 0) * (2**16 / (2**16 - self.dropped))


def _key(text: str) -> np.uint64:
    return np.uint64(int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little"))


def _mixed(bits: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finaliser of splitmix64 (Steele et al. 2014)."""
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return bits ^ (bits >> np.uint64(31))
