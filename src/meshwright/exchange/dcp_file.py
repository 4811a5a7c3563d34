"""Tensors as a directory of torch's distributed checkpoints, which any layout of torch's loads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import MetadataIndex, StorageMeta
from torch.distributed.checkpoint.state_dict_saver import save

from meshwright.exchange.safetensors_stream import TensorInfo


def write_dcp(folder: Path, listed: Sequence[TensorInfo], read: Callable[[str], Tensor]) -> None:
    """Write tensors into a folder: `.metadata` and `*.distcp`. Raises `OSError`.

    `read` returns a tensor by its name. They are read in their order, as they are written, each to a file of
    its own, since torch's writer holds all tensors of a file until it is written.
    """
    shapes = {info.name: torch.empty(info.shape, dtype=info.dtype, device="meta") for info in listed}
    writer = _Writer(folder, single_file_per_rank=False)
    save(shapes, storage_writer=writer, planner=_Planner(read), no_dist=True)


class _Planner(DefaultSavePlanner):
    """Plans by the shapes of tensors, which are read when they are written."""

    def __init__(self, read: Callable[[str], Tensor]) -> None:
        super().__init__()
        self._read = read

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        """Return the tensor of a name, all of which is one piece."""
        return self._read(index.fqn)


class _Writer(FileSystemWriter):
    def storage_meta(self) -> StorageMeta | None:
        """Return what the metadata says of a save: nothing, as the folder is renamed when it is whole."""
        return None
