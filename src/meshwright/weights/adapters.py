"""A run's adapters of low rank (`spec/lora.py`), read from a checkpoint and merged into the weights.

A merged weight is W + scale B A, with rows of the lengths that magnitudes say; computed in at least fp32.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from meshwright.checkpoint.save_plan import local_chunks, narrow
from meshwright.checkpoint.weights import Parts, Wanted, WeightPart, read_rectangle, whole
from meshwright.model.lora import merged
from meshwright.parallel.flat_param import Stored
from meshwright.spec import RunSpec
from meshwright.spec.parameter_groups import adapters_beside
from meshwright.spec.parameters import Parameter
from meshwright.spec.sharded_tensor import Rectangle

Beside = Sequence[Parameter]
"""The adapters of one weight: A, B, and with DoRA its magnitudes."""


def adapter_shapes(spec: RunSpec) -> dict[str, tuple[int, ...]]:
    """Shapes of a run's adapters by name."""
    return {each.name: each.shape for beside in adapters_beside(spec).values() for each in beside}


def merge_adapters(
    spec: RunSpec, weights: Mapping[str, Tensor | Stored], adapters: Mapping[str, Tensor]
) -> None:
    """Merge whole adapters into what this rank holds of the weights beside them, in place, but for
    `parts_of_rows`."""
    apart = parts_of_rows(spec, weights)
    for name, beside in adapters_beside(spec).items():
        if name in weights and name not in apart:
            for chunk in local_chunks(name, weights[name]):
                chunk.local.copy_(_merged(spec, beside, chunk.rectangle, chunk.local, adapters))


def parts_of_rows(spec: RunSpec, weights: Mapping[str, Tensor | Stored]) -> dict[str, Tensor | Stored]:
    """The weights of which this rank holds parts of rows that are scaled as wholes."""
    return {
        name: weights[name]
        for name, beside in adapters_beside(spec).items()
        if name in weights
        for chunk in local_chunks(name, weights[name])
        if rectangle_read(beside, chunk.rectangle) != chunk.rectangle
    }


def merged_parts(spec: RunSpec, stored: Parts, wanted: Wanted) -> Iterator[WeightPart]:
    """Yield parts that together cover the wanted rectangles of weights, with the adapters merged into them.

    `stored` reads the weights and the adapters. Of those that have adapters one rectangle is in memory.
    """
    adapted = adapters_beside(spec)
    yield from stored({name: listed for name, listed in wanted.items() if name not in adapted})
    for name in (each for each in wanted if each in adapted):
        beside = adapted[name]
        held = {each.name: read_rectangle(stored, each.name, whole(each.shape)) for each in beside}
        for rectangle in wanted[name]:
            read = rectangle_read(beside, rectangle)
            weight = read_rectangle(stored, name, read)
            value = _merged(spec, beside, read, weight, held)
            yield WeightPart(name, rectangle, narrow(value, rectangle, read[0]))


def rectangle_read(beside: Beside, rectangle: Rectangle) -> Rectangle:
    """The rectangle of a weight that is read to merge its adapters into one: whole rows, where magnitudes say
    how long they are."""
    if len(beside) < 3:
        return rectangle
    (row, _), (rows, _) = rectangle
    return (row, 0), (rows, beside[0].shape[-1])


def _merged(
    spec: RunSpec, beside: Beside, rectangle: Rectangle, weight: Tensor, adapters: Mapping[str, Tensor]
) -> Tensor:
    """A rectangle of a weight with its adapters, in fp32 or in float64."""
    assert spec.lora is not None
    *experts, rows, columns = (slice(first, first + size) for first, size in zip(*rectangle, strict=True))
    a, b, *magnitudes = (adapters[each.name].to(weight.device) for each in beside)
    wide = weight.to(torch.promote_types(weight.dtype, torch.float32))
    lengths = magnitudes[0][rows] if magnitudes else None
    part_a, part_b = a[(*experts, slice(None), columns)], b[(*experts, rows)]
    return merged(wide, part_a, part_b, spec.lora.scale, lengths)
