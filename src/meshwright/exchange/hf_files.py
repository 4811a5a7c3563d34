"""The files with weights of an HF folder: which there are, what their headers list, and under which names."""

from __future__ import annotations

import io
import math
import os
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from meshwright.checkpoint.save_plan import narrow
from meshwright.checkpoint.weights import ReadBytes, whole
from meshwright.exchange.hf_state_dict import hf_tensors
from meshwright.exchange.tensor_store import DTYPES_BY_NAME, Header, RenamedStore, TensorStore, bytes_of
from meshwright.exchange.torch_files import TorchFiles
from meshwright.spec import ModelSpec, UserError
from meshwright.spec.files import parse_json
from meshwright.spec.hf.config_read import other_weights
from meshwright.spec.hf.families import FAMILIES
from meshwright.spec.hf.json_object import read_json_object
from meshwright.spec.hf.special_tokens import check_within
from meshwright.spec.sharded_tensor import Rectangle
from meshwright.spec.tiling import tiling

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
BIN, BIN_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
MOST_TENSORS = 2**17
"""Most tensors of a model whose headers are read; the largest published ones have 10^5, in 10^2 files."""
_TENSORS_FOR_ONE = 4
"""Most tensors of files that stand for one of the model's: codes, scales and shapes of quantised ones."""
_EXTRA_TENSORS, _EXTRA_BYTES, _BYTES_OF_NAME = 10**4, 2**20, 256
"""Tensors besides those, bytes of metadata, and bytes of a tensor in a header or an index."""
_LEAST_READ = 4096
"""Least bytes of a part of a row that is read without the rest of the row: a page of memory."""
_WRAPPERS = re.compile(r"(?:^(?:_orig_mod|module)\.)+|(?<=\.)_orig_mod\.")
"""Names that torch.compile and DistributedDataParallel put into those of a module's parameters."""


class _Folder:
    """An HF folder's files with weights, and how much a model of `spec` can have in them."""

    def __init__(self, folder: Path, spec: ModelSpec) -> None:
        self._folder = folder
        expected = sum(1 for _ in islice(hf_tensors(spec), MOST_TENSORS))
        self._most = _TENSORS_FOR_ONE * expected + _EXTRA_TENSORS

    def paths(self, single: str, index: str) -> list[Path]:
        """Return the file `single`, or all files that an `index` lists; none where neither is there."""
        file, listing = self._folder / single, self._folder / index
        if file.is_file():
            check_within(file, self._folder, "model.hf")
            return [file]
        if not listing.is_file():
            return []
        check_within(listing, self._folder, "model.hf")
        if listing.stat().st_size > self._most_bytes:
            raise self._too_many(listing)
        weight_map = read_json_object(listing, "model.hf").get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
            raise UserError(f"model.hf: {listing} has no weight_map from tensors to files")
        names = sorted(set(weight_map.values()))
        for name in names:
            if Path(name).name != name:
                raise UserError(
                    f"model.hf: {listing} names the file {name!r}, which is outside of its folder"
                )
            if not (self._folder / name).is_file():
                raise UserError(
                    f"model.hf: {listing} names the file {name}, which is not in {self._folder}; copy all "
                    f"{len(names)} files of the model there"
                )
            check_within(self._folder / name, self._folder, "model.hf")
        return [self._folder / name for name in names]

    def open(self) -> TensorStore:
        """Return the tensors of the folder's files, by their names there."""
        if paths := self.paths(WEIGHTS, INDEX):
            if self._has_adapter:
                warnings.warn(
                    f"model.hf: {self._folder} holds an adapter of PEFT beside the model's weights, which is "
                    "not applied; give the adapter's folder to `meshwright import` if its weights are meant",
                    stacklevel=2,
                )
            found: dict[str, Header] = {}
            starts: dict[str, int] = {}
            for path in paths:
                first, listed = self._read(path)
                found |= {name: (path, tuple(each["shape"]), each["dtype"]) for name, each in listed.items()}
                starts |= {name: first + each["data_offsets"][0] for name, each in listed.items()}
                self._check_count(path, found)
            return SafetensorsFiles(found, starts)
        if paths := self.paths(BIN, BIN_INDEX):
            files = TorchFiles(paths, "model.hf")
            self._check_count(paths[0], files.headers)
            return files
        raise UserError(f"model.hf: {self._folder} has neither {WEIGHTS} nor {INDEX}; {self._remedy()}")

    def _check_count(self, path: Path, found: Sized) -> None:
        if len(found) > self._most:
            raise self._too_many(path)

    @property
    def _has_adapter(self) -> bool:
        return (self._folder / "adapter_config.json").is_file() or any(self._folder.glob("adapter_model.*"))

    def _remedy(self) -> str:
        """Return what to do about a folder without safetensors, by what it has."""
        folder = self._folder
        if self._has_adapter:
            return (
                "it holds an adapter of PEFT: merge it into its base model, as `meshwright import` does "
                "where an adapter_config.json is beside it"
            )
        if parts := sorted(folder.glob("model-*-of-*.safetensors")):
            return f"{parts[0].name} is a part of a model: copy all parts and the index there"
        if others := other_weights(folder):
            return (
                f"{others[0]} is not read: convert it, as transformers does with "
                "from_pretrained(FOLDER).save_pretrained(OTHER)"
            )
        return "give a folder with safetensors or pytorch_model.bin"

    @property
    def _most_bytes(self) -> int:
        return _EXTRA_BYTES + _BYTES_OF_NAME * self._most

    def _read(self, path: Path) -> tuple[int, dict[str, Any]]:
        """Return the place of a file's first tensor, and its header, whose size is looked at first."""
        try:
            with path.open("rb") as file:
                start = file.read(8)
                size = int.from_bytes(start, "little")
                if start == b"version ":
                    raise UserError(f"model.hf: {path} is a pointer of Git LFS; fetch the file: git lfs pull")
                if path.stat().st_size >= size > self._most_bytes:
                    raise self._too_many(path)
                with safe_open(path, framework="pt"):  # all that the header says fits the file
                    pass
                listed = parse_json(file.read(size))
        except (SafetensorError, OSError, ValueError) as error:
            raise UserError(
                f"model.hf: {path} is not a readable safetensors file ({error}); copy the file again"
            ) from error
        listed.pop("__metadata__", None)
        return 8 + size, listed

    def _too_many(self, path: Path) -> UserError:
        return UserError(
            f"model.hf: {path} lists more than {self._most} tensors, or in more than {self._most_bytes} "
            "bytes, which no model of this config.json has; give another copy of the model"
        )


