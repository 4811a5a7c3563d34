"""Where the tensors of a model that is written come from: memory, or a checkpoint that is read bit by bit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from meshwright.checkpoint.weights import Weights, fill


class ParameterSource(Protocol):
    """Parameters and routers' biases of a model by the decoder's names, each read when it is asked for."""

    @property
    def shapes(self) -> Mapping[str, Sequence[int]]:
        """The shape of each."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """The format of the embedding, which all parameters have."""
        ...

    def __getitem__(self, name: str, /) -> Tensor:
        """Return one of them. Raises `UserError` for damage."""
        ...


class HeldParameters:
    """Tensors in memory, such as `Decoder.tensors()`, as a source."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors
        self.shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}

    @property
    def dtype(self) -> torch.dtype:
        """The format of the embedding."""
        return self._tensors["embed.weight"].dtype

    def __getitem__(self, name: str, /) -> Tensor:
        """Return a tensor, without its gradient."""
        return self._tensors[name].detach()


class ReadParameters:
    """The weights of files as a source, each parameter whole and in `dtype`."""

    def __init__(
        self, weights: Weights, shapes: Mapping[str, Sequence[int]], dtype: torch.dtype = torch.float32
    ) -> None:
        self._weights, self.shapes, self.dtype = weights, shapes, dtype

    def __getitem__(self, name: str, /) -> Tensor:
        """Read a parameter or a router's bias. Raises `UserError` for damage."""
        value = torch.empty(tuple(self.shapes[name]), dtype=self.dtype)
        fill({name: value}, self._weights)
        return value


class LastRead:
    """A source of which the parameter that was read last stays in memory.

    A layer's experts are one parameter here and many tensors of a file, which follow each other.
    """

    def __init__(self, source: ParameterSource) -> None:
        self._source, self._name = source, ""
        self._value = torch.empty(0)
        self.shapes, self.dtype = source.shapes, source.dtype

    def __getitem__(self, name: str, /) -> Tensor:
        """Return a parameter, which is read again only after another one."""
        if name != self._name:
            self._name, self._value = "", torch.empty(0)  # gone before the next one is there
            self._name, self._value = name, self._source[name]
        return self._value


class ShapesAlone:
    """A source of tensors on the meta device: what is made of them takes no memory."""

    def __init__(self, shapes: Mapping[str, Sequence[int]], dtype: torch.dtype) -> None:
        self.shapes, self.dtype = shapes, dtype

    def __getitem__(self, name: str, /) -> Tensor:
        """Return a tensor of this shape without values."""
        return torch.empty(tuple(self.shapes[name]), dtype=self.dtype, device="meta")
