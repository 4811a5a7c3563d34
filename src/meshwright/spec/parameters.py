"""Every parameter of a decoder by name: its shape, its unit, and what the tensor axis may split it by."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
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
    is then a part of the sum; a whole one that is not acts on the rank's own heads, or tokens. `expert` tells
    of the weights of routed experts, which dim 0 counts: the expert axis splits that, and the axis of expert
    slices dim `dim`.
    """

    name: str
    shape: tuple[int, ...]
    split: Split | None = None
    dim: int = 0
    after_reduce: bool = True
    expert: bool = False

    @property
    def size(self) -> int:
        """Number of elements."""
        return prod(self.shape)


def parameters(model: ModelSpec) -> dict[str, list[Parameter]]:
    """The parameters of each unit, by the unit's name: embed, blocks.0, ..., head; tied ends are one unit."""
    return {name: list(listed) for name, listed in _every(model).items()}


@lru_cache(maxsize=8)
def _every(model: ModelSpec) -> dict[str, list[Parameter]]:
    """The same; the last models' are kept, since each rank of a pipeline asks again."""
    found = {"embed": list(_embed(model))}
    found |= {f"blocks.{i}": list(block_parameters(model, i)) for i in range(model.layers)}
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
    every = _every(model)
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


def block_parameters(model: ModelSpec, layer: int) -> Iterator[Parameter]:
    """Those of block `layer`."""
    name = f"blocks.{layer}"
    yield from _norm(model, f"{name}.attn_norm")
    yield from _attention(model, f"{name}.attn") if model.mla is None else _latent(model, f"{name}.attn")
    yield from _norm(model, f"{name}.mlp_norm")
    if model.has_experts(layer):
        yield from _mixture(model, f"{name}.mlp")
    else:
        yield from _mlp(model, f"{name}.mlp", model.ffn)


def _attention(model: ModelSpec, name: str) -> Iterator[Parameter]:
    q, kv = model.heads * model.head_dim, model.kv_heads * model.head_dim
    yield from _columns(f"{name}.q", q, model.hidden, model.qkv_bias, "heads")
    yield from _columns(f"{name}.k", kv, model.hidden, model.qkv_bias, "kv_heads")
    yield from _columns(f"{name}.v", kv, model.hidden, model.qkv_bias, "kv_heads")
    yield from _rows(f"{name}.o", model.hidden, q, model.out_bias, "heads")
    if model.qk_norm:
        for which in ("q_norm", "k_norm"):
            yield Parameter(f"{name}.{which}.weight", (model.head_dim,), after_reduce=False)


def _latent(model: ModelSpec, name: str) -> Iterator[Parameter]:
    """Latents are made of whole tokens on each rank; what they are expanded to is split by heads."""
    assert model.mla is not None
    mla, hidden, q = model.mla, model.hidden, model.heads * model.head_dim
    if mla.q_rank is not None:
        yield Parameter(f"{name}.q_a.weight", (mla.q_rank, hidden))
        yield Parameter(f"{name}.q_a_norm.weight", (mla.q_rank,))
    yield from _columns(f"{name}.q", q, mla.q_rank or hidden, False, "heads")
    yield Parameter(f"{name}.kv_a.weight", (mla.kv_rank + mla.rope_dim, hidden))
    yield Parameter(f"{name}.kv_a_norm.weight", (mla.kv_rank,))
    expanded = model.heads * (model.head_dim - mla.rope_dim + mla.v_dim)
    yield from _columns(f"{name}.kv", expanded, mla.kv_rank, False, "heads")
    yield from _rows(f"{name}.o", hidden, model.heads * mla.v_dim, False, "heads")


def _mlp(model: ModelSpec, name: str, channels: int) -> Iterator[Parameter]:
    if model.activation == "swiglu":
        yield from _columns(f"{name}.gate", channels, model.hidden, model.mlp_bias, "ffn")
    yield from _columns(f"{name}.up", channels, model.hidden, model.mlp_bias, "ffn")
    yield from _rows(f"{name}.down", model.hidden, channels, model.mlp_bias, "ffn")


def _mixture(model: ModelSpec, name: str) -> Iterator[Parameter]:
    """Each rank routes its own tokens, so that gradients of the router are always parts of a sum."""
    assert model.moe is not None
    moe, hidden = model.moe, model.hidden
    yield Parameter(f"{name}.router.weight", (moe.experts, hidden), after_reduce=False)
    for which in ("gate", "up"):
        yield Parameter(f"{name}.experts.{which}", (moe.experts, moe.ffn, hidden), dim=1, expert=True)
    yield Parameter(f"{name}.experts.down", (moe.experts, hidden, moe.ffn), dim=2, expert=True)
    if moe.shared_ffn:
        yield from _mlp(model, f"{name}.shared", moe.shared_ffn)


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

    Of routed experts it is what one of ep x etp expert ranks holds: `experts` are their numbers along dim 0,
    and `parts` counts those that share an expert.
    """

    whole: tuple[int, ...]
    dim: int
    first: int
    size: int
    parts: int
    copies: int
    summed: bool
    experts: range | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape that the rank holds, padding included."""
        shape = (*self.whole[: self.dim], self.size, *self.whole[self.dim + 1 :])
        return shape if self.experts is None else (len(self.experts), *shape[1:])

    @property
    def rows_dim(self) -> int:
        """The dim whose indices are dealt over the ranks that share its storage; experts may be too few."""
        return 0 if self.experts is None else 1

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


def expert_piece(parameter: Parameter, ep: int, etp: int, rank: int) -> Piece:
    """The piece of routed experts that one of ep x etp ranks holds; etp neighbours share the same."""
    count, channels = parameter.shape[0] // ep, parameter.shape[parameter.dim] // etp
    mine, part = divmod(rank, etp)
    experts = range(mine * count, (mine + 1) * count)
    return Piece(parameter.shape, parameter.dim, part * channels, channels, etp, 1, False, experts)
