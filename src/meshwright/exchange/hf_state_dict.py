"""Tensors of an HF state dict by name, each as a `HfTensor`: how it is made of parameters, and split back."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from meshwright.spec import ModelSpec
from meshwright.spec.hf.families import FAMILIES, stored_shared_ffn
from meshwright.spec.hf.family import Family
from meshwright.spec.hf.tensor_names import LATENTS, latents_query
from meshwright.spec.sharded_tensor import Rectangle

Shapes = Mapping[str, Sequence[int]]


class NamedTensors(Protocol):
    """Parameters and routers' biases by name: held, or read whenever one is asked for."""

    def __getitem__(self, name: str, /) -> Tensor:
        """Return one of them."""
        ...


class Rotary(NamedTuple):
    """The order of each head's rows in a file: the `channels` that turn by position may be in `pairs` (0, 1),
    (2, 3), ..., where the decoder has halves, and `first`, where the decoder has them last."""

    heads: int
    channels: int
    pairs: bool = True
    first: bool = False

    def to_decoder(self, rows: Tensor) -> Tensor:
        """Return rows of a file in the decoder's order."""
        per_head = rows.unflatten(0, (self.heads, -1))
        still = per_head.shape[1] - self.channels
        if self.first:
            rotary, plain = per_head.split([self.channels, still], 1)
        else:
            plain, rotary = per_head.split([still, self.channels], 1)
        if self.pairs:
            rotary = rotary.unflatten(1, (-1, 2)).transpose(1, 2).flatten(1, 2)
        return torch.cat([plain, rotary], 1).flatten(0, 1)

    def to_file(self, rows: Tensor) -> Tensor:
        """Return rows of the decoder in the order of a file."""
        per_head = rows.unflatten(0, (self.heads, -1))
        plain, rotary = per_head.split([per_head.shape[1] - self.channels, self.channels], 1)
        if self.pairs:
            rotary = rotary.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2)
        return torch.cat([rotary, plain] if self.first else [plain, rotary], 1).flatten(0, 1)


