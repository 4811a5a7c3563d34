"""Tensors in files of `torch.save`: pytorch_model.bin, lit_model.pth and what is nested in others' files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from meshwright.exchange.restricted_pickle import load_torch_file
from meshwright.exchange.tensor_store import Header, MappedTensors, header_of
from meshwright.spec import UserError

NESTED = ("model", "module", "state_dict", "model_state_dict")
"""Keys under which programs put a model's tensors beside the state of a training."""


class TorchFiles(MappedTensors):
    """The tensors of files, which are mapped into memory: what is not read takes none of it (`TensorStore`).

    Those of torch before 1.6 cannot be mapped, and are read whole.

    Errors start with `key`. Raises `UserError` for a file that is damaged, holds no tensors, or whose pickle
    names something to run.
    """

    def __init__(self, paths: Sequence[Path], key: str) -> None:
        self.headers: dict[str, Header] = {}
        self._tensors: dict[str, Tensor] = {}
        for path in paths:
            tensors = tensors_in(load_torch_file(path, key))
            if not tensors:
                raise UserError(f"{key}: {path} holds no tensors by name; give the file of a model's weights")
            self._tensors |= tensors
            self.headers |= {name: header_of(path, tensor) for name, tensor in tensors.items()}

    def read(self, name: str) -> Tensor:
        """Return a whole tensor on the CPU."""
        return self._tensors[name]


def tensors_in(content: Any) -> dict[str, Tensor]:
    """Return the tensors by name of what a file holds: its own, or those of a dict that it has nested."""
    while isinstance(content, dict):
        found = {str(name): value.detach() for name, value in content.items() if isinstance(value, Tensor)}
        if found:
            return found
        content = next((content[name] for name in NESTED if isinstance(content.get(name), dict)), None)
    return {}
