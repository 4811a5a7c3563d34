"""Adapters of low rank (Hu et al. 2021, LoRA) on one device, written apart from `spec/lora.py` and
`model/lora.py`.

A linear layer with weight W and an adapter computes W x + s B A x, where s is alpha / rank, or alpha /
sqrt(rank) (Kalajdzievski 2023, rsLoRA). All but A and B is frozen.

Shapes: n sequences of T tokens, I inputs and O outputs of a linear layer, r the rank.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from meshwright.spec.lora import LoraSpec
from meshwright.verify.reference.patterns import matches

LINEAR = re.compile(r"blocks\.\d+\.(attn\.(q|k|v|o|q_a|kv_a|kv)|mlp\.(shared\.)?(gate|up|down))\.weight")
"""Names of the matrices that may have adapters."""


def has_adapter(lora: LoraSpec, name: str) -> bool:
    """True for a matrix beside which there is an adapter."""
    wanted = any(pattern == "all-linear" or matches(pattern, name) for pattern in lora.targets)
    return wanted and LINEAR.fullmatch(name) is not None


def names_of(name: str) -> tuple[str, str]:
    """The names of A and of B beside the matrix of this name."""
    layer = name[: -len("weight")]
    return f"{layer}lora_a.weight", f"{layer}lora_b.weight"


def is_adapter(name: str) -> bool:
    """True for the name of an A or a B."""
    return re.search(r"\.lora_[ab]\.", name) is not None


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
            (outputs, inputs), (a, b) = weight.shape, names_of(name)
            drawn = uniforms(a, lora.rank * inputs).reshape(lora.rank, inputs)
            found[a] = (2 * drawn - 1) / math.sqrt(inputs)
            found[b] = torch.zeros(outputs, lora.rank, dtype=torch.float64)
    return found


def added(lora: LoraSpec | None, name: str, x: Tensor, weights: Mapping[str, Tensor]) -> Tensor | float:
    """What the adapter beside the matrix of this name adds (n, T, O) for x (n, T, I); 0 without one."""
    if lora is None or not has_adapter(lora, name):
        return 0.0
    a, b = (weights[each] for each in names_of(name))
    scale = lora.alpha / math.sqrt(lora.rank) if lora.rslora else lora.alpha / lora.rank
    return scale * (x @ a.T @ b.T)
