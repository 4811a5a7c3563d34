"""Directories of torch's distributed checkpoints: `.metadata` and `*.distcp` files, of any layout.

The metadata is unpickled without running code, and pieces of tensors are read by torch's `FileSystemReader`,
which unpickles with `weights_only`. Source: torch.distributed.checkpoint, 2023.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from meshwright.checkpoint.rectangles import check_cover, check_within, common
from meshwright.checkpoint.weights import ReadBytes
from meshwright.exchange.restricted_pickle import READING_ERRORS, load_dcp_metadata
from meshwright.exchange.tensor_store import Header, bytes_of, dtype_name
from meshwright.spec import UserError
from meshwright.spec.sharded_tensor import Rectangle

METADATA = ".metadata"


class DcpStore:
    """The tensors of a directory, in full whatever layout wrote them (`TensorStore`).

    Errors start with `key`. Raises `UserError` for metadata that is damaged or names something to run.
    """

    def __init__(self, folder: Path, key: str) -> None:
        self._folder, self._key = folder, key
        self._metadata = load_dcp_metadata(folder / METADATA, key)
        self._tensors = {
            name: entry
            for name, entry in self._metadata.state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata)
        }
        self.headers: dict[str, Header] = {
            name: (folder, tuple(entry.size), dtype_name(entry.properties.dtype))
            for name, entry in self._tensors.items()
        }
        self._reader = FileSystemReader(folder)
        self._reader.set_up_storage_reader(self._metadata, is_coordinator=True)

    def read(self, name: str) -> Tensor:
        """Return a whole tensor on the CPU. Raises `UserError` for damage and absent files."""
        size = self._tensors[name].size
        return self._rectangle(name, [0] * len(size), size)

    def parts(self, name: str, rectangles: Sequence[Rectangle]) -> Iterator[Tensor]:
        """Yield the values of rectangles of a tensor, in their order, of which alone pieces are read."""
        yield from (self._rectangle(name, *rectangle) for rectangle in rectangles)

    def reading(self, name: str, rectangles: Sequence[Rectangle]) -> ReadBytes:
        """Return what `parts` of these would take, without reading them: whole pieces, one at a time."""
        header, found = self.headers[name], ReadBytes()
        pieces = [(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in self._tensors[name].chunks]
        for rectangle in rectangles:
            for piece in pieces:
                if common(piece, rectangle) is not None:
                    size = bytes_of(header, piece[1])
                    found = found.then(ReadBytes(size, size + bytes_of(header, rectangle[1])))
        return found

    def row(self, name: str, index: int) -> Tensor:
        """Return one index of a tensor's dim 0, of which alone pieces are read. Raises `UserError`."""
        size = self._tensors[name].size
        rest = size[1:]
        return self._rectangle(name, [index] + [0] * len(rest), [1, *rest])[0]

    def _rectangle(self, name: str, offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
        entry = self._tensors[name]
        self._check_pieces(name, entry)
        value = torch.empty(tuple(sizes), dtype=entry.properties.dtype)
        wanted = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
        plan = LoadPlan(create_read_items_for_chunk_list(name, entry, [wanted]))
        try:
            self._reader.read_data(plan, _Into(value))
        except READING_ERRORS as error:
            reason = " ".join(str(error).split())[:120]
            raise UserError(
                f"{self._key}: {self._folder}: the tensor {name} cannot be read ({reason}); copy the "
                "directory again"
            ) from error
        return value

    def _check_pieces(self, name: str, entry: TensorStorageMetadata) -> None:
        """Raise `UserError` unless the pieces of a tensor cover it, in files of the directory."""
        pieces = [(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in entry.chunks]
        try:
            for piece in pieces:
                check_within(f"a piece of {name}", piece, entry.size)
            check_cover(name, entry.size, pieces)
            for number, (offsets, _) in enumerate(pieces):
                found = self._metadata.storage_data[MetadataIndex(name, offsets, number)]
                if Path(found.relative_path).name != found.relative_path:
                    raise ValueError(f"{name} is in {found.relative_path!r}, which is outside")
                if not (self._folder / found.relative_path).is_file():
                    raise ValueError(f"{name} is in {found.relative_path}, which is not there")
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(
                f"{self._key}: {self._folder}: {error}; copy all files of the directory again"
            ) from error


class _Into(DefaultLoadPlanner):
    """Puts what is read of one tensor into `value`."""

    def __init__(self, value: Tensor) -> None:
        super().__init__()
        self._value = value

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        """Return the tensor to fill."""
        return self._value
