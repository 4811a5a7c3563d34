"""Rules of recipes of low precision: ranks share matrices and tokens by whole blocks of scales."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import gcd

from meshwright.spec.errors import UserError
from meshwright.spec.parameters import Parameter, block_parameters
from meshwright.spec.precision import BLOCKS, BLOCKS_OF_TOKENS, DELAYED, FP8_TILE
from meshwright.spec.quantisation import GROUPS
from meshwright.spec.sections import Sections
from meshwright.spec.sharded_tensor import is_matrix

KERNEL = 16
"""Divisor of the sides of matrices that kernels in 8 bits and fewer take (cuBLAS)."""


Rule = Callable[[Sections], None]
"""Raises `UserError` for a run that breaks it."""


def is_rounded(name: str, dims: int) -> bool:
    """True for parameters whose products are in low precision: the matrices of blocks but for routers, gates
    of shared experts, and the map that joins a hidden state and an embedding."""
    exact = ".router.", ".shared_gate.", ".eh_proj."
    return is_matrix(name, dims) and name.startswith("blocks.") and not any(part in name for part in exact)


def rounded_in_blocks(parameter: Parameter) -> bool:
    """True for parameters whose products are in low precision."""
    return is_rounded(parameter.name, len(parameter.shape))


def rounded_parameters(spec: Sections) -> Iterator[Parameter]:
    """The matrices whose products are in low precision, of every block."""
    for layer in (*range(spec.model.layers), *spec.model.mtp_layers):
        yield from filter(rounded_in_blocks, block_parameters(spec.model, layer))


def matrices_are_whole_blocks(spec: Sections) -> None:
    """Ranks cut a matrix between its blocks, and its sides are what kernels take.

    The last block of a side that is not cut may be smaller, as those of 576 rows in DeepSeek-V3 are.
    """
    if not spec.precision.low:
        return
    block, layout, rest = BLOCKS[spec.precision.compute], spec.layout, 0
    kinds = {spec.model.has_experts(layer): layer for layer in range(spec.model.layers)}
    worst: tuple[str, int, int, int, int] | None = None
    for layer in kinds.values():
        for parameter in filter(rounded_in_blocks, block_parameters(spec.model, layer)):
            for dim in (-2, -1):
                whole = parameter.shape[dim]
                cut = parameter.expert or parameter.split is not None
                split = cut and parameter.dim == dim % len(parameter.shape)
                ranks = (layout.etp if parameter.expert else layout.tp) if split else 1
                rest = gcd(rest, whole // ranks)
                unit = block if ranks > 1 else KERNEL
                if worst is None and whole // ranks % unit:
                    worst = parameter.name, dim, whole, ranks, unit
    if worst is not None:
        name, dim, whole, ranks, unit = worst
        share = f"{whole} / {ranks} ranks = {whole // ranks}" if ranks > 1 else f"{whole}"
        side = "rows" if dim == -2 else "columns"
        raise UserError(
            f"precision.compute: {spec.precision.compute!r} takes matrices whose sides on a rank are "
            f"multiples of {unit}, and {name} has {share} {side}; {_instead(rest)}"
        )


def quantised_rows_are_whole(spec: Sections) -> None:
    """Ranks cut a matrix between the groups of columns that share a scale, or not at all."""
    qat, group = spec.precision.qat, spec.precision.qat_group
    if qat is None:
        return
    for parameter, key in _matrices_and_axes(spec):
        ranks = getattr(spec.layout, key) if key else 1
        whole, columns = parameter.shape[-1], parameter.shape[-1] // ranks
        if qat == "int4" and columns % group:
            fits = [f"precision.qat_group = {size}" for size in GROUPS if columns % size == 0]
            fewer = (n for n in range(ranks - 1, 0, -1) if ranks % n == 0 and whole // n % group == 0)
            fits += [f"layout.{key} = {n}" for n in fewer]
            instead = [*fits, "precision.qat = 'int8'"][0]
            share = f"{whole} / {ranks} ranks = {columns}" if ranks > 1 else f"{whole}"
            raise UserError(
                f"precision.qat_group: {group} columns share a scale, and {parameter.name} has {share} "
                f"columns; try {instead}, or other sides"
            )
        if qat != "int4" and ranks > 1:
            raise UserError(
                f"layout.{key}: {ranks} ranks cut the rows of {parameter.name}, each of which has one scale "
                f"with precision.qat = {qat!r}; try layout.{key} = 1, or precision.qat = 'int4'"
            )


def _matrices_and_axes(spec: Sections) -> Iterator[tuple[Parameter, str]]:
    """The matrices of each kind of block, and the axis that cuts their rows, or an empty text."""
    kinds = {spec.model.has_experts(layer): layer for layer in range(spec.model.layers)}
    for layer in kinds.values():
        for parameter in filter(rounded_in_blocks, block_parameters(spec.model, layer)):
            split = parameter.expert or parameter.split is not None
            cut = split and parameter.dim == len(parameter.shape) - 1
            yield parameter, ("etp" if parameter.expert else "tp") if cut else ""


def tokens_are_whole_blocks(spec: Sections) -> None:
    """Blocks of tokens, whose gradients have one scale, are the same tokens in every layout."""
    layout, length, compute = spec.layout, spec.data.seq_len, spec.precision.compute
    if not spec.precision.low or compute == "fp8-rowwise":  # its gradients of weights are not rounded
        return
    cut = 2 * layout.cp if layout.cp > 1 else 1
    if spec.model.mla is not None and layout.sequence_parallel:
        cut *= layout.tp
    if length % (block := BLOCKS[compute]) or length // cut % block:
        fits = [name for name in BLOCKS_OF_TOKENS if length // cut % BLOCKS[name] == 0]
        other = f"precision.compute = {(fits or ['fp8-rowwise'])[0]!r}"
        raise UserError(
            f"precision.compute: {compute!r} takes pieces of sequences that are multiples of {block} tokens, "
            f"and a rank has pieces of data.seq_len {length} / {cut} = {length / cut:g}; try data.seq_len = "
            f"{max(1, round(length / (cut * block))) * cut * block}, or {other}"
        )


def _instead(rest: int) -> str:
    """The recipes whose blocks divide `rest`, as advice."""
    fits = [name for name, block in BLOCKS.items() if rest % block == 0]
    if not fits:
        return "try precision.compute = 'bf16', or other sides"
    return f"try precision.compute = {' or '.join(map(repr, fits))}, or other sides"


def key_heads_are_not_shared(spec: Sections) -> None:
    """Ranks that hold the same key-value head have each a part of its gradient, which rounds otherwise."""
    if spec.precision.low and spec.layout.tp > spec.model.kv_heads:
        raise UserError(
            f"layout.tp: {spec.layout.tp} ranks share model.kv_heads = {spec.model.kv_heads} heads, whose "
            f"gradients precision.compute = {spec.precision.compute!r} would round in parts; try layout.tp = "
            f"{spec.model.kv_heads}"
        )


def delayed_scales_are_not_compiled(spec: Sections) -> None:
    """A compiled block cannot note the largest number of its tensors."""
    if spec.train.compile and spec.precision.compute in DELAYED:
        raise UserError(
            f"train.compile: true does not go with precision.compute = {spec.precision.compute!r}, whose "
            f"blocks note their largest numbers; try 'fp8-rowwise', or train.compile = false"
        )


def gathered_rows_are_whole_blocks(spec: Sections) -> None:
    """A rank rounds blocks of weights that it stores all rows of, and there is something to gather."""
    layout, precision = spec.layout, spec.precision
    if precision.fp8_gather and layout.shard_ranks > 1 and not layout.zero:
        raise UserError(
            "layout.zero: 0 keeps whole weights on every rank, so precision.fp8_gather = true has none to "
            "gather; try layout.zero = 3, or precision.fp8_gather = false"
        )
    if not precision.fp8_gather or precision.compute != "fp8-blockwise" or not layout.zero:
        return
    for parameter in rounded_parameters(spec):
        dim = 1 if parameter.expert else 0
        split = (parameter.expert or parameter.split is not None) and parameter.dim == dim
        ranks = layout.expert_data_ranks if parameter.expert else layout.shard_ranks
        rows = parameter.shape[dim] // ((layout.etp if parameter.expert else layout.tp) if split else 1)
        if ranks > 1 and rows % (ranks * FP8_TILE):
            raise UserError(
                f"precision.fp8_gather: true takes weights of which each rank stores multiples of {FP8_TILE} "
                f"rows, and {parameter.name} has {rows} on {ranks} ranks of ZeRO; try precision.compute = "
                f"'fp8', or precision.fp8_gather = false"
            )


def breaks(rule: Rule, spec: Sections) -> bool:
    """True if a run breaks a rule."""
    try:
        rule(spec)
    except UserError:
        return True
    return False


LOW_PRECISION_RULES: tuple[Rule, ...] = (
    matrices_are_whole_blocks,
    quantised_rows_are_whole,
    tokens_are_whole_blocks,
    key_heads_are_not_shared,
    delayed_scales_are_not_compiled,
    gathered_rows_are_whole_blocks,
)
