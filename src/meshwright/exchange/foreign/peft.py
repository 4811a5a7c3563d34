"""PEFT's LoRA adapters, merged onto their base model as its tensors are read.

A weight W (out, in) becomes W + s B A with A (r, in), B (out, r) and s = alpha / r, or alpha / sqrt(r) with
rsLoRA. DoRA scales each row of that to the norm that it has trained. Sources: LoRA (Hu et al., 2021), rsLoRA
(Kalajdzievski, 2023), DoRA (Liu et al., 2024); names and files of PEFT 0.21.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from meshwright.checkpoint.weights import ReadBytes
from meshwright.exchange.foreign.caller import Caller
from meshwright.exchange.tensor_store import Header, TensorStore, WholeTensors, bytes_of, dtype_name
from meshwright.exchange.torch_files import TorchFiles
from meshwright.spec import UserError
from meshwright.spec.hf.json_object import read_json_object
from meshwright.spec.lora_source import CONFIG, PREFIX, WEIGHTS
from meshwright.spec.sharded_tensor import Rectangle

_BIN = "adapter_model.bin"
_PARTS = {
    ".lora_A.weight": "A", ".lora_B.weight": "B", ".lora_magnitude_vector": "magnitude",
    ".lora_magnitude_vector.weight": "magnitude", ".lora_embedding_A": "embedding_A",
    ".lora_embedding_B": "embedding_B",
}  # fmt: skip
"""End of an adapter's tensor -> its part of a module."""


class _Factors(NamedTuple):
    """A change of a weight: B A times `scale`, transposed where the weight is, and DoRA's norms of rows."""

    a: Tensor
    b: Tensor
    scale: float
    transposed: bool
    magnitude: Tensor | None

    def merge(self, weight: Tensor) -> Tensor:
        """Return the weight with the adapter, in fp32 or in float64."""
        exact = torch.float64 if weight.dtype is torch.float64 else torch.float32
        change = (self.b.to(exact) @ self.a.to(exact)) * self.scale
        merged = weight.to(exact) + (change.T if self.transposed else change)
        if self.magnitude is None:
            return merged
        rows = merged.T if self.transposed else merged
        rows = rows * (self.magnitude.to(exact).flatten() / rows.norm(dim=1)).unsqueeze(1)
        return rows.T if self.transposed else rows


class AdapterStore(WholeTensors):
    """The tensors of a base model with an adapter merged onto them (`TensorStore`).

    Errors start with the key of `caller`. Raises `UserError` for adapters other than LoRA, for tensors that
    the base model has no weights for, and for files that are damaged.
    """

    def __init__(self, folder: Path, base: TensorStore, caller: Caller) -> None:
        self._folder, self._base, self._key = folder, base, caller.key
        self._config = adapter_config(folder, caller.key)
        parts: dict[str, dict[str, Tensor]] = {}
        self._whole: dict[str, Tensor] = {}
        for name, tensor in adapter_tensors(folder, self._wrong, caller.key).items():
            self._sort(name.removeprefix(PREFIX), tensor, parts)
        self._factors = {f"{module}.weight": self._read_factors(module, parts[module]) for module in parts}
        self.headers: dict[str, Header] = {**base.headers}
        for name in (*self._factors, *self._whole):
            if name not in base.headers:
                raise self._wrong(
                    f"changes {name}, which its base model does not have; give another {caller.base}"
                )
        for name, tensor in self._whole.items():
            self.headers[name] = folder, tuple(tensor.shape), dtype_name(tensor.dtype)
        for name, factors in self._factors.items():
            rows, columns = factors.b.shape[0], factors.a.shape[1]
            shape = (columns, rows) if factors.transposed else (rows, columns)
            place, stored, dtype = self.headers[name]
            if shape != stored:
                raise self._wrong(
                    f"changes {name} of shape {list(shape)}, but its base model has {list(stored)}; give "
                    f"another {caller.base}"
                )
            self.headers[name] = place, stored, "F64" if dtype == "F64" else "F32"

    def read(self, name: str) -> Tensor:
        """Return a whole tensor on the CPU. Raises `UserError` for damage."""
        value = self._whole[name] if name in self._whole else self._base.read(name)
        return self._factors[name].merge(value) if name in self._factors else value

    def parts(self, name: str, rectangles: Sequence[Rectangle]) -> Iterator[Tensor]:
        """Yield the values of rectangles of a tensor, in their order."""
        if name in self._whole or name in self._factors:
            return super().parts(name, rectangles)
        return self._base.parts(name, rectangles)

    def reading(self, name: str, rectangles: Sequence[Rectangle]) -> ReadBytes:
        """Return what `parts` of these would take, without reading them; the adapter has been read."""
        if name in self._whole:
            return ReadBytes()
        if name in self._factors:
            size = bytes_of(self._base.headers[name])
            return ReadBytes(size, bytes_of(self.headers[name])) if rectangles else ReadBytes()
        return self._base.reading(name, rectangles)

    def _sort(self, name: str, tensor: Tensor, parts: dict[str, dict[str, Tensor]]) -> None:
        """Note a tensor as a part of a module's change, or as one that replaces the base model's."""
        for end, part in _PARTS.items():
            if name.endswith(end):
                parts.setdefault(name.removesuffix(end), {})[part] = tensor
                return
        whole = name.replace(".modules_to_save.", ".").replace(".base_layer.", ".")
        if "lora" in whole or not whole.endswith((".weight", ".bias")):
            raise self._wrong(f"has a tensor {name}, which is not of a kind that is merged")
        self._whole[whole] = tensor

    def _read_factors(self, module: str, parts: dict[str, Tensor]) -> _Factors:
        kind = parts.keys() - {"magnitude"}
        if kind not in ({"A", "B"}, {"embedding_A", "embedding_B"}):
            raise self._wrong(f"lacks a part of the change of {module}; copy the whole adapter")
        a, b = (parts[name] for name in sorted(kind))
        if a.dim() != 2 or b.dim() != 2 or a.shape[0] != b.shape[1]:
            raise self._wrong(f"has parts of {module} that do not fit together; copy the whole adapter")
        if "embedding_A" in kind and "magnitude" in parts:
            raise self._wrong(
                f"changes the embedding {module} by DoRA, which is not merged; merge it by PEFT"
            )
        transposed = "embedding_A" in kind or bool(self._config.get("fan_in_fan_out"))
        return _Factors(a, b, self._scale(module, a.shape[0]), transposed, parts.get("magnitude"))

    def _scale(self, module: str, rank: int) -> float:
        return scale_of(self._config, module, rank, self._wrong)

    def _wrong(self, what: str) -> UserError:
        return UserError(f"{self._key}: {self._folder} {what}")


