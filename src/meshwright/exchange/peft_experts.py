"""Adapters of routed experts as PEFT has them beside the stacked parameters of transformers 5.

Files name such parameters in `target_parameters`. For E experts and rank r, A (r E, inputs) has the rows of
each expert's A in turn, and column j E + e of B (outputs, r E) is column j of the B of expert e. Where a
parameter joins gate and up, so do their adapters, with blocks of B, as in `peft_adapter.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from torch import Tensor

from meshwright.exchange.hf_state_dict import HfTensor, NamedTensors, hf_tensors
from meshwright.spec import ModelSpec
from meshwright.spec.lora import LoraSpec, with_adapters
from meshwright.spec.parameters import Parameter, parameters


class PeftExperts(NamedTuple):
    """A stacked parameter of the family's files with adapters, called `module`: the weights of the decoder
    that it joins, and which of these have adapters.

    `stem` is the module that holds A and B. PEFT wraps a module once for each of its parameters, the last one
    outermost.
    """

    module: str
    piece: HfTensor
    weights: tuple[Parameter, ...]
    adapted: tuple[bool, ...]
    stem: str

    def shapes(self, rank: int) -> tuple[tuple[int, int], tuple[int, int]]:
        """Shapes of A and B in the file, for adapters of the decoder of this rank."""
        experts, _, inputs = self.weights[0].shape
        rows = self.rank(rank) * experts
        return (rows, inputs), (sum(each.shape[1] for each in self.weights), rows)

    def rank(self, rank: int) -> int:
        """Rank of the adapter in the file."""
        return rank * sum(self.adapted)

    def to_peft(self, rank: int, source: NamedTensors) -> tuple[Tensor, Tensor]:
        """A and B of the file, from those of the decoder's experts."""
        found: list[tuple[slice, Tensor, Tensor]] = []
        for weight, rows in self._rows_of_adapted():
            a, b = (source[each.name] for each in weight.adapters)
            found.append((rows, a, b))
        experts, _, inputs = self.weights[0].shape
        every = found[0][1].new_zeros(experts, self.rank(rank), inputs)
        outputs = every.new_zeros(experts, sum(each.shape[1] for each in self.weights), self.rank(rank))
        for place, (rows, a, b) in enumerate(found):
            ranks = slice(place * rank, (place + 1) * rank)
            every[:, ranks], outputs[:, rows, ranks] = a, b
        return every.flatten(0, 1), outputs.permute(1, 2, 0).flatten(1)

    def from_peft(self, rank: int, a: Tensor, b: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Yield the adapters of the decoder's experts by name, from A and B of the file.

        An A of `rank` rows an expert that gate and up share becomes one for each of them.
        """
        experts = self.weights[0].shape[0]
        every = a.unflatten(0, (experts, -1))
        outputs = b.unflatten(1, (-1, experts)).permute(2, 0, 1)
        shared = every.shape[1] == rank
        for place, (weight, rows) in enumerate(self._rows_of_adapted()):
            ranks = slice(0, rank) if shared else slice(place * rank, (place + 1) * rank)
            factors = every[:, ranks], outputs[:, rows, ranks]
            yield from zip((each.name for each in weight.adapters), factors, strict=True)

    def _rows_of_adapted(self) -> Iterator[tuple[Parameter, slice]]:
        """Yield each weight with an adapter, and its rows among the outputs of the parameter."""
        first = 0
        for number, (weight, has_adapter) in enumerate(zip(self.weights, self.adapted, strict=True)):
            turns, last = self.piece.turns, first + weight.shape[1]
            if has_adapter:
                yield weight, slice(number, None, len(self.weights)) if turns else slice(first, last)
            first = last


def peft_experts(model: ModelSpec, lora: LoraSpec) -> Iterator[PeftExperts]:
    """Yield each stacked parameter of the family's files that has adapters."""
    units = with_adapters(parameters(model), lora).values()
    listed = {each.name: each for unit in units for each in unit if each.expert}
    inside = dict[str, str]()  # modules whose parameters so far have adapters
    found: list[PeftExperts] = []
    for piece in hf_tensors(model, stacked=True):
        weights = tuple(listed[name] for name in piece.parameters if name in listed)
        adapted = tuple(bool(each.adapters) for each in weights)
        if any(adapted):
            holder = piece.hf.rpartition(".")[0]
            found.append(PeftExperts(piece.hf, piece, weights, adapted, holder))
            inside[holder] = piece.hf
    for each in found:
        outermost = inside[each.stem] == each.module
        yield each if outermost else each._replace(stem=f"{each.stem}.base_layer")
