"""The safetensors files of an HF folder: which there are, what their headers list, and under which names."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable
from itertools import islice
from pathlib import Path

from safetensors import SafetensorError, safe_open

from meshwright.exchange.hf_quantised import Header
from meshwright.exchange.hf_state_dict import hf_tensors
from meshwright.spec import ModelSpec, UserError
from meshwright.spec.files import parse_json
from meshwright.spec.hf.config_read import other_weights
from meshwright.spec.hf.families import FAMILIES
from meshwright.spec.hf.json_object import read_json_object
from meshwright.spec.hf.special_tokens import check_within

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
MOST_TENSORS = 2**17
"""Most tensors of a model whose headers are read; the largest published ones have 10^5, in 10^2 files."""
_TENSORS_FOR_ONE = 4
"""Most tensors of files that stand for one of the model's: codes, scales and shapes of quantised ones."""
_EXTRA_TENSORS, _EXTRA_BYTES, _BYTES_OF_NAME = 10**4, 2**20, 256
"""Tensors besides those, bytes of metadata, and bytes of a tensor in a header or an index."""
_WRAPPERS = re.compile(r"(?:^(?:_orig_mod|module)\.)+|(?<=\.)_orig_mod\.")
"""Names that torch.compile and DistributedDataParallel put into those of a module's parameters."""


class TensorFiles:
    """{tensor name: header} of an HF folder, `headers`, by the names of a causal model of its family.

    Files may have them under others: with those of torch.compile or of data parallelism in front, or, saved
    from a base model, without its own prefix. `stored` has the name in the file. Raises `UserError` for files
    that are missing, links out of the folder, or not safetensors, and for more tensors than `spec` can have.
    """

    def __init__(self, folder: Path, spec: ModelSpec) -> None:
        self._folder = folder
        expected = sum(1 for _ in islice(hf_tensors(spec), MOST_TENSORS))
        self._most = _TENSORS_FOR_ONE * expected + _EXTRA_TENSORS
        found: dict[str, Header] = {}
        paths = self._paths()
        if self._has_adapter:
            warnings.warn(
                f"model.hf: {folder} holds an adapter of PEFT beside the model's weights, which is not "
                "applied; merge it into its base model (merge_and_unload) first if its weights are meant",
                stacklevel=2,
            )
        for path in paths:
            found |= self._read(path)
            if len(found) > self._most:
                raise self._too_many(path)
        names = _causal_names(found, spec)
        if len(set(names.values())) < len(names):
            names = {name: name for name in found}
        self.stored = {causal: name for name, causal in names.items()}
        self.headers = {causal: found[name] for name, causal in names.items()}

    def _paths(self) -> list[Path]:
        single, index = self._folder / WEIGHTS, self._folder / INDEX
        if single.is_file():
            check_within(single, self._folder, "model.hf")
            return [single]
        if not index.is_file():
            raise UserError(f"model.hf: {self._folder} has neither {WEIGHTS} nor {INDEX}; {self._remedy()}")
        check_within(index, self._folder, "model.hf")
        if index.stat().st_size > self._most_bytes:
            raise self._too_many(index)
        weight_map = read_json_object(index, "model.hf").get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
            raise UserError(f"model.hf: {index} has no weight_map from tensors to files")
        names = sorted(set(weight_map.values()))
        for name in names:
            if Path(name).name != name:
                raise UserError(f"model.hf: {index} names the file {name!r}, which is outside of its folder")
            if not (self._folder / name).is_file():
                raise UserError(
                    f"model.hf: {index} names the file {name}, which is not in {self._folder}; copy all "
                    f"{len(names)} files of the model there"
                )
            check_within(self._folder / name, self._folder, "model.hf")
        return [self._folder / name for name in names]

    @property
    def _has_adapter(self) -> bool:
        return (self._folder / "adapter_config.json").is_file() or any(self._folder.glob("adapter_model.*"))

    def _remedy(self) -> str:
        """Return what to do about a folder without safetensors, by what it has."""
        folder = self._folder
        if self._has_adapter:
            return (
                "it holds an adapter of PEFT: merge it into its base model (merge_and_unload) and save that"
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
