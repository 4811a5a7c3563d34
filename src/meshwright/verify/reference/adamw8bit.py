"""Moments in 8 bits (Dettmers et al. 2022, arXiv 2110.02861), as real numbers that each step rounds.

Each is the nearest value of the map times the largest number of its block.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from meshwright.spec import RunSpec
from meshwright.spec.eight_bit import blocks_of
from meshwright.verify.reference.groups import multiplies

LEAST_SCALE = 1e-12
"""Scale of a block of zeros. Source: torchao."""


def map_values(signed: bool, like: Tensor) -> Tensor:
    """The 256 values of the dynamic map in rising order, which are numbers of fp32 (torchao).

    The decade below 10^-k is cut into 2^(6 - k) equal parts, twice as many without a sign: their centres.
    """
    values = [torch.tensor([0.0, 1.0])]
    for k in range(7):
        edges = torch.linspace(0.1, 1.0, 2 ** (6 - k + (not signed)) + 1)
        centres = (edges[1:] + edges[:-1]) * 0.5 * 10**-k
        values += [centres, -centres] if signed else [centres]
    return torch.cat(values).sort().values.to(like)


def round_moments(moments: Mapping[str, Mapping[str, Tensor]], spec: RunSpec, name: str) -> None:
    """Round the moments of parameter `name` in place, where the run keeps them in 8 bits."""
    if spec.train.optimiser != "adamw8bit" or not multiplies(name, moments["exp_avg"][name].ndim):
        return
    for kind, held in moments.items():
        held[name].copy_(rounded(held[name], kind == "exp_avg", blocks_of(spec)[name]))


def rounded(moment: Tensor, signed: bool, block: int, nudge: float = 0.0) -> Tensor:
    """The nearest values in 8 bits; quotients are first multiplied by 1 + `nudge`, but for the largest."""
    blocks = moment.reshape(-1, block)
    scale = blocks.abs().amax(1, keepdim=True).clamp(min=LEAST_SCALE)
    values = map_values(signed, moment)
    middles = (values[1:] + values[:-1]) / 2
    nearest = torch.searchsorted(middles, blocks / scale * (1 + nudge), side="right")
    return (values[nearest] * scale).view_as(moment)


def settled(found: Tensor, moment: Tensor, signed: bool, block: int, tolerance: float) -> Tensor:
    """The rounded `moment`; halfway between two values, within a relative `tolerance`, that of `found`."""
    nearest = rounded(moment, signed, block)
    for nudge in (tolerance, -tolerance):
        other = rounded(moment, signed, block, nudge)
        nearest = torch.where((found - other).abs() < (found - nearest).abs(), other, nearest)
    return nearest
