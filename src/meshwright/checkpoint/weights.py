"""Weights of a trained model, read one parameter at a time into tensors of any layout."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Protocol

import torch
from torch import Tensor

from meshwright.checkpoint.save_plan import Tensors, local_chunks, narrow


class Weights(Protocol):
    """Parameters and routers' biases of a trained model by the decoder's names, out of a folder."""

    @property
    def exact(self) -> bool:
        """True if weights are in float64."""
        ...

    def take(self, names: Collection[str]) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, whole value on the CPU) of these, each once. Raises `UserError` for damage."""
        ...


def fill(tensors: Tensors, weights: Weights) -> None:
    """Copy into each tensor its part of the value of its name, converted to its dtype.

    Only what this rank has a part of is read, and one parameter of it is in memory at a time. Local: no
    message is sent.
    """
    held = {name: local_chunks(name, tensor) for name, tensor in tensors.items()}
    with torch.no_grad():
        for name, value in weights.take({name for name, chunks in held.items() if chunks}):
            for chunk in held[name]:
                chunk.local.copy_(narrow(value, chunk.rectangle))
