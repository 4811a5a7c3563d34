"""Every parameter of a decoder by name: its shape, its unit, and what the tensor axis may split it by."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import ceil, prod
from typing import Literal

from meshwright.spec.model import ModelSpec
from meshwright.spec.stages import Stage

Split = Literal["vocabulary", "heads", "kv_heads", "ffn"]


@dataclass(frozen=True)
class Parameter:
    """A parameter as one device has it, in the order of `Decoder.named_parameters`.

    `split` says what dim `dim` counts; None for one that every tensor rank holds whole. `after_reduce` tells
    of those that act on the residual stream, which sequence parallelism cuts, so that each rank's gradient
    is then a part of the sum; a whole one that is not acts on the rank's own heads.
    """

    name: str
    shape: tuple[int, ...]
    split: Split | None = None
    dim: int = 0
    after_reduce: bool = True

    @property
    def size(self) -> int:
        """Number of elements."""
        return prod(self.shape)


def parameters(model: ModelSpec) -> dict[str, list[Parameter]]:
    """The parameters of each unit, by the unit's name: embed, blocks.0, ..., head; tied ends are one unit."""
    found = {"embed": list(_embed(model))}
    found |= {f"blocks.{i}": list(_block(model, f"blocks.{i}")) for i in range(model.layers)}
    head = list(_norm(model, "head.norm"))
    if model.tied:
        found["embed"] += head
        return found
    weight = Parameter("head.weight", (model.vocab_size, model.hidden), "vocabulary")
    return found | {"head": [weight, *head]}


def parameters_of(model: ModelSpec, own: Sequence[Stage]) -> dict[str, list[Parameter]]:
    """The same of the units in the stages of one rank; tied ends on different ranks are a unit each."""
    ends = {"embed": any(stage.embed for stage in own), "head": any(stage.head for stage in own)}
    blocks = {f"blocks.{i}" for stage in own for i in stage.blocks}
    every = parameters(model)
    found = {name: listed for name, listed in every.items() if name in blocks}
    if not model.tied or all(ends.values()):
        return {name: listed for name, listed in every.items() if name in found or ends.get(name, False)}
    norm = list(_norm(model, "head.norm"))
    embed = [parameter for parameter in every["embed"] if parameter not in norm]
    if ends["embed"]:
        return {"embed": embed, **found}
    return {**found, "head": [embed[0], *norm]} if ends["head"] else found


def _embed(model: ModelSpec) -> Iterator[Parameter]:
    yield Parameter("embed.weight", (model.vocab_size, model.hidden), "vocabulary")
    if model.position == "learned":
        yield Parameter("embed.positions", (model.max_seq_len, model.hidden))


def _block(model: ModelSpec, name: str) -> Iterator[Parameter]:
    yield from _norm(model, f"{name}.attn_norm")
    q, kv = model.heads * model.head_dim, model.kv_heads * model.head_dim
    yield from _columns(f"{name}.attn.q", q, model.hidden, model.qkv_bias, "heads")
    yield from _columns(f"{name}.attn.k", kv, model.hidden, model.qkv_bias, "kv_heads")
    yield from _columns(f"{name}.attn.v", kv, model.hidden, model.qkv_bias, "kv_heads")
    yield from _rows(f"{name}.attn.o", model.hidden, q, model.out_bias, "heads")
    if model.qk_norm:
        for which in ("q_norm", "k_norm"):
            yield Parameter(f"{name}.attn.{which}.weight", (model.head_dim,), after_reduce=False)
    yield from _norm(model, f"{name}.mlp_norm")
    if model.activation == "swiglu":
        yield from _columns(f"{name}.mlp.gate", model.ffn, model.hidden, model.mlp_bias, "ffn")
    yield from _columns(f"{name}.mlp.up", model.ffn, model.hidden, model.mlp_bias, "ffn")
    yield from _rows(f"{name}.mlp.down", model.hidden, model.ffn, model.mlp_bias, "ffn")


def _norm(model: ModelSpec, name: str) -> Iterator[Parameter]:
    yield Parameter(f"{name}.weight", (model.hidden,))
    if model.norm == "layernorm":
        yield Parameter(f"{name}.bias", (model.hidden,))


def _columns(name: str, outputs: int, inputs: int, bias: bool, split: Split) -> Iterator[Parameter]:
    """A linear map whose outputs are split (Shoeybi et al. 2019, §3)."""
    yield Parameter(f"{name}.weight", (outputs, inputs), split)
    if bias:
        yield Parameter(f"{name}.bias", (outputs,), split)


def _rows(name: str, outputs: int, inputs: int, bias: bool, split: Split) -> Iterator[Parameter]:
    """A linear map whose inputs are split: its outputs are summed over the ranks, then the bias is added."""
    yield Parameter(f"{name}.weight", (outputs, inputs), split, dim=1)
    if bias:
        yield Parameter(f"{name}.bias", (outputs,))


@dataclass(frozen=True)
class Piece:
    """What one of `tp` tensor ranks holds of a parameter: indices `first` to `first + size` of dim `dim`.

    `parts` different pieces exist, each on tp / parts ranks (`copies`). A piece may reach beyond the whole,
    by `padding` rows of zeros, where a vocabulary is not divided evenly. `summed` tells that the ranks
    that hold the same piece have parts of its gradient, which must be summed.
    """

    whole: tuple[int, ...]
    dim: int
    first: int
    size: int
    parts: int
    copies: int
    summed: bool

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape that the rank holds, padding included."""
        return (*self.whole[: self.dim], self.size, *self.whole[self.dim + 1 :])

    @property
    def padding(self) -> int:
        """Rows beyond the end of the whole."""
        return max(0, min(self.size, self.first + self.size - self.whole[self.dim]))


def piece_of(parameter: Parameter, model: ModelSpec, tp: int, rank: int, sequence_parallel: bool) -> Piece:
    """The piece of tensor rank `rank`; with tp = 1 the whole."""
    length = parameter.shape[parameter.dim]
    if parameter.split is None:
        summed = tp > 1 and (sequence_parallel or not parameter.after_reduce)
        return Piece(parameter.shape, parameter.dim, 0, length, 1, tp, summed)
    parts = min(tp, model.kv_heads) if parameter.split == "kv_heads" else tp
    copies = tp // parts
    size = ceil(length / parts)
    first = rank // copies * size
    return Piece(parameter.shape, parameter.dim, first, size, parts, copies, copies > 1)
