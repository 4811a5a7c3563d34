"""Pickles of checkpoints read without running code: an object is made only of classes that hold data.

`torch.load(weights_only=True)` reads tensors and plain containers. Other programs put objects of their own
beside them, such as the arguments of a run. These become `Unread`, which keeps their attributes and runs
nothing; a name that no such program writes is refused before anything of the file is made.
"""

from __future__ import annotations

import pickle
from collections import OrderedDict
from pathlib import Path
from typing import Any
from warnings import catch_warnings, simplefilter

import torch
from torch.distributed.checkpoint import filesystem, metadata

from meshwright.spec import UserError

PROGRAMS = (
    "argparse.", "datetime.", "deepspeed.", "enum.", "fractions.", "lightning.", "litgpt.", "megatron.",
    "nemo.", "numpy.", "omegaconf.", "pathlib.", "signal.", "torch.distributed.", "torchtitan.",
    "transformer_engine.",
)  # fmt: skip
"""Beginnings of the names of objects that other programs put beside their tensors."""
READING_ERRORS = (
    pickle.UnpicklingError, EOFError, OSError, RuntimeError, ValueError, TypeError, KeyError, IndexError,
    AttributeError, AssertionError,
)  # fmt: skip
"""Errors that reading a damaged file ends with."""


class Unread:
    """An object of another program's: the attributes that its pickle gives it, and no behaviour."""

    def __init__(self, *values: object) -> None:
        self.values = values

    def __setstate__(self, state: object) -> None:
        self.__dict__.update(state if isinstance(state, dict) else {"state": state})

    def __hash__(self) -> int:
        return id(self)

    def __call__(self, *_: object) -> Unread:
        return Unread()


def load_torch_file(path: Path, key: str) -> Any:
    """Return what `torch.save` wrote to a file, its tensors mapped from the file and not yet read.

    Errors start with `key`. Raises `UserError` for a file that is damaged, and for one whose pickle names
    something to run.
    """
    try:
        with path.open("rb") as file:
            zipped = torch.serialization._is_zipfile(file)
        unsafe = torch.serialization.get_unsafe_globals_in_checkpoint(path) if zipped else []
        if refused := [name for name in unsafe if not name.startswith(PROGRAMS)]:
            raise _hostile(path, refused[0], key)
        with torch.serialization.safe_globals([(Unread, name) for name in unsafe]), catch_warnings():
            simplefilter("ignore")  # torch's advice on pickles of other protocols, which it reads or refuses
            return torch.load(path, map_location="cpu", weights_only=True, mmap=zipped)
    except pickle.UnpicklingError as error:
        if name := _unsupported(str(error)):
            raise _hostile(path, name, key) from error
        raise _damaged(path, error, key) from error
    except READING_ERRORS as error:
        raise _damaged(path, error, key) from error


def load_dcp_metadata(path: Path, key: str) -> metadata.Metadata:
    """Return the `.metadata` of a directory of torch's distributed checkpoints.

    Errors start with `key`. Raises `UserError` for a file that is damaged, and for one that names something
    to run.
    """
    try:
        with path.open("rb") as file:
            found = _MetadataUnpickler(file, path, key).load()
    except READING_ERRORS as error:
        raise _damaged(path, error, key) from error
    if not isinstance(found, metadata.Metadata) or not isinstance(found.storage_data, dict):
        raise UserError(f"{key}: {path} does not describe a checkpoint of torch.distributed; copy it again")
    return found


_DATA = {
    f"{kind.__module__}.{kind.__qualname__}": kind
    for kind in (
        metadata.Metadata, metadata.TensorStorageMetadata, metadata.BytesStorageMetadata,
        metadata.ChunkStorageMetadata, metadata.TensorProperties, metadata.MetadataIndex,
        metadata.StorageMeta, metadata._MEM_FORMAT_ENCODING, filesystem._StorageInfo, OrderedDict, torch.Size,
    )
}  # fmt: skip
"""Classes of the metadata of torch's distributed checkpoints, none of which runs what a pickle gives it."""
_DATA["torch.serialization._get_layout"] = torch.serialization._get_layout  # type: ignore[assignment]


class _MetadataUnpickler(pickle.Unpickler):
    def __init__(self, file: Any, path: Path, key: str) -> None:
        super().__init__(file)
        self._path, self._key = path, key

    def find_class(self, module: str, name: str) -> Any:
        """Return the class of this name if it holds data only. Raises `UserError` for any other name."""
        full = f"{module}.{name}"
        if full in _DATA:
            return _DATA[full]
        if module == "torch" and isinstance(value := getattr(torch, name, None), torch.dtype):
            return value
        if full.startswith(PROGRAMS):
            return Unread
        raise _hostile(self._path, full, self._key)


def _unsupported(message: str) -> str | None:
    """Return the name that torch's unpickler refuses, by its message; None if it refuses none."""
    _, found, after = message.partition("GLOBAL ")
    return after.split()[0] if found and after else None


def _hostile(path: Path, name: str, key: str) -> UserError:
    return UserError(
        f"{key}: {path} names {name}, which reading would run and tensors do not need; nothing of it was "
        "run; give a checkpoint from a source that you trust, saved again as safetensors"
    )


def _damaged(path: Path, error: Exception, key: str) -> UserError:
    reason = " ".join(str(error).split())[:120] or type(error).__name__
    if reason.startswith("Weights only load failed"):  # torch goes on with advice to run what the file says
        reason = "it holds other things than torch.save writes for tensors"
    return UserError(f"{key}: {path} is not a readable checkpoint ({reason}); copy the file again")
