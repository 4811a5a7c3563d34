"""Named tensors in the files of a checkpoint, whatever its format, read one at a time."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from meshwright.checkpoint.save_plan import narrow
from meshwright.checkpoint.weights import ReadBytes
from meshwright.spec.sharded_tensor import Rectangle

Header = tuple[Path, tuple[int, ...], str]
"""File or folder, shape, and dtype (its name in safetensors) of a tensor."""
DTYPE_NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8",
    torch.bool: "BOOL", torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
}  # fmt: skip
"""Dtype -> its name in safetensors files."""
DTYPES_BY_NAME = {name: dtype for dtype, name in DTYPE_NAMES.items()}


class TensorStore(Protocol):
    """The tensors of a checkpoint by name, of which one at a time is in memory."""

    @property
    def headers(self) -> Mapping[str, Header]:
        """The header of each tensor by name."""
        ...

    def read(self, name: str) -> Tensor:
        """Return a whole tensor on the CPU. Raises `UserError` for damage."""
        ...

    def parts(self, name: str, rectangles: Sequence[Rectangle]) -> Iterator[Tensor]:
        """Yield the values of rectangles of a tensor, in their order. Raises `UserError` for damage.

        No more of it is read where the format allows that.
        """
        ...

    def reading(self, name: str, rectangles: Sequence[Rectangle]) -> ReadBytes:
        """Return what `parts` of these would take, without reading them."""
        ...


class WholeTensors:
    """A store whose tensors are read whole, once for all rectangles that are wanted (`TensorStore`)."""

    headers: Mapping[str, Header]

    def read(self, name: str) -> Tensor:
        """Return a whole tensor on the CPU. Raises `UserError` for damage."""
        raise NotImplementedError

    def parts(self, name: str, rectangles: Sequence[Rectangle]) -> Iterator[Tensor]:
        """Yield the values of rectangles of a tensor, in their order."""
        value = self.read(name)
        yield from (narrow(value, rectangle) for rectangle in rectangles)

    def reading(self, name: str, rectangles: Sequence[Rectangle]) -> ReadBytes:
        """Return what `parts` of these would take, without reading them: a whole tensor."""
        size = bytes_of(self.headers[name])
        return ReadBytes(size, size) if rectangles else ReadBytes()


class MappedTensors(WholeTensors):
    """A store whose tensors are mapped from files: what no rectangle has of them is not read."""

    def reading(self, name: str, rectangles: Sequence[Rectangle]) -> ReadBytes:
        """Return what `parts` of these would take, without reading them."""
        sizes = [bytes_of(self.headers[name], sizes) for _, sizes in rectangles]
        return ReadBytes(sum(sizes), max(sizes, default=0))


class DecodedTensors(WholeTensors):
    """A store in which some tensors are the numbers that tensors of `files` stand for, such as codes with
    scales, and the others are those of `files` (`TensorStore`)."""

    def __init__(self, files: TensorStore) -> None:
        self._files = files
        self._made_of: Mapping[str, Sequence[Header]] = {}
        """The headers of what each decoded tensor is made of, which a subclass finds in the files."""

    def decode(self, name: str) -> Tensor:
        """Return one of the tensors that are made of others. Raises `UserError` for damage."""
        raise NotImplementedError

    def read(self, name: str) -> Tensor:
        """Return a whole tensor on the CPU. Raises `UserError` for damage."""
        return self.decode(name) if name in self._made_of else self._files.read(name)

    def parts(self, name: str, rectangles: Sequence[Rectangle]) -> Iterator[Tensor]:
        """Yield the values of rectangles of a tensor, in their order."""
        if name in self._made_of:
            return super().parts(name, rectangles)
        return self._files.parts(name, rectangles)

    def reading(self, name: str, rectangles: Sequence[Rectangle]) -> ReadBytes:
        """Return what `parts` of these would take: what a tensor is made of is read, and becomes numbers."""
        if name not in self._made_of:
            return self._files.reading(name, rectangles)
        whole = super().reading(name, rectangles)
        return whole._replace(bytes=sum(map(bytes_of, self._made_of[name]))) if whole.bytes else whole


def header_of(place: Path, tensor: Tensor) -> Header:
    """Return the header of a tensor in a file."""
    return place, tuple(tensor.shape), dtype_name(tensor.dtype)


def bytes_of(header: Header, sizes: Sequence[int] | None = None) -> int:
    """Return the size of a tensor by its header, or that of a part of these `sizes`."""
    _, shape, dtype = header
    return math.prod(shape if sizes is None else sizes) * DTYPES_BY_NAME[dtype].itemsize


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype in safetensors, or for another one its own."""
    return DTYPE_NAMES.get(dtype, str(dtype).removeprefix("torch."))


class RenamedStore:
    """Tensors of a store under other names: `names` has the name in the store by the new one."""

    def __init__(self, store: TensorStore, names: Mapping[str, str]) -> None:
        self._store, self._names = store, names
        self.headers = {name: store.headers[stored] for name, stored in names.items()}

    def read(self, name: str) -> Tensor:
        """Return a whole tensor on the CPU. Raises `UserError` for damage."""
        return self._store.read(self._names[name])

    def parts(self, name: str, rectangles: Sequence[Rectangle]) -> Iterator[Tensor]:
        """Yield the values of rectangles of a tensor, in their order."""
        return self._store.parts(self._names[name], rectangles)

    def reading(self, name: str, rectangles: Sequence[Rectangle]) -> ReadBytes:
        """Return what `parts` of these would take, without reading them."""
        return self._store.reading(self._names[name], rectangles)