@dataclass(frozen=True)
class HfTensor:
    """One tensor of an HF file, called `hf`: the parameters that it joins along `dim`.

    It may be `transposed`, in its last two dims (GPT-2's Conv1D stores its weights so), or the part of a
    parameter that belongs to one `expert`, an index of the parameter's dim 0. With `turns` the parameters,
    which are of one size, take turns along `dim`. `rotary` has for each parameter whose heads' rows are in
    another order than the decoder's that order. An `exact` tensor is fp32 whatever others are. A tensor that
    is `padded` has that many channels along `dim`, of which the last ones are zero. A `copy` is of parameters
    that another tensor has already.
    """

    hf: str
    parameters: tuple[str, ...]
    dim: int = 0
    transposed: bool = False
    expert: int | None = None
    turns: bool = False
    rotary: tuple[Rotary | None, ...] = ()
    exact: bool = False
    padded: int | None = None
    copy: bool = False

    def shape(self, shapes: Shapes) -> tuple[int, ...]:
        """Return its shape in the file, from those of the parameters."""
        shape = self._part(shapes[self.parameters[0]])
        shape[self.dim] = self.padded or sum(self._sizes(shapes))
        return (*shape[:-2], *shape[:-3:-1]) if self.transposed else tuple(shape)

    def elements(self, shapes: Shapes) -> int:
        """Return the number of its elements."""
        return prod(self.shape(shapes))

    def dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Return its format in a file whose parameters are in `dtype`."""
        return torch.float32 if self.exact else dtype

    def split(self, tensor: Tensor, shapes: Shapes) -> list[Tensor]:
        """Return the parts of `parameters` that the file's tensor holds."""
        tensor = tensor.mT if self.transposed else tensor
        if self.turns:
            parts = list(tensor.unflatten(self.dim, (-1, len(self.parameters))).unbind(self.dim + 1))
        else:
            parts = list(tensor.split(self._sizes(shapes), self.dim))
        for number, rotary in enumerate(self.rotary):
            parts[number] = parts[number] if rotary is None else rotary.to_decoder(parts[number])
        return [part.contiguous() for part in parts]

    def rectangle(self, number: int, shapes: Shapes) -> Rectangle:
        """Return which rectangle of its parameter of this `number` the file's tensor holds."""
        shape = tuple(shapes[self.parameters[number]])
        if self.expert is None:
            return (0,) * len(shape), shape
        return (self.expert, *(0 for _ in shape[1:])), (1, *shape[1:])

    def whole_heads(self, number: int, rectangle: Rectangle, shapes: Shapes) -> Rectangle:
        """Return the rectangle with all rows of each head that it has a row of, if a head's are reordered."""
        rotary = self.rotary[number] if self.rotary else None
        if rotary is None:
            return rectangle
        (first, *others), (count, *sizes) = rectangle
        rows = shapes[self.parameters[number]][0] // rotary.heads
        start, end = first // rows * rows, -(-(first + count) // rows) * rows
        return (start, *others), (end - start, *sizes)

    def place(self, number: int, rectangle: Rectangle, shapes: Shapes) -> Rectangle:
        """Return where in the file's tensor a rectangle of a parameter lies, of whole heads if reordered.

        Of parameters that take turns it is one with what lies between.
        """
        offsets, sizes = (list(part if self.expert is None else part[1:]) for part in rectangle)
        if self.turns:
            offsets[self.dim] *= len(self.parameters)
            sizes[self.dim] *= len(self.parameters)
        elif offsets:
            offsets[self.dim] += sum(self._sizes(shapes)[:number])
        if self.transposed:
            offsets[-2:], sizes[-2:] = offsets[:-3:-1], sizes[:-3:-1]
        return tuple(offsets), tuple(sizes)

    def part(self, number: int, value: Tensor, shapes: Shapes) -> Tensor:
        """Return the rectangle of a parameter whose `place` in the file's tensor has this value."""
        value = value.mT if self.transposed else value
        if self.turns:
            value = value.unflatten(self.dim, (-1, len(self.parameters))).select(self.dim + 1, number)
        rotary = self.rotary[number] if self.rotary else None
        if rotary is not None:
            rows = shapes[self.parameters[number]][0] // rotary.heads
            value = rotary._replace(heads=len(value) // rows).to_decoder(value)
        return value if self.expert is None else value.unsqueeze(0)

    def join(self, tensors: NamedTensors, dtype: torch.dtype) -> Tensor:
        """Return the file's tensor, on the CPU; on the meta device, of parameters that are there."""
        wholes = [tensors[name].detach() for name in self.parameters]
        parts = wholes if self.expert is None else [whole[self.expert] for whole in wholes]
        place = "meta" if wholes[0].is_meta else "cpu"
        parts = [part.to(device=place, dtype=self.dtype(dtype)) for part in parts]
        for number, rotary in enumerate(self.rotary):
            parts[number] = parts[number] if rotary is None else rotary.to_file(parts[number])
        if self.padded is not None:
            missing = list(parts[0].shape)
            missing[self.dim] = self.padded - sum(part.shape[self.dim] for part in parts)
            parts.append(parts[0].new_zeros(missing))
        if self.turns:
            joined = torch.stack(parts, self.dim + 1).flatten(self.dim, self.dim + 1)
        else:
            joined = torch.cat(parts, self.dim) if len(parts) > 1 else parts[0]
        return (joined.mT if self.transposed else joined).contiguous()

    def _part(self, shape: Sequence[int]) -> list[int]:
        return list(shape if self.expert is None else shape[1:])

    def _sizes(self, shapes: Shapes) -> list[int]:
        return [self._part(shapes[name])[self.dim] for name in self.parameters]


def hf_tensors(spec: ModelSpec, stacked: bool = False, paired: bool = True) -> Iterator[HfTensor]:
    """Yield every tensor of the family's files in the model's order, those of one parameter consecutively.

    Published files have a tensor for each expert; with `stacked` they are those of transformers 5, one for
    all. `paired` is True if DeepSeek's rotary channels are in pairs.
    """
    family = FAMILIES[spec.family]
    names, has_bias = family.names, spec.norm == "layernorm" and spec.norm_bias
    yield HfTensor(names.embedding_weight, ("embed.weight",))
    if spec.position == "learned":
        yield HfTensor(f"{names.model}.{names.positions}.weight", ("embed.positions",))
    for layer in (*range(spec.layers), *spec.mtp_layers):
        ours, theirs = f"blocks.{layer}", f"{names.model}.{names.layers}.{layer}"
        if spec.mla is None:
            yield from _linears(spec, family, ours, theirs, "attn")
            if spec.attention_sinks:
                yield HfTensor(f"{theirs}.self_attn.sinks", (f"{ours}.attn.sinks",))
            for x in "qk" if spec.qk_norm else "":
                rotary = _rotary(spec, family, (f"attn.{x}_norm",))
                hf = f"{theirs}.self_attn.{x}_norm.weight"
                yield HfTensor(hf, (f"{ours}.attn.{x}_norm.weight",), rotary=rotary)
        else:
            yield from _latents(spec, f"{ours}.attn", f"{theirs}.self_attn", paired)
        for name, hf in names.norms.items():
            yield from _leaves(f"{theirs}.{hf}", f"{ours}.{name}", has_bias)
        if spec.has_experts(layer):
            yield from _mixture(spec, f"{ours}.mlp", theirs, stacked)
        else:
            yield from _linears(spec, family, ours, theirs, "mlp")
        if layer in spec.mtp_layers:
            yield from _further(spec, ours, theirs, has_bias)
    yield from _leaves(f"{names.model}.{names.final_norm}", "head.norm", has_bias)
    if not spec.tied:
        yield HfTensor("lm_head.weight", ("head.weight",))


def _further(spec: ModelSpec, ours: str, theirs: str, has_bias: bool) -> Iterator[HfTensor]:
    """Yield what a layer that predicts further tokens has beside its block, as in DeepSeek-V3's files."""
    for name in ("enorm", "hnorm"):
        yield from _leaves(f"{theirs}.{name}", f"{ours}.{name}", has_bias)
    yield from _leaves(f"{theirs}.eh_proj", f"{ours}.eh_proj")
    yield from _leaves(f"{theirs}.shared_head.norm", "head.mtp_norm", has_bias)
    yield from _shared(spec, theirs)


def _shared(spec: ModelSpec, theirs: str) -> Iterator[HfTensor]:
    """Yield the copies of the model's matrices in a layer that predicts further tokens."""
    head = "embed.weight" if spec.tied else "head.weight"
    for hf, parameter in (("embed_tokens", "embed.weight"), ("shared_head.head", head)):
        yield HfTensor(f"{theirs}.{hf}.weight", (parameter,), copy=True)


def copies(spec: ModelSpec) -> dict[str, tuple[str, ...]]:
    """Name of a tensor of the family's files that is a copy -> the parameters that it is of."""
    names = FAMILIES[spec.family].names
    listed = (_shared(spec, f"{names.model}.{names.layers}.{layer}") for layer in spec.mtp_layers)
    return {piece.hf: piece.parameters for each in listed for piece in each}


def lists_further(spec: ModelSpec, names: Container[str]) -> bool:
    """Return True if tensors of the family have these names, with a layer that predicts further tokens."""
    theirs = FAMILIES[spec.family].names
    return f"{theirs.model}.{theirs.layers}.{spec.layers}.eh_proj.weight" in names


def without_further(spec: ModelSpec) -> ModelSpec:
    """The model without the layer that predicts further tokens."""
    return spec.model_copy(update={"mtp_num_layers": 0})


def _linears(
    spec: ModelSpec, family: Family, block: str, layer: str, part: Literal["attn", "mlp"]
) -> Iterator[HfTensor]:
    """Yield the tensors of the linear layers of attention or of a dense feed-forward layer."""
    biased = {
        "attn.q": spec.qkv_bias,
        "attn.k": spec.qkv_bias,
        "attn.v": spec.qkv_bias,
        "attn.o": spec.out_bias,
    }
    for module, joined in family.names.linears.items():
        if not joined[0].startswith(part):
            continue
        rotary = _rotary(spec, family, joined)
        for leaf in ("weight", "bias") if biased.get(joined[0], spec.mlp_bias) else ("weight",):
            parameters = tuple(f"{block}.{name}.{leaf}" for name in joined)
            transposed = family.names.transposed and leaf == "weight"
            yield HfTensor(f"{layer}.{module}.{leaf}", parameters, transposed=transposed, rotary=rotary)


def _rotary(spec: ModelSpec, family: Family, joined: Sequence[str]) -> tuple[Rotary | None, ...]:
    """The orders of the rows of queries and keys in files; none where they are the decoder's."""
    channels, heads = spec.rope_dim or spec.head_dim, {"attn.q": spec.heads, "attn.k": spec.kv_heads}
    over_all = spec.qk_norm_over == "all"
    heads |= {f"{name}_norm": count if over_all else 1 for name, count in heads.items()}
    if not family.rope_pairs and channels == spec.head_dim:
        return ()
    turning = [
        Rotary(heads[name], channels, family.rope_pairs, True) if name in heads else None for name in joined
    ]
    return tuple(turning) if any(turning) else ()


def _leaves(hf: str, ours: str, bias: bool = False) -> Iterator[HfTensor]:
    for leaf in ("weight", "bias") if bias else ("weight",):
        yield HfTensor(f"{hf}.{leaf}", (f"{ours}.{leaf}",))


def _latents(spec: ModelSpec, ours: str, theirs: str, paired: bool) -> Iterator[HfTensor]:
    assert spec.mla is not None
    names = {"kv_a_norm": "kv_a_layernorm", "kv": LATENTS["kv"], "o": LATENTS["o"]}
    if spec.mla.q_rank is not None:
        names |= {"q_a": LATENTS["q_a"], "q_a_norm": "q_a_layernorm"}
    for name, hf in names.items():
        yield from _leaves(f"{theirs}.{hf}", f"{ours}.{name}")
    query = latents_query(spec.mla.q_rank is not None)
    for name, hf, heads in (("q", query, spec.heads), ("kv_a", LATENTS["kv_a"], 1)):
        rotary = (Rotary(heads, spec.mla.rope_dim),) if paired else ()
        yield HfTensor(f"{theirs}.{hf}.weight", (f"{ours}.{name}.weight",), rotary=rotary)


def _mixture(spec: ModelSpec, ours: str, layer: str, stacked: bool) -> Iterator[HfTensor]:
    assert spec.moe is not None
    family = FAMILIES[spec.family]
    names = family.stacked_names if stacked else family.expert_names
    theirs = f"{layer}.{names.module}"
    yield from _leaves(f"{theirs}.{names.router}", f"{ours}.router")
    if spec.moe.router_bias:
        yield HfTensor(f"{theirs}.{names.router}.bias", (f"{ours}.router.logit_bias",))
    if spec.moe.bias:
        correction = f"{theirs}.{names.router}.e_score_correction_bias"
        yield HfTensor(correction, (f"{ours}.router.bias",), exact=True)
    if names.joint is not None:
        halves, turns = [f"{ours}.experts.gate", f"{ours}.experts.up"], names.turns
        for hf, parts in zip(names.joint, (halves, [f"{ours}.experts.down"]), strict=True):
            alternate = turns and len(parts) > 1
            yield HfTensor(f"{theirs}.{hf}", tuple(parts), 1, transposed=turns, turns=alternate)
            if spec.moe.expert_bias:
                biases = tuple(f"{part}_bias" for part in parts)
                yield HfTensor(f"{theirs}.{hf}_bias", biases, 1, turns=alternate)
    else:
        for name, hf in zip(("gate", "up", "down"), names.linears, strict=True):
            for expert in range(spec.moe.experts):
                of_one = f"{theirs}.experts.{expert}.{hf}.weight"
                yield HfTensor(of_one, (f"{ours}.experts.{name}",), expert=expert)
    if spec.moe.shared_ffn:
        width = stored_shared_ffn(spec.moe, family)
        padded = None if width == spec.moe.shared_ffn else width
        for x, dim in (("gate", 0), ("up", 0), ("down", 1)):
            hf, parameter = f"{theirs}.{names.shared}.{x}_proj.weight", f"{ours}.shared.{x}.weight"
            yield HfTensor(hf, (parameter,), dim=dim, padded=padded)
    if spec.moe.shared_gate:
        yield from _leaves(f"{theirs}.{names.shared}_gate", f"{ours}.shared_gate")
