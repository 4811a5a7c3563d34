"""The files with weights of an HF folder: which there are, what their headers list, and under which names."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable, Mapping, Sized
from itertools import islice
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from meshwright.exchange.hf_state_dict import hf_tensors
from meshwright.exchange.tensor_store import Header, RenamedStore, TensorStore
from meshwright.exchange.torch_files import TorchFiles
from meshwright.spec import ModelSpec, UserError
from meshwright.spec.files import parse_json
from meshwright.spec.hf.config_read import other_weights
from meshwright.spec.hf.families import FAMILIES
from meshwright.spec.hf.json_object import read_json_object
from meshwright.spec.hf.special_tokens import check_within

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
BIN, BIN_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
MOST_TENSORS = 2**17
"""Most tensors of a model whose headers are read; the largest published ones have 10^5, in 10^2 files."""
_TENSORS_FOR_ONE = 4
"""Most tensors of files that stand for one of the model's: codes, scales and shapes of quantised ones."""
_EXTRA_TENSORS, _EXTRA_BYTES, _BYTES_OF_NAME = 10**4, 2**20, 256
"""Tensors besides those, bytes of metadata, and bytes of a tensor in a header or an index."""
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
            for path in paths:
                found |= self._read(path)
                self._check_count(path, found)
            return SafetensorsFiles(found)
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
        return "give a folder with safetensors"

    @property
    def _most_bytes(self) -> int:
        return _EXTRA_BYTES + _BYTES_OF_NAME * self._most

    def _read(self, path: Path) -> dict[str, Header]:
        """Return the header of a file, whose size is looked at before it is parsed."""
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
        return {name: (path, tuple(each["shape"]), each["dtype"]) for name, each in listed.items()}

    def _too_many(self, path: Path) -> UserError:
        return UserError(
            f"model.hf: {path} lists more than {self._most} tensors, or in more than {self._most_bytes} "
            "bytes, which no model of this config.json has; give another copy of the model"
        )


class SafetensorsFiles:
    """Tensors of safetensors files, whose headers were read (`TensorStore`)."""

    def __init__(self, headers: Mapping[str, Header]) -> None:
        self.headers = headers
        self._opened: tuple[Path, Any] | None = None

    def read(self, name: str) -> Tensor:
        """Return a whole tensor on the CPU."""
        path = self.headers[name][0]
        if self._opened is None or self._opened[0] != path:  # each opening parses the header
            self._opened = path, safe_open(path, framework="pt")
        tensor: Tensor = self._opened[1].get_tensor(name)
        return tensor


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
