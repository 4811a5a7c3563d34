"""Safetensors files written one tensor at a time: the header first, then each tensor at its place."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

import torch
from torch import Tensor

from meshwright.exchange.tensor_store import DTYPE_NAMES

_ALIGNMENT = 8


class TensorInfo(NamedTuple):
    """A tensor as the header of a file lists it."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        """Its size in the file."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


class SafetensorsStream:
    """A new file with a header of these tensors, to which their values are written in any order.

    Wider numbers come first, so that every tensor begins at a multiple of the size of its numbers. A context
    manager, which closes the file. Raises `OSError`.
    """

    def __init__(self, path: Path, tensors: Sequence[TensorInfo]) -> None:
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        starts, end = {}, 0
        for info in sorted(tensors, key=lambda info: -info.dtype.itemsize):
            starts[info.name], end = end, end + info.bytes
            offsets = [starts[info.name], end]
            shape = list(info.shape)
            header[info.name] = {"dtype": DTYPE_NAMES[info.dtype], "shape": shape, "data_offsets": offsets}
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % _ALIGNMENT)
        self._infos = {info.name: info for info in tensors}
        self._starts = {name: 8 + len(text) + start for name, start in starts.items()}
        self._file = path.open("wb")
        self._file.write(len(text).to_bytes(8, "little") + text)

    def write(self, values: Iterable[tuple[str, Tensor]]) -> None:
        """Write values on the CPU, of the shapes and formats that the header names."""
        for name, value in values:
            info = self._infos.pop(name)
            assert (tuple(value.shape), value.dtype) == (info.shape, info.dtype), name
            self._file.seek(self._starts[name])
            if info.bytes:
                self._file.write(value.contiguous().flatten().view(torch.uint8).numpy().data)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()
        assert kind is not None or not self._infos, f"no value was given for {next(iter(self._infos), '')}"
