"""Blocks of numbers that share a scale, in 8-bit moments and in compressed messages: a function of the model.

A block lies within a row of a matrix, so that no axis that deals rows cuts it. Rows of the matrices that sum
over heads or channels (`o`, `down`) are cut, too: there a block divides the share of a head, or of the most
tensor ranks that the heads and the channels allow. So no `layout.tp` cuts one, and a checkpoint has the same
blocks in every layout. Only slices of experts, which may be any number, need a rule.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from math import gcd

from meshwright.spec.arithmetic import divisors, nearest
from meshwright.spec.errors import UserError
from meshwright.spec.parameter_groups import run_parameters
from meshwright.spec.parameters import Parameter
from meshwright.spec.sections import Sections

LARGEST_BLOCK = 256
"""Numbers of a block at most. Source: torchao's AdamW8bit, whose blocks have so many."""

EXPERT_SLICES = 8
"""Slices that an expert may be cut into; a node rarely has more devices."""

MAP_SIZE = 256
"""Values that 8 bits tell apart."""

PREFIXES = 2**16
"""Upper halves of numbers in fp32, by which codes are found."""


def block_of(parameter: Parameter, heads: int) -> int:
    """Numbers of a block of a matrix: the largest divisor of what a rank may have of a row, up to 256."""
    columns, shares = parameter.shape[-1], 1
    if parameter.dim == len(parameter.shape) - 1:  # its rows are cut
        shares = gcd(EXPERT_SLICES if parameter.expert else heads, columns)
    return _largest_divisor(columns // shares)


@lru_cache(maxsize=256)
def _largest_divisor(number: int) -> int:
    return next(size for size in range(min(number, LARGEST_BLOCK), 0, -1) if number % size == 0)


def blocks_of(spec: Sections) -> Mapping[str, int]:
    """Numbers of a block of each matrix of a run by its name; vectors have none."""
    every = (parameter for unit in run_parameters(spec).values() for parameter in unit)
    return {each.name: block_of(each, spec.model.heads) for each in every if each.is_matrix}


def slices_of_experts_are_whole_blocks(spec: Sections) -> None:
    """Ranks cut the rows of experts between the blocks of 8-bit moments."""
    if spec.train.optimiser_kind.eight_bit:
        check_whole_blocks(spec, f"train.optimiser = {spec.train.optimiser!r}", "train.optimiser = 'adamw'")


def check_whole_blocks(spec: Sections, of: str, instead: str) -> None:
    """Raise `UserError` where ranks cut blocks in the rows of experts, which are there because of a key.

    `instead` is the key as it has none.
    """
    moe, etp = spec.model.moe, spec.layout.etp
    if moe is None:
        return
    slices = moe.ffn // _largest_divisor(moe.ffn // gcd(EXPERT_SLICES, moe.ffn))
    if slices % etp:
        raise UserError(
            f"layout.etp: {etp} slices of model.moe.ffn = {moe.ffn} channels cut blocks of {of}, which are "
            f"{moe.ffn // slices} channels each; try layout.etp = "
            f"{nearest(etp, divisors(gcd(slices, spec.layout.expert_ranks)))}, or {instead}"
        )


def moments_in_8_bits_stay_on_the_device(spec: Sections) -> None:
    """8-bit moments are a quarter of what could be offloaded, and are not."""
    if spec.train.offload != "none" and spec.train.optimiser_kind.eight_bit:
        raise UserError(
            f"train.offload: {spec.train.offload!r} does not go with train.optimiser = "
            f"{spec.train.optimiser!r}, whose moments in 8 bits stay on the device; give 'none', or "
            f"train.optimiser = 'adamw'"
        )


EIGHT_BIT_RULES = (slices_of_experts_are_whole_blocks, moments_in_8_bits_stay_on_the_device)
