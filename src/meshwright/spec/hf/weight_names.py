"""Names of tensors in an HF folder's files with weights, looked for without opening these as tensors."""

from __future__ import annotations

from pathlib import Path

from meshwright.spec.files import MAX_JSON

_INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")


def holds_layer(folder: Path, layer: int) -> bool:
    """Return True if safetensors or an index in a folder list a layer that predicts further tokens, `layer`.

    What cannot be read lists none: opening the weights says what is wrong with it.
    """
    name = f'layers.{layer}.eh_proj.weight"'.encode()
    try:
        return any(name in _listing(path) for path in _files(folder))
    except OSError:
        return False


def _files(folder: Path) -> list[Path]:
    """Return the files whose beginnings list all tensors of a folder."""
    single = folder / "model.safetensors"
    return [path for path in (single, *(folder / name for name in _INDEXES)) if path.is_file()][:1]


def _listing(path: Path) -> bytes:
    """Return the header of a safetensors file, or an index, as far as it is of a size that is read."""
    with path.open("rb") as file:
        if path.suffix != ".safetensors":
            return file.read(MAX_JSON)
        size = int.from_bytes(file.read(8), "little")
        return file.read(min(size, MAX_JSON))
