"""The safetensors files of an HF folder: a model's tensors dealt into shards, and written one at a time."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from meshwright.exchange.hf_files import INDEX, WEIGHTS
from meshwright.exchange.hf_quantised import NearestCodes, Quantisation
from meshwright.exchange.hf_state_dict import HfTensor, NamedTensors, hf_tensors
from meshwright.exchange.hf_tokenizer import write_json
from meshwright.exchange.parameter_source import LastRead, ParameterSource, ShapesAlone
from meshwright.exchange.safetensors_stream import SafetensorsStream, TensorInfo
from meshwright.model.quantisation import Codes
from meshwright.spec import ModelSpec
from meshwright.storage.upload import NewFolder

QuantisedCodes = tuple[Quantisation, Mapping[str, Codes]]
"""How a folder's layers are quantised, and their codes by the name of their weight."""
_Shard = list[tuple[HfTensor, list[TensorInfo]]]


def write_weights(
    made: NewFolder,
    spec: ModelSpec,
    source: ParameterSource,
    dtype: torch.dtype,
    max_shard_bytes: int,
    quantised: QuantisedCodes | None,
) -> None:
    """Write a model's weights in `dtype`, in one file, or in several and an index.

    A parameter is in memory at a time; a file has at most `max_shard_bytes`, but for a tensor that is larger,
    which has one to itself. With `quantised`, the files have its codes in place of the tensors of its names.
    Raises `OSError`.
    """
    source = LastRead(source)
    shards = _deal(_listed(spec, source, dtype, quantised), max_shard_bytes)
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        name = WEIGHTS if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        infos = [info for _, each in shard for info in each]
        with SafetensorsStream(made.path / name, infos) as stream:
            for piece, _ in shard:
                stream.write(_stored(piece, source, dtype, quantised).items())
        made.finished(name)
        weight_map |= {info.name: name for info in infos}
    if len(shards) > 1:
        total = sum(info.bytes for shard in shards for _, infos in shard for info in infos)
        write_json(made.path / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})


def _listed(
    spec: ModelSpec, source: ParameterSource, dtype: torch.dtype, quantised: QuantisedCodes | None
) -> Iterable[tuple[HfTensor, list[TensorInfo]]]:
    """Yield each of the model's tensors with what files have of it."""
    blank = ShapesAlone(source.shapes, torch.float32)
    how, codes = quantised or (None, {})
    shapes = (how, NearestCodes(spec, blank, how)) if how is not None else None
    for piece in hf_tensors(spec):
        if piece.hf in codes:
            stored = _stored(piece, blank, dtype, shapes)
            yield piece, [TensorInfo(name, tuple(each.shape), each.dtype) for name, each in stored.items()]
        else:
            yield piece, [TensorInfo(piece.hf, piece.shape(source.shapes), piece.dtype(dtype))]


def _stored(
    piece: HfTensor, tensors: NamedTensors, dtype: torch.dtype, quantised: QuantisedCodes | None
) -> dict[str, Tensor]:
    """The tensors of a file that hold one of the model's: itself, or its codes."""
    if quantised is not None and piece.hf in quantised[1]:
        return quantised[0].stored(piece.hf, quantised[1][piece.hf])
    return {piece.hf: piece.join(tensors, dtype)}


def _deal(listed: Iterable[tuple[HfTensor, list[TensorInfo]]], max_shard_bytes: int) -> list[_Shard]:
    """Return consecutive tensors, as many to a shard as fit."""
    shards: list[_Shard] = [[]]
    room = max_shard_bytes
    for piece, infos in listed:
        size = sum(info.bytes for info in infos)
        if size > room and shards[-1]:
            shards.append([])
            room = max_shard_bytes
        shards[-1].append((piece, infos))
        room -= size
    return shards
