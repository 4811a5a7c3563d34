"""The section `[lora]` of a run file: adapters of low rank beside frozen matrices (Hu et al. 2021, LoRA).

A linear layer with weight W (outputs, inputs) computes y = W x + scale B A x, with A (rank, inputs) and B
(outputs, rank). Only A and B are trained. They are parameters of the model, beside their weight:
`blocks.0.attn.q.weight` has `blocks.0.attn.q.lora_a.weight` and `blocks.0.attn.q.lora_b.weight`.

A layer whose outputs tensor ranks split has its A whole on each rank and its B split as W is; one whose
inputs are split has its A split as W is, and its B whole. The whole ones act on the residual stream's side,
on the tokens that a rank has there.

With `dora` the layer computes W' x with W' = m (W + scale B A) / |W + scale B A| (Liu et al. 2024, DoRA). The
lengths m (outputs,) of its rows are trained, too: `blocks.0.attn.q.lora_magnitude.weight`. They are split
with the outputs of W.

Each routed expert has an A and a B of its own, on the rank that has the expert: beside
`blocks.0.mlp.experts.gate` (experts, outputs, inputs) there are
`blocks.0.mlp.experts.gate_adapter.lora_a.weight` (experts, rank, inputs) and
`blocks.0.mlp.experts.gate_adapter.lora_b.weight` (experts, outputs, rank).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Literal

from pydantic import Field, PositiveFloat

from meshwright.spec.architecture import RANDOM, Architecture
from meshwright.spec.base import MAX_WIDTH, FrozenModel
from meshwright.spec.parameters import BaseFormat, Parameter, parameters

ALL_LINEAR = "all-linear"
"""The target that stands for every linear layer of attention and feed-forward layers in blocks, but not for
routed experts, of which a block may have hundreds; patterns of names match them."""
BASE_BITS: dict[BaseFormat, int] = {"int8": 8, "int4": 4, "nf4": 4}
BLOCK = 64
"""Adjacent inputs of a row of such a weight that share a scale."""
LORA_A, LORA_B, MAGNITUDE = ".lora_a.weight", ".lora_b.weight", ".lora_magnitude.weight"
"""Ends of adapters' names, in place of `.weight`."""


class LoraSpec(FrozenModel):
    """Rank, scale and targets of the adapters; everything else is frozen."""

    weights: str = Field(
        RANDOM,
        min_length=1,
        description="adapters that training goes on from, whose rank, alpha, targets and rslora hold: a "
        "folder of PEFT, a run with [lora] or one of its checkpoints; 'random' for new ones",
    )
    rank: int = Field(16, ge=1, le=MAX_WIDTH, description="rows of A and columns of B")
    alpha: PositiveFloat = Field(32.0, description="B A x is multiplied by alpha / rank")
    dropout: float = Field(0.0, ge=0, lt=1, description="share of A's inputs that is dropped in training")
    targets: tuple[str, ...] = Field(
        (ALL_LINEAR,),
        min_length=1,
        description="weights that get adapters: patterns of their names, such as '*.attn.q.weight', or "
        "modules of transformers, such as q_proj; 'all-linear' for all linear layers in blocks, but routed "
        "experts",
    )
    rslora: bool = Field(
        False, description="multiply by alpha / sqrt(rank) instead (Kalajdzievski 2023, rsLoRA)"
    )
    dora: bool = Field(
        False, description="train the length of each row of W + scale B A by itself (Liu et al. 2024, DoRA)"
    )

    quantise: Literal["none", "int8", "int4", "nf4"] = Field(
        "none",
        description="format that the frozen weights of linear layers in blocks are kept in, with a scale for "
        "64 inputs of a row; they are dequantised where they are used (Dettmers et al. 2023, QLoRA)",
    )

    @property
    def base_format(self) -> BaseFormat | None:
        """The format of frozen weights of linear layers; None for the format that computes."""
        return None if self.quantise == "none" else self.quantise

    @property
    def scale(self) -> float:
        """The factor on B A x."""
        return self.alpha / (self.rank**0.5 if self.rslora else self.rank)

    def adapts(self, parameter: Parameter) -> bool:
        """True for a weight that has an adapter."""
        return is_adaptable(parameter) and any(
            not parameter.expert if pattern == ALL_LINEAR else fnmatchcase(parameter.name, pattern)
            for pattern in self.targets
        )


