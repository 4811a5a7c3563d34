"""Headers of safetensors files: whether all that they list is there, without reading any tensor."""

from __future__ import annotations

from pathlib import Path

from meshwright.spec.errors import UserError
from meshwright.spec.files import LFS_POINTER, MAX_JSON, parse_json
from meshwright.spec.hf.json_object import read_json_object

INDEX = "model.safetensors.index.json"
_SMALLEST = 10
"""Bytes of a file without tensors: the size of its header, and `{}`."""


def check_whole_files(folder: Path, key: str) -> None:
    """Raise `UserError`, which starts with `key`, for a file of an HF folder that is missing or cut short.

    Its size is compared with the end of the last tensor of its header. Files without a header, and other
    formats, are left to who reads them.
    """
    listed = folder / INDEX
    names: set[str] = set()
    if listed.is_file():
        files = read_json_object(listed, key).get("weight_map")
        names = {str(name) for name in files.values()} if isinstance(files, dict) else set()
    for path in sorted({*folder.glob("*.safetensors"), *(folder / Path(name).name for name in names)}):
        if not path.is_file():
            raise UserError(
                f"{key}: {listed} names the file {path.name}, which is not in {folder}; copy all "
                f"{len(names)} files of the model there"
            )
        wanted = _bytes_wanted(path)
        if wanted is not None and (there := path.stat().st_size) < wanted:
            raise UserError(
                f"{key}: {path} is not a readable safetensors file: it has {there:,} of at least {wanted:,} "
                f"bytes; copy it again"
            )


def tensor_names(path: Path, key: str) -> list[str]:
    """Return the names of the tensors of a safetensors file. Raises `UserError`, which starts with `key`."""
    try:
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            if not 2 <= size <= MAX_JSON:
                raise ValueError("it has no header")
            listed = parse_json(file.read(size))
    except (OSError, ValueError) as error:
        raise UserError(
            f"{key}: {path} is not a readable safetensors file ({error}); copy it again"
        ) from None
    return [name for name in listed if name != "__metadata__"]


def _bytes_wanted(path: Path) -> int | None:
    """Return the size in bytes that the header of a file says; None where there is no header."""
    with path.open("rb") as file:
        start = file.read(8)
        size = int.from_bytes(start, "little")
        if len(start) < 8:
            return _SMALLEST
        if LFS_POINTER.startswith(start) or not 2 <= size <= MAX_JSON:
            return None
        header = file.read(size)
    if len(header) < size:
        return 8 + size
    try:
        listed = parse_json(header)
        ends = [each["data_offsets"][1] for name, each in listed.items() if name != "__metadata__"]
        return 8 + size + max(ends, default=0)
    except (ValueError, AttributeError, KeyError, IndexError, TypeError):
        return None
