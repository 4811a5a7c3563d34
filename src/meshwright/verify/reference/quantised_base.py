"""Frozen weights in 8 and 4 bits (Dettmers et al. 2023, QLoRA), written apart from
`model/blockwise_quantisation.py`.

64 inputs of a row share their largest magnitude m; a number x becomes m times the level that is nearest to
x / m. Products are taken in float64, or in fp32 for narrower formats, of a matrix (O, I) at once, and without
codes.
"""

from __future__ import annotations

import re

import torch
from torch import Tensor

LAYERS = re.compile(
    r"blocks\.\d+\.(attn\.(q|k|v|o|q_a|kv_a|kv)|mlp\.(shared_gate|(shared\.)?(gate|up|down)))\.weight"
)
"""Names of the matrices that are quantised."""
NF4 = (
    "-1.0 -0.6961928009986877 -0.5250730514526367 -0.39491748809814453 -0.28444138169288635 "
    "-0.18477343022823334 -0.09105003625154495 0.0 0.07958029955625534 0.16093020141124725 "
    "0.24611230194568634 0.33791524171829224 0.44070982933044434 0.5626170039176941 0.7229568362236023 1.0"
)
"""The levels of table 6 in appendix E, as numbers of fp32."""


def quantised(weights: dict[str, Tensor], form: str, compute: torch.dtype) -> dict[str, Tensor]:
    """The weights, of which those of linear layers in blocks are rounded to `compute` and then to a format;
    in float64."""
    return {
        name: rounded(weight.to(compute), form).double() if LAYERS.fullmatch(name) else weight
        for name, weight in weights.items()
    }


def rounded(weight: Tensor, form: str) -> Tensor:
    """A matrix (O, I) rounded to a format, in its own."""
    blocks = weight.double().reshape(weight.shape[0], -1, 64)
    largest = blocks.abs().max(dim=-1, keepdim=True).values
    divisor = torch.where(largest > 0, largest, 1.0)
    level = _of_nf4(blocks / divisor) if form == "nf4" else _of_integers(blocks, divisor, form)
    wide = torch.float64 if weight.dtype is torch.float64 else torch.float32
    return (level.to(wide) * largest.to(wide)).to(weight.dtype).reshape(weight.shape)


def _of_integers(blocks: Tensor, largest: Tensor, form: str) -> Tensor:
    """The nearest of n / N for whole numbers n from -N to N, even ones where two are as near."""
    most = 2 ** (int(form.removeprefix("int")) - 1) - 1
    return (blocks * most / largest).round() / most


def _of_nf4(scaled: Tensor) -> Tensor:
    """The nearest of the levels of NF4."""
    levels = torch.tensor([float(each) for each in NF4.split()], dtype=torch.float64, device=scaled.device)
    best = torch.full_like(scaled, torch.inf)
    found = torch.zeros_like(scaled)
    for level in levels:
        nearer = (scaled - level).abs() < best
        best = torch.where(nearer, (scaled - level).abs(), best)
        found = torch.where(nearer, level, found)
    return found
