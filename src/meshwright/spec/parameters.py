"""Every parameter of a decoder by name: its shape, its unit, and how the tensor and expert axes split it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import lru_cache
from math import ceil, prod
from typing import Literal, NamedTuple

from meshwright.spec.architecture import Architecture
from meshwright.spec.sharded_tensor import ShardedTensor, is_matrix

Split = Literal["vocabulary", "heads", "kv_heads", "ffn"]
BaseFormat = Literal["int8", "int4", "nf4"]
"""Formats of frozen weights with fewer bits than those that compute (Dettmers et al. 2023, QLoRA)."""


@dataclass(frozen=True)
class Parameter:
    """An unsharded parameter, in the order of `Decoder.named_parameters`.

    `split` says what dim `dim` counts; None if every tensor rank holds the whole parameter. `after_reduce` is
    True if the parameter acts on the residual stream, which sequence parallelism shards, so that each rank's
    gradient is then partial; if it is False, the parameter acts on the rank's own heads or tokens. `expert`
    marks weights of routed experts: the expert axis splits dim 0, and that of expert slices dim `dim`. One
    that is not `trainable` is frozen: it has no gradient, and keeps its first value, which may be `quantised`
    to another format than those that compute. `adapters` are trained beside it (`spec/lora.py`).
    """

    name: str
    shape: tuple[int, ...]
    split: Split | None = None
    dim: int = 0
    after_reduce: bool = True
    expert: bool = False
    trainable: bool = True
    quantised: BaseFormat | None = None
    adapters: tuple[Parameter, ...] = ()

    @property
    def size(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def is_matrix(self) -> bool:
        """True if it multiplies; norms and biases do not."""
        return is_matrix(self.name, len(self.shape))


@lru_cache(maxsize=8)  # each rank of a pipeline asks for them again
def parameters(model: Architecture, frozen: tuple[str, ...] = ()) -> Mapping[str, tuple[Parameter, ...]]:
    """Return the parameters of each unit by its name: embed, blocks.0, ..., head; tied ends are one unit.

    Those whose names match one of the patterns `frozen` are not trainable.
    """
    units = _units(model)
    if not frozen:
        return units
    return {unit: tuple(_frozen(listed, frozen)) for unit, listed in units.items()}


def _frozen(listed: Iterable[Parameter], patterns: tuple[str, ...]) -> Iterator[Parameter]:
    for parameter in listed:
        matches = any(fnmatchcase(parameter.name, pattern) for pattern in patterns)
        yield replace(parameter, trainable=not matches)


def _units(model: Architecture) -> dict[str, tuple[Parameter, ...]]:
    embed = [Parameter("embed.weight", (model.vocab_size, model.hidden), "vocabulary")]
    if model.position == "learned":
        embed.append(Parameter("embed.positions", (model.max_seq_len, model.hidden)))
    weight = Parameter("head.weight", (model.vocab_size, model.hidden), "vocabulary")
    head = (*[weight] * (not model.tied), *_norm(model, "head.norm"))
    if model.mtp_num_layers:
        head = (*head, *_norm(model, "head.mtp_norm"))
    blocks = {f"blocks.{layer}": tuple(block_parameters(model, layer)) for layer in range(model.layers)}
    beyond = {f"blocks.{layer}": tuple(block_parameters(model, layer)) for layer in model.mtp_layers}
    if model.head_embeds:
        return {"embed": (*embed, *head), **blocks, **beyond}
    return {"embed": tuple(embed), **blocks, "head": head}


def block_parameters(model: Architecture, layer: int) -> Iterator[Parameter]:
    """The parameters of block `layer`, also of one that predicts further tokens."""
    name = f"blocks.{layer}"
    if model.norms_before:
        yield from _norm(model, f"{name}.attn_norm")
    yield from _attention(model, f"{name}.attn") if model.mla is None else _latent(model, f"{name}.attn")
    if model.norms_after:
        yield from _norm(model, f"{name}.attn_post_norm")
    if model.norms_before and not model.parallel_block:
        yield from _norm(model, f"{name}.mlp_norm")
    if model.has_experts(layer):
        yield from _mixture(model, f"{name}.mlp")
    else:
        yield from _mlp(model, f"{name}.mlp", model.ffn)
    if model.norms_after:
        yield from _norm(model, f"{name}.mlp_post_norm")
    if layer in model.mtp_layers:  # `model/multi_token_prediction.py`
        yield from _norm(model, f"{name}.enorm")
        yield from _norm(model, f"{name}.hnorm")
        yield Parameter(f"{name}.eh_proj.weight", (model.hidden, 2 * model.hidden))


def _attention(model: Architecture, name: str) -> Iterator[Parameter]:
    q, kv = model.heads * model.head_dim, model.kv_heads * model.head_dim
    if model.attention_sinks:
        yield Parameter(f"{name}.sinks", (model.heads,), "heads")
    yield from _linear(f"{name}.q", q, model.hidden, model.qkv_bias, "heads")
    for which in ("k", "v"):
        yield from _linear(f"{name}.{which}", kv, model.hidden, model.qkv_bias, "kv_heads")
    yield from _linear(f"{name}.o", model.hidden, q, model.out_bias, "heads", dim=1)
    if model.qk_norm:
        if model.qk_norm_over == "all":
            yield Parameter(f"{name}.q_norm.weight", (q,), "heads")
            yield Parameter(f"{name}.k_norm.weight", (kv,), "kv_heads")
            return
        for which in ("q_norm", "k_norm"):
            yield Parameter(f"{name}.{which}.weight", (model.head_dim,), after_reduce=False)


def _latent(model: Architecture, name: str) -> Iterator[Parameter]:
    """Each rank projects whole tokens to latents; the layers that expand these are split by heads."""
    assert model.mla is not None
    mla, hidden, q = model.mla, model.hidden, model.heads * model.head_dim
    if mla.q_rank is not None:
        yield Parameter(f"{name}.q_a.weight", (mla.q_rank, hidden))
        yield Parameter(f"{name}.q_a_norm.weight", (mla.q_rank,))
    yield from _linear(f"{name}.q", q, mla.q_rank or hidden, False, "heads")
    yield Parameter(f"{name}.kv_a.weight", (mla.kv_rank + mla.rope_dim, hidden))
    yield Parameter(f"{name}.kv_a_norm.weight", (mla.kv_rank,))
    expanded = model.heads * (model.head_dim - mla.rope_dim + mla.v_dim)
    yield from _linear(f"{name}.kv", expanded, mla.kv_rank, False, "heads")
    yield from _linear(f"{name}.o", hidden, model.heads * mla.v_dim, False, "heads", dim=1)


def _mlp(model: Architecture, name: str, channels: int) -> Iterator[Parameter]:
    if model.gated:
        yield from _linear(f"{name}.gate", channels, model.hidden, model.mlp_bias, "ffn")
    yield from _linear(f"{name}.up", channels, model.hidden, model.mlp_bias, "ffn")
    yield from _linear(f"{name}.down", model.hidden, channels, model.mlp_bias, "ffn", dim=1)


def _mixture(model: Architecture, name: str) -> Iterator[Parameter]:
    """Each rank routes its own tokens, so gradients of the router are always partial.

    Slices of an expert each add their part of its last bias to their part of the output's channels.
    """
    assert model.moe is not None
    moe, hidden = model.moe, model.hidden
    yield Parameter(f"{name}.router.weight", (moe.experts, hidden), after_reduce=False)
    if moe.router_bias:
        yield Parameter(f"{name}.router.logit_bias", (moe.experts,), after_reduce=False)
    for which in ("gate", "up"):
        yield Parameter(f"{name}.experts.{which}", (moe.experts, moe.ffn, hidden), dim=1, expert=True)
    yield Parameter(f"{name}.experts.down", (moe.experts, hidden, moe.ffn), dim=2, expert=True)
    if moe.expert_bias:
        for which, size in (("gate", moe.ffn), ("up", moe.ffn), ("down", hidden)):
            yield Parameter(f"{name}.experts.{which}_bias", (moe.experts, size), dim=1, expert=True)
    if moe.shared_ffn:
        yield from _mlp(model, f"{name}.shared", moe.shared_ffn)
    if moe.shared_gate:
        yield Parameter(f"{name}.shared_gate.weight", (1, hidden))


def _norm(model: Architecture, name: str) -> Iterator[Parameter]:
    yield Parameter(f"{name}.weight", (model.hidden,))
    if model.norm == "layernorm" and model.norm_bias:
        yield Parameter(f"{name}.bias", (model.hidden,))


def _linear(
    name: str, outputs: int, inputs: int, bias: bool, split: Split, dim: int = 0
) -> Iterator[Parameter]:
    """A linear map split over the tensor ranks (Shoeybi et al. 2019, §3).

    Its outputs are split with dim 0. With dim 1 its inputs are: the outputs are summed over the ranks, and
    then the whole bias is added.
    """
    yield Parameter(f"{name}.weight", (outputs, inputs), split, dim)
    if bias:
        yield Parameter(f"{name}.bias", (outputs,), None if dim else split)


class UnitKind(NamedTuple):
    """Properties that all parameters of a unit share, which are gathered and reduced together."""

    routed: bool
    trainable: bool
    quantised: bool


UNIT_KINDS = tuple(
    UnitKind(routed, *how)
    for routed in (False, True)
    for how in ((True, False), (False, False), (False, True))
)
"""Kinds in the order in which the units of one part of a model come."""


@dataclass(frozen=True)
class Piece(ShardedTensor):
    """The part of a parameter on one tensor or expert rank: some indices of dim `dim`, all of the others.

    There are `parts` different pieces, each on `copies` ranks. A piece reaches beyond the end of the
    parameter by `padding` rows of zeros where a vocabulary is not divided evenly. `summed` says that the
    ranks which hold the same piece have partial gradients. Pieces of routed experts also hold only some
    indices of dim 0, the experts; their `parts` are those of one expert. `trainable` and `quantised` are the
    parameter's.
    """

    dim: int
    parts: int
    copies: int
    summed: bool
    routed: bool = False
    trainable: bool = True
    quantised: BaseFormat | None = None

    @property
    def kind(self) -> UnitKind:
        """The kind of unit that stores it."""
        return UnitKind(self.routed, self.trainable, self.quantised is not None)

    @property
    def first(self) -> int:
        """First index along `dim`."""
        return self.offset[self.dim]

    @property
    def size(self) -> int:
        """Number of indices along `dim`, padding included."""
        return self.local_shape[self.dim]

    @property
    def experts(self) -> range | None:
        """Indices of the experts; None unless the parameter is one of routed experts."""
        return range(self.offset[0], self.offset[0] + self.local_shape[0]) if self.routed else None

    @property
    def rows_dim(self) -> int:
        """The dim whose indices are sharded by data parallelism: dim 1 for experts, which may be too few."""
        return 1 if self.routed else 0

    @property
    def padding(self) -> int:
        """Number of rows beyond the end of the parameter."""
        return max(0, min(self.size, self.first + self.size - self.global_shape[self.dim]))


def piece_of(parameter: Parameter, model: Architecture, tp: int, rank: int, sequence_parallel: bool) -> Piece:
    """The piece of tensor rank `rank` of `tp`; with tp = 1 the whole parameter."""
    shape, dim = parameter.shape, parameter.dim
    origin, stored = (0,) * len(shape), (False, parameter.trainable, parameter.quantised)
    if parameter.split is None:
        summed = tp > 1 and (sequence_parallel or not parameter.after_reduce)
        return Piece(parameter.name, shape, origin, shape, dim, 1, tp, summed, *stored)
    parts = min(tp, model.kv_heads) if parameter.split == "kv_heads" else tp
    copies, size = tp // parts, ceil(shape[dim] / parts)
    offset = _replaced(origin, {dim: rank // copies * size})
    local = _replaced(shape, {dim: size})
    return Piece(parameter.name, shape, offset, local, dim, parts, copies, copies > 1, *stored)


def expert_piece(parameter: Parameter, ep: int, etp: int, rank: int) -> Piece:
    """The piece of routed experts that rank `rank` of ep x etp holds; etp neighbours share their experts.

    Of a parameter whose `dim` is that of the experts each of these holds all, with partial gradients.
    """
    shape, dim = parameter.shape, parameter.dim
    if not dim:
        size = shape[0] // ep
        offset, local = _replaced((0,) * len(shape), {0: rank // etp * size}), _replaced(shape, {0: size})
        summed = etp > 1
        return Piece(parameter.name, shape, offset, local, 0, 1, etp, summed, True, parameter.trainable)
    sizes = {0: shape[0] // ep, dim: shape[dim] // etp}
    group, part = divmod(rank, etp)
    offset = _replaced((0,) * len(shape), {0: group * sizes[0], dim: part * sizes[dim]})
    local = _replaced(shape, sizes)
    return Piece(parameter.name, shape, offset, local, dim, etp, 1, False, True, parameter.trainable)


def _replaced(numbers: tuple[int, ...], by_dim: Mapping[int, int]) -> tuple[int, ...]:
    return tuple(by_dim.get(dim, number) for dim, number in enumerate(numbers))
