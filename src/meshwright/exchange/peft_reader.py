"""Adapters in a folder of PEFT under the decoder's names, for a run that goes on from them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from meshwright.checkpoint.weights import ReadBytes, Wanted, WeightPart, whole_part
from meshwright.exchange.foreign.peft import adapter_tensors, lora_config, scale_of
from meshwright.exchange.peft_adapter import PeftTarget, names_in_file, peft_targets
from meshwright.spec import ModelSpec, UserError
from meshwright.spec.lora import LoraSpec
from meshwright.spec.lora_source import KEY


class PeftWeights:
    """The A, B and magnitudes of a folder of PEFT by the decoder's names (`Weights`).

    Where files join several layers of the decoder, and these share an A, each gets a copy of it: `shared` has
    the names of such modules. Raises `UserError` for adapters that are more than those of the rank and the
    scale of `lora`.
    """

    def __init__(self, folder: Path, model: ModelSpec, lora: LoraSpec) -> None:
        self._folder, self._rank = folder, lora.rank
        config = lora_config(folder, KEY)
        self._tensors = adapter_tensors(folder, self._wrong, KEY)
        targets = peft_targets(model, lora)
        self._check_names(targets)
        self._target_of: dict[str, PeftTarget] = {}
        self.shared: list[str] = []
        for each in targets:
            self._check_target(each, config, lora)
            names = [adapter.name for weight in each.weights for adapter in weight.adapters]
            self._target_of.update(dict.fromkeys(names, each))

    @property
    def exact(self) -> bool:
        """True if one is in float64."""
        return any(each.dtype is torch.float64 for each in self._tensors.values())

    def parts(self, wanted: Wanted) -> Iterator[WeightPart]:
        """Yield the adapters that are wanted, each whole."""
        for each in dict.fromkeys(self._target_of[name] for name in wanted):
            for name, value in each.from_peft(self._rank, *self._read(each)):
                if name in wanted:
                    yield whole_part(name, value)

    def reading(self, wanted: Wanted) -> ReadBytes:
        """Return what `parts` of these takes of the files, all of which are in memory."""
        sizes = [sum(x.nbytes for x in self._read(self._target_of[name])) for name in wanted]
        return ReadBytes(sum(x.nbytes for x in self._tensors.values()), max(sizes, default=0))

    def _read(self, target: PeftTarget) -> tuple[Tensor, ...]:
        return tuple(self._tensors[name] for name in names_in_file(target))

    def _check_names(self, targets: list[PeftTarget]) -> None:
        """Raise `UserError` unless the file has the tensors of each target, and nothing else."""
        expected = {name for each in targets for name in names_in_file(each)}
        if missing := sorted(expected - self._tensors.keys()):
            raise self._wrong(f"lacks the tensor {missing[0]}; copy the whole adapter")
        if more := sorted(self._tensors.keys() - expected):
            raise self._wrong(
                f"has a tensor {more[0]}, and training goes on from A, B and magnitudes of linear layers "
                f"alone; merge it into its base, and begin new adapters: meshwright import {self._folder} "
                f"--out RUN"
            )

    def _check_target(self, target: PeftTarget, config: dict[str, Any], lora: LoraSpec) -> None:
        read, shapes = self._read(target), target.shapes(lora.rank)
        experts = shapes[0][0] // target.rank(lora.rank)
        rank = lora.rank * experts
        shared = (rank, shapes[0][1]), (shapes[1][0], rank), *shapes[2:]
        found = tuple(tuple(each.shape) for each in read)
        if found not in (shapes, shared):
            raise self._wrong(
                f"has an adapter of {target.module} of shapes {_listed(found)}, where this model with "
                f"lora.rank = {lora.rank} has {_listed(shapes)}; give the model that it was trained on, in "
                f"adapters of one rank"
            )
        scale = scale_of(config, target.module, found[0][0] // experts, self._wrong)
        if not math.isclose(scale, lora.scale, rel_tol=1e-9):
            raise self._wrong(
                f"multiplies the adapter of {target.module} by {scale:g} and others by {lora.scale:g}, where "
                f"a run has one factor for all; merge it into its base: meshwright import {self._folder} "
                f"--out RUN"
            )
        if not all(bool(torch.isfinite(each).all()) for each in read):
            raise self._wrong(f"has values of {target.module} that are not finite; give another copy")
        if sum(target.adapted) > 1 and found == shared:
            self.shared.append(target.module)
        else:
            self._check_blocks(target, read)

    def _check_blocks(self, target: PeftTarget, read: tuple[Tensor, ...]) -> None:
        """Raise `UserError` for a B with more than the blocks of the layers that a module joins."""
        again = target.to_peft(self._rank, dict(target.from_peft(self._rank, *read)))
        if not all(torch.equal(one, other) for one, other in zip(again, read, strict=True)):
            raise self._wrong(
                f"has an adapter of {target.module} that mixes the layers which it joins, each of which has "
                f"an adapter of its own here; merge it into its base: meshwright import {self._folder} "
                f"--out RUN"
            )

    def _wrong(self, what: str) -> UserError:
        return UserError(f"{KEY}: {self._folder} {what}")


def _listed(shapes: tuple[tuple[int, ...], ...]) -> str:
    return " and ".join(str(list(shape)) for shape in shapes)