class SafetensorsFiles:
    """Tensors of safetensors files, whose headers were read (`TensorStore`).

    They are read, and not mapped, so that what was read stays in no process's memory. `starts` are the places
    of the tensors in their files, in bytes.
    """

    def __init__(self, headers: Mapping[str, Header], starts: Mapping[str, int]) -> None:
        self.headers, self._starts = headers, starts

    def read(self, name: str) -> Tensor:
        """Return a whole tensor on the CPU. Raises `UserError` for a file that cannot be read."""
        return next(self.parts(name, [whole(self.headers[name][1])]))

    def parts(self, name: str, rectangles: Sequence[Rectangle]) -> Iterator[Tensor]:
        """Yield the values of rectangles of a tensor, in their order.

        No more is read, but for parts of rows that are short: their rows are read, some at a time.
        """
        path, shape, stored = self.headers[name]
        dtype = DTYPES_BY_NAME[stored]
        row = math.prod(shape[1:]) * dtype.itemsize
        try:
            with path.open("rb", buffering=0) as file:
                for offsets, sizes in rectangles:
                    value = torch.empty(sizes, dtype=dtype)
                    start = self._starts[name] + (offsets[0] * row if shape else 0)
                    if sizes[1:] == shape[1:]:
                        _read_into(file, start, value.view(-1))
                    elif _row_by_row(self.headers[name], sizes):
                        first = start + offsets[1] * math.prod(shape[2:]) * dtype.itemsize
                        _read_rows(file, first, row, value)
                    else:
                        _read_columns(file, start, value, shape, offsets)
                    yield value
                    del value  # before the next one is read
        except (OSError, EOFError) as error:
            raise UserError(
                f"model.hf: the tensor {name} cannot be read from {path} ({error}); copy the file again"
            ) from error

    def reading(self, name: str, rectangles: Sequence[Rectangle]) -> ReadBytes:
        """Return what `parts` of these would take, without reading them."""
        header, found = self.headers[name], ReadBytes()
        for _, sizes in rectangles:
            whole_rows = bytes_of(header, (*sizes[:1], *header[1][1:]))
            part = bytes_of(header, sizes)
            alone = _row_by_row(header, sizes) or part == whole_rows
            buffered = 0 if alone else min(whole_rows, tiling().read_bytes)
            found = found.then(ReadBytes(part if alone else whole_rows, part + buffered))
        return found


