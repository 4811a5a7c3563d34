"""A run's adapters of low rank (`spec/lora.py`), read from a checkpoint and merged into the weights.

A merged weight is W + scale B A, summed in at least fp32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor

from meshwright.checkpoint.rectangles import common
from meshwright.checkpoint.save_plan import local_chunks, narrow
from meshwright.checkpoint.weights import Wanted, WeightPart, whole
from meshwright.model.lora import merged
from meshwright.parallel.flat_param import Stored
from meshwright.spec import RunSpec
from meshwright.spec.parameter_groups import adapters_beside
from meshwright.spec.sharded_tensor import Rectangle

Parts = Callable[[Wanted], Iterator[WeightPart]]
"""Yields the stored parts of wanted rectangles."""


def adapter_shapes(spec: RunSpec) -> dict[str, tuple[int, ...]]:
    """Shapes of a run's adapters by name."""
    return {each.name: each.shape for beside in adapters_beside(spec).values() for each in beside}


def merge_adapters(
    spec: RunSpec, weights: Mapping[str, Tensor | Stored], adapters: Mapping[str, Tensor]
) -> None:
    """Add whole adapters to what this rank holds of the weights beside them, in place."""
    for name in adapters_beside(spec):
        if name in weights:
            for chunk in local_chunks(name, weights[name]):
                chunk.local.copy_(_merged(spec, name, chunk.rectangle, chunk.local, adapters))


def merged_parts(spec: RunSpec, stored: Parts, wanted: Wanted) -> Iterator[WeightPart]:
    """Yield parts that together cover the wanted rectangles of weights, with the adapters merged into them.

    `stored` reads the weights and the adapters. Of those that have adapters one rectangle is in memory.
    """
    adapted = adapters_beside(spec)
    yield from stored({name: listed for name, listed in wanted.items() if name not in adapted})
    for name in (each for each in wanted if each in adapted):
        held = {each.name: _read(stored, each.name, whole(each.shape)) for each in adapted[name]}
        for rectangle in wanted[name]:
            weight = _read(stored, name, rectangle)
            yield WeightPart(name, rectangle, _merged(spec, name, rectangle, weight, held))


def _merged(
    spec: RunSpec, name: str, rectangle: Rectangle, weight: Tensor, adapters: Mapping[str, Tensor]
) -> Tensor:
    """A rectangle of a weight with its adapter, in fp32 or in float64."""
    assert spec.lora is not None
    *experts, rows, columns = (slice(first, first + size) for first, size in zip(*rectangle, strict=True))
    a, b = (adapters[each.name].to(weight.device) for each in adapters_beside(spec)[name])
    wide = weight.to(torch.promote_types(weight.dtype, torch.float32))
    return merged(wide, a[(*experts, slice(None), columns)], b[(*experts, rows)], spec.lora.scale)


def _read(stored: Parts, name: str, rectangle: Rectangle) -> Tensor:
    """A rectangle of a tensor, of the parts that overlap it."""
    found: Tensor | None = None
    for part in stored({name: [rectangle]}):
        if found is None:
            found = torch.empty(rectangle[1], dtype=part.value.dtype)
        if (shared := common(part.rectangle, rectangle)) is not None:
            narrow(found, shared, rectangle[0]).copy_(narrow(part.value, shared, part.rectangle[0]))
        del part
    assert found is not None
    return found
