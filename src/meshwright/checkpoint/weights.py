"""Weights of a trained model, read part by part into tensors of any layout."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from meshwright.checkpoint.rectangles import common
from meshwright.checkpoint.save_plan import LocalShard, Tensors, local_chunks, narrow
from meshwright.spec import UserError
from meshwright.spec.sharded_tensor import Rectangle

Wanted = Mapping[str, Sequence[Rectangle]]
"""Rectangles of parameters by name, which share no element."""


class WeightPart(NamedTuple):
    """A rectangle of a parameter with its value, on the CPU."""

    name: str
    rectangle: Rectangle
    value: Tensor


Parts = Callable[[Wanted], Iterator[WeightPart]]
"""Yields stored parts of wanted rectangles, as `WeightParts.parts` does."""


class ReadBytes(NamedTuple):
    """The cost of reading weights: bytes of files in all, and the most of them in memory at a time."""

    bytes: int = 0
    at_a_time: int = 0

    def then(self, other: ReadBytes) -> ReadBytes:
        """Return what one after the other takes."""
        return ReadBytes(self.bytes + other.bytes, max(self.at_a_time, other.at_a_time))


class WeightParts(Protocol):
    """Parameters and routers' biases of a model by the decoder's names, which come part by part."""

    def parts(self, wanted: Wanted) -> Iterator[WeightPart]:
        """Yield parts that together cover the wanted rectangles, one at a time.

        Raises `UserError` for damage. Of files no more is read than the format requires, and memory holds one
        tensor of them at most.
        """
        ...


class Weights(WeightParts, Protocol):
    """Those of a trained model, out of a folder."""

    @property
    def exact(self) -> bool:
        """True if weights are in float64."""
        ...

    def reading(self, wanted: Wanted) -> ReadBytes:
        """Return what `parts` of these would take, without reading them."""
        ...


def fill(tensors: Tensors, weights: WeightParts) -> None:
    """Copy into each tensor its part of the value of its name, converted to its dtype.

    Only what this rank has a part of is read. Local: no message is sent. Raises `UserError` for damage, and
    where the weights do not fill a tensor.
    """
    held = _held(tensors)
    filled: Counter[str] = Counter()
    with torch.no_grad():
        for part in weights.parts({name: [each.rectangle for each in held[name]] for name in held}):
            for chunk in held[part.name]:
                shared = common(part.rectangle, chunk.rectangle)
                if shared is not None:
                    value = narrow(part.value, shared, part.rectangle[0])
                    narrow(chunk.local, shared, chunk.offset).copy_(value)
                    filled[part.name] += math.prod(shared[1])
                    del value
            del part  # before the next one is read
    for name, chunks in held.items():
        if filled[name] != (wanted := sum(chunk.local.numel() for chunk in chunks)):
            raise UserError(
                f"the weights have {filled[name]} of the {wanted} numbers that a rank needs of the parameter "
                f"{name}; give another copy of the model"
            )


def read_rectangle(parts: Parts, name: str, rectangle: Rectangle) -> Tensor:
    """Return a rectangle of a tensor, of the parts that overlap it, in the format that these have."""
    found: Tensor | None = None
    for part in parts({name: [rectangle]}):
        if found is None:
            found = torch.empty(rectangle[1], dtype=part.value.dtype)
        if (shared := common(part.rectangle, rectangle)) is not None:
            narrow(found, shared, rectangle[0]).copy_(narrow(part.value, shared, part.rectangle[0]))
        del part
    assert found is not None
    return found


def held_rectangles(tensors: Tensors) -> dict[str, list[Rectangle]]:
    """Return the rectangles of tensors that this rank holds, which `fill` would read."""
    return {name: [chunk.rectangle for chunk in chunks] for name, chunks in _held(tensors).items()}


def _held(tensors: Tensors) -> dict[str, list[LocalShard]]:
    return {name: chunks for name, tensor in tensors.items() if (chunks := local_chunks(name, tensor))}


def whole(shape: Sequence[int]) -> Rectangle:
    """Return the rectangle that is all of a tensor."""
    return (0,) * len(shape), tuple(shape)


def whole_part(name: str, value: Tensor) -> WeightPart:
    """Return a parameter as one part."""
    return WeightPart(name, whole(value.shape), value)