def _row_by_row(header: Header, sizes: Sequence[int]) -> bool:
    """Return True for parts of rows that are consecutive in each, and long enough to be read alone."""
    return sizes[2:] == header[1][2:] and bytes_of(header, sizes[1:]) >= _LEAST_READ


def _read_into(file: io.FileIO, start: int, value: Tensor) -> None:
    """Fill a vector with the bytes from `start` on. Raises `EOFError` where the file ends."""
    _read_bytes(file, start, value.view(torch.uint8).numpy().data)


def _read_rows(file: io.FileIO, start: int, step: int, value: Tensor) -> None:
    """Fill each row of a tensor with consecutive bytes, those of the next one `step` bytes further on."""
    for index, content in enumerate(value.flatten(1).view(torch.uint8).numpy()):
        _read_bytes(file, start + index * step, content.data)


def _read_bytes(file: io.FileIO, start: int, content: memoryview) -> None:
    done, most = 0, tiling().read_bytes
    while done < len(content):
        count = os.preadv(file.fileno(), [content[done : done + most]], start + done)
        if count == 0:
            raise EOFError(f"it ends at byte {start + done}")
        done += count


def _read_columns(
    file: io.FileIO, start: int, value: Tensor, shape: Sequence[int], offsets: Sequence[int]
) -> None:
    """Fill a tensor with a part of rows of `shape`, the first of which is at `start`, some rows at a time."""
    row = math.prod(shape[1:]) * value.element_size()
    count = max(1, tiling().read_bytes // max(row, 1))
    for first in range(0, len(value), count):
        rows = torch.empty((min(count, len(value) - first), *shape[1:]), dtype=value.dtype)
        _read_into(file, start + first * row, rows.view(-1))
        around = (0, *offsets[1:]), (len(rows), *value.shape[1:])
        value[first : first + len(rows)] = narrow(rows, around)


def model_files(folder: Path, spec: ModelSpec) -> TensorStore:
    """Return the tensors of an HF folder, of safetensors files or else of pytorch_model.bin.

    Raises `UserError` for files that are missing, links out of the folder, or damaged, for pickles that name
    something to run, and for more tensors than `spec` can have.
    """
    return _Folder(folder, spec).open()


def by_causal_names(store: TensorStore, spec: ModelSpec) -> RenamedStore:
    """Return the tensors of a store by the names of a causal model of the family.

    Files may have them under others: with those of torch.compile or of data parallelism in front, or, saved
    from a base model, without its own prefix.
    """
    names = _causal_names(store.headers, spec)
    if len(set(names.values())) < len(names):
        names = {name: name for name in store.headers}
    return RenamedStore(store, {causal: name for name, causal in names.items()})


def _causal_names(names: Iterable[str], spec: ModelSpec) -> dict[str, str]:
    """Return {name in a file: name in a causal model of the family}."""
    if any(
        name.endswith(".weight_scale") for name in names
    ):  # files of quantised layers, as they are written
        return {name: name for name in names}
    short = {name: _WRAPPERS.sub("", name) for name in names}
    theirs = FAMILIES[spec.family].names
    prefix, embedding = f"{theirs.model}.", theirs.embedding_weight
    if embedding.removeprefix(prefix) in short.values():  # a base model; the head is not of it
        short = {name: each if each.startswith("lm_head.") else prefix + each for name, each in short.items()}
    if spec.tied and embedding not in short.values():
        short = {name: embedding if each == "lm_head.weight" else each for name, each in short.items()}
    return short


def why_lacking(name: str, names: Iterable[str], spec: ModelSpec) -> str:
    """Return the cause and the remedy of a tensor that files with these names lack, or ''."""
    given = list(names)
    if any(".lora_" in each or ".base_layer." in each for each in given):
        return ": its weights are those of a PEFT model; merge the adapter (merge_and_unload) and save again"
    if name == "lm_head.weight" and not spec.tied:
        return ": it was saved without its head, as base models are; save the causal model"
    end = name.split(".", 1)[-1]
    if other := next((each for each in given if each != name and each.endswith(f".{end}")), None):
        return f": it has {other}, which is named as in another kind of model; save the causal language model"
    return ""
