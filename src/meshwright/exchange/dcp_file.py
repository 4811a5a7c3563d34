"""Tensors as a directory of torch's distributed checkpoints, which any layout of torch's loads."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import StorageMeta
from torch.distributed.checkpoint.state_dict_saver import save


def write_dcp(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write tensors by name into a folder: `.metadata` and `*.distcp`. Raises `OSError`."""
    save(dict(tensors), storage_writer=_Writer(folder), no_dist=True)


class _Writer(FileSystemWriter):
    def storage_meta(self) -> StorageMeta | None:
        """Return what the metadata says of a save: nothing, as the folder is renamed when it is whole."""
        return None
