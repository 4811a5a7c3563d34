"""Adapters of a run as a folder of PEFT: adapter_config.json and adapter_model.safetensors, with its names.

A layer of a file may join several of the decoder's (`qkv_proj`). Their adapters become one of the sum of
their ranks, whose A has the rows of each A, and whose B has a block for each B. Rows of heads are in the
file's order, and a layer that files store transposed (GPT-2's Conv1D) is told by `fan_in_fan_out`. DoRA's
magnitudes are those of all rows; of rows without an adapter they are the lengths that these have. Routed
experts are those of `peft_experts.py`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from meshwright.exchange.hf_state_dict import HfTensor, NamedTensors, hf_tensors
from meshwright.exchange.hf_tokenizer import write_json
from meshwright.exchange.peft_experts import PeftExperts, peft_experts
from meshwright.exchange.safetensors_stream import SafetensorsStream, TensorInfo
from meshwright.model.lora import squares_of_rows
from meshwright.spec import ModelSpec, UserError
from meshwright.spec.hf.families import FAMILIES
from meshwright.spec.lora import LoraSpec, with_adapters
from meshwright.spec.lora_source import CONFIG, PREFIX, WEIGHTS
from meshwright.spec.parameters import Parameter, parameters
from meshwright.storage.upload import new_folder

_OF_EXPERTS = ("gate_proj", "up_proj", "down_proj", "w1", "w2", "w3")


class PeftLayer(NamedTuple):
    """A linear layer of the family's files with an adapter: its module, its weight as a tensor of the files,
    and the weights of the decoder that it joins, with which of these have adapters."""

    module: str
    piece: HfTensor
    weights: tuple[Parameter, ...]
    adapted: tuple[bool, ...]

    @property
    def stem(self) -> str:
        """The module that holds A and B."""
        return self.module

    @property
    def rescales(self) -> bool:
        """True if there are magnitudes."""
        return any(len(each.adapters) > 2 for each in self.weights)

    def shapes(self, rank: int) -> tuple[tuple[int, ...], ...]:
        """Shapes of A, B and magnitudes in the file, for adapters of the decoder of this rank."""
        rows, columns = sum(each.shape[0] for each in self.weights), self.weights[0].shape[1]
        if self.piece.padded is not None:
            rows, columns = (self.piece.padded, columns) if self.piece.dim == 0 else (rows, self.piece.padded)
        return (self.rank(rank), columns), (rows, self.rank(rank)), *[(rows,)] * self.rescales

    def rank(self, rank: int) -> int:
        """Rank of the adapter in the file."""
        return rank * sum(self.adapted)

    def to_peft(self, rank: int, source: NamedTensors) -> list[Tensor]:
        """A, B and magnitudes of the file, from those of the decoder's layers."""
        like = next(source[each.adapters[0].name] for each in self.weights if each.adapters)
        found = [like.new_zeros(shape) for shape in self.shapes(rank)]
        first = place = 0
        rotary = self.piece.rotary or (None,) * len(self.weights)
        for weight, turned in zip(self.weights, rotary, strict=True):
            rows, columns = slice(first, first + weight.shape[0]), weight.shape[1]
            of_rows = [source[each.name] for each in weight.adapters[1:]]
            if self.rescales and not weight.adapters:
                of_rows = [squares_of_rows(source[weight.name]).sqrt()]
            in_file = of_rows if turned is None else [turned.to_file(each) for each in of_rows]
            if weight.adapters:
                found[0][place : place + rank, :columns] = source[weight.adapters[0].name]
                found[1][rows, place : place + rank] = in_file[0]
                place += rank
            for whole in found[2:]:
                whole[rows] = in_file[-1]
            first = rows.stop
        return found

    def from_peft(self, rank: int, a: Tensor, b: Tensor, *magnitudes: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Yield the adapters of the decoder's layers by name, from A, B and magnitudes of the file.

        An A of `rank` rows that several layers share becomes one for each of them.
        """
        first = place = 0
        shared = a.shape[0] == rank
        rotary = self.piece.rotary or (None,) * len(self.weights)
        for weight, turned in zip(self.weights, rotary, strict=True):
            rows, columns = slice(first, first + weight.shape[0]), weight.shape[1]
            if weight.adapters:
                ranks = slice(place, place + rank)
                of_rows = b[rows, ranks], *(each[rows] for each in magnitudes)
                own = of_rows if turned is None else [turned.to_decoder(each) for each in of_rows]
                names = (each.name for each in weight.adapters)
                yield from zip(names, (a[ranks, :columns], *own), strict=True)
                place += 0 if shared else rank
            first = rows.stop


PeftTarget = PeftLayer | PeftExperts


def peft_targets(model: ModelSpec, lora: LoraSpec) -> list[PeftTarget]:
    """The layers of the family's files that have adapters, and the stacked parameters of experts."""
    return [*peft_layers(model, lora), *peft_experts(model, lora)]


def names_in_file(target: PeftTarget) -> tuple[str, ...]:
    """Names of A, B and magnitudes in the file."""
    ends = ["lora_A.weight", "lora_B.weight"]
    if isinstance(target, PeftLayer) and target.rescales:
        ends.append("lora_magnitude_vector")
    return tuple(f"{PREFIX}{target.stem}.{end}" for end in ends)


def peft_layers(model: ModelSpec, lora: LoraSpec) -> Iterator[PeftLayer]:
    """Yield each linear layer of the family's files that has an adapter."""
    units = with_adapters(parameters(model), lora).values()
    listed = {each.name: each for unit in units for each in unit}
    for piece in hf_tensors(model):
        weights = tuple(listed[name] for name in piece.parameters if name in listed)
        adapted = tuple(bool(each.adapters) for each in weights)
        if any(adapted) and not weights[0].expert:
            yield PeftLayer(piece.hf.removesuffix(".weight"), piece, weights, adapted)


def write_adapter(
    folder: Path | str,
    model: ModelSpec,
    lora: LoraSpec,
    source: NamedTensors,
    base: str | None,
    dtype: torch.dtype = torch.float32,
) -> None:
    """Write a folder that `PeftModel.from_pretrained` opens on the model that the adapters were trained on.

    `source` has the adapters, and the weights beside them; `base` names that model, if it has a name. The
    folder appears by one rename. Raises `UserError` for a folder that exists and is not empty or cannot be
    written, and for adapters that PEFT would put elsewhere.
    """
    targets = peft_targets(model, lora)
    _check_names(model, targets)
    try:
        with new_folder(folder, "export") as made:
            write_json(made.path / CONFIG, peft_config(model, lora, targets, base))
            infos = [
                TensorInfo(name, shape, dtype)
                for each in targets
                for name, shape in zip(names_in_file(each), each.shapes(lora.rank), strict=True)
            ]
            with SafetensorsStream(made.path / WEIGHTS, infos) as stream:
                for each in targets:
                    values = (value.to(dtype) for value in each.to_peft(lora.rank, source))
                    stream.write(zip(names_in_file(each), values, strict=True))
            made.finished(WEIGHTS)
    except OSError as error:
        raise UserError(
            f"export: {folder} cannot be written ({error.strerror or error}); give another folder"
        ) from error


def _check_names(model: ModelSpec, targets: Sequence[PeftTarget]) -> None:
    """Raise `UserError` for adapters of layers that PEFT takes for those of routed experts, by the ends of
    their names (`convert_peft_config_for_transformers` of PEFT 0.21)."""
    layers = [each.module for each in targets if isinstance(each, PeftLayer)]
    taken = [module for module in layers if module.rpartition(".")[2] in _OF_EXPERTS]
    if model.moe is not None and taken:
        raise UserError(
            f"--adapter: PEFT takes an adapter of {taken[0]} for one of the model's routed experts; export "
            f"the merged model without --adapter, or train with lora.targets = ['*.attn.*', "
            f"'*.experts.*']"
        )


def peft_config(
    model: ModelSpec, lora: LoraSpec, targets: Sequence[PeftTarget], base: str | None
) -> dict[str, Any]:
    """The content of adapter_config.json."""
    joined = [each for each in targets if sum(each.adapted) > 1]
    # alpha / rank, or alpha / sqrt(rank), is to be as before
    factor = {each: sum(each.adapted) ** (0.5 if lora.rslora else 1) for each in joined}
    of_experts = [each.module for each in targets if isinstance(each, PeftExperts)]
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": lora.dropout,
        "use_rslora": lora.rslora,
        "use_dora": lora.dora,
        "target_modules": _modules(model, [each for each in targets if isinstance(each, PeftLayer)]),
        "rank_pattern": {re.escape(each.module): each.rank(lora.rank) for each in joined},
        "alpha_pattern": {re.escape(each.module): lora.alpha * factor[each] for each in joined},
        "fan_in_fan_out": FAMILIES[model.family].names.transposed,
        "bias": "none",
        "inference_mode": True,
    }
    return config | ({"target_parameters": of_experts} if of_experts else {})


def _modules(model: ModelSpec, layers: Sequence[PeftLayer]) -> list[str]:
    """Last parts of the modules' names where these have adapters wherever they occur, else whole names.

    Beside experts names are whole: of last parts PEFT makes those of stacked experts.
    """
    modules = {layer.module for layer in layers}
    leaves = sorted({module.rpartition(".")[2] for module in modules})
    every = {piece.hf.removesuffix(".weight") for piece in hf_tensors(model)}
    named = {module for module in every if module.rpartition(".")[2] in leaves}
    return leaves if named == modules and model.moe is None else sorted(modules)