def adapter_tensors(folder: Path, wrong: Callable[[str], UserError], key: str) -> dict[str, Tensor]:
    """Return the tensors of an adapter's folder by name; `wrong` makes the errors."""
    safe, pickled = folder / WEIGHTS, folder / _BIN
    try:
        if safe.is_file():
            return load_file(safe)
    except (SafetensorError, OSError) as error:
        raise wrong(f"has a {WEIGHTS} that cannot be read ({error}); copy it again") from error
    if not pickled.is_file():
        raise wrong(f"has neither {WEIGHTS} nor {_BIN}; copy the whole adapter")
    files = TorchFiles([pickled], key)
    return {name: files.read(name) for name in files.headers}


def scale_of(config: Mapping[str, Any], module: str, rank: int, wrong: Callable[[str], UserError]) -> float:
    """Return the factor on B A x of a module with an adapter of this rank; `wrong` makes the errors."""
    alpha = config.get("lora_alpha", 8)
    try:
        for pattern, value in (config.get("alpha_pattern") or {}).items():
            if re.match(rf"(.*\.)?({pattern})$", module):
                alpha = value
    except (re.error, AttributeError) as error:
        raise wrong(f"has an alpha_pattern that cannot be read ({error})") from error
    if isinstance(alpha, bool) or not isinstance(alpha, (int, float)):
        raise wrong(f"has lora_alpha {alpha!r}, which is no number")
    return float(alpha / (math.sqrt(rank) if config.get("use_rslora") else rank))


def adapter_config(folder: Path, key: str) -> dict[str, Any]:
    """Return the adapter_config.json of a folder. Raises `UserError` for adapters that are not merged."""
    config = lora_config(folder, key)
    if config.get("target_parameters"):
        raise UserError(
            f"{key}: {folder / CONFIG} has target_parameters, adapters of stacked experts, which are not "
            "merged here; merge it by PEFT (merge_and_unload), and give that folder"
        )
    return config


def lora_config(folder: Path, key: str) -> dict[str, Any]:
    """Return the adapter_config.json of a folder. Raises `UserError` for adapters that are not LoRA's."""
    config = read_json_object(folder / CONFIG, key)
    if config.get("peft_type") != "LORA":
        raise UserError(
            f"{key}: {folder / CONFIG} has peft_type {config.get('peft_type')!r}, and LORA is merged "
            "here; merge it by PEFT (merge_and_unload), and give that folder"
        )
    for name in ("layer_replication", "megatron_config", "alora_invocation_tokens"):
        if config.get(name) is not None:
            raise UserError(
                f"{key}: {folder / CONFIG} has {name}, which changes more than weights; merge it by PEFT "
                "(merge_and_unload), and give that folder"
            )
    return config