def adapted(model: Architecture, lora: LoraSpec) -> list[Parameter]:
    """The weights of a model that have adapters."""
    return [each for unit in parameters(model).values() for each in unit if lora.adapts(each)]


def is_adapter(name: str) -> bool:
    """True for the name of an A, of a B, or of magnitudes."""
    return name.endswith((LORA_A, LORA_B, MAGNITUDE))


def magnitude_name(weight: str) -> str:
    """The name of the magnitudes beside the weight of a layer of this name."""
    return weight.removesuffix(".weight") + MAGNITUDE


def adapter_names(weight: str) -> tuple[str, str]:
    """The names of A and B beside a weight of this name, that of a layer or one of routed experts."""
    stem = weight.removesuffix(".weight") if weight.endswith(".weight") else f"{weight}_adapter"
    return stem + LORA_A, stem + LORA_B


def is_adaptable(parameter: Parameter) -> bool:
    """True for the weight of a linear layer of attention or a feed-forward layer, and those of experts."""
    if parameter.expert:
        return parameter.is_matrix
    *path, layer, leaf = parameter.name.split(".")
    inside = path[:1] == ["blocks"] and path[2:] in (["attn"], ["mlp"], ["mlp", "shared"])
    return inside and leaf == "weight" and layer != "router" and len(parameter.shape) == 2


def with_adapters(
    units: Mapping[str, tuple[Parameter, ...]], lora: LoraSpec
) -> dict[str, tuple[Parameter, ...]]:
    """The parameters of each unit, frozen, and the adapters that are trained."""
    return {unit: tuple(_adapted(listed, lora)) for unit, listed in units.items()}


def _adapted(listed: tuple[Parameter, ...], lora: LoraSpec) -> Iterator[Parameter]:
    """Frozen parameters, and behind those of a linear layer, or of all experts, each A and B, as the decoder
    lists them."""
    waiting: tuple[Parameter, ...] = ()
    for parameter in listed:
        if waiting and not parameter.expert and parameter.name != waiting[0].name.replace(LORA_A, ".bias"):
            yield from waiting
            waiting = ()
        quantised = lora.base_format if is_adaptable(parameter) and not parameter.expert else None
        adapters = adapters_of(parameter, lora) if lora.adapts(parameter) else ()
        yield replace(parameter, trainable=False, quantised=quantised, adapters=adapters)
        waiting = (*waiting, *adapters)
    yield from waiting


def adapters_of(weight: Parameter, lora: LoraSpec) -> tuple[Parameter, ...]:
    """A and B of a weight, and with DoRA its magnitudes, in the decoder's order: those at the split side are
    split as the weight is, the others are whole. Those of experts are with them, where `dim` is 0 for what
    slices hold whole."""
    *experts, outputs, inputs = weight.shape
    (name_a, name_b), rank = adapter_names(weight.name), lora.rank
    a = Parameter(name_a, (*experts, rank, inputs), expert=weight.expert)
    b = Parameter(name_b, (*experts, outputs, rank), expert=weight.expert)
    if weight.expert:
        return (a, replace(b, dim=1)) if weight.dim == 1 else (replace(a, dim=2), b)
    of_rows = (b, Parameter(magnitude_name(weight.name), (outputs,))) if lora.dora else (b,)
    if weight.split is None:
        return a, *of_rows
    if weight.dim:
        return replace(a, split=weight.split, dim=1), *of_rows
    return a, *(replace(each, split=weight.split) for each in of_rows)
