"""Geometry of rectangles of a tensor, each given as (offsets, sizes)."""

from __future__ import annotations

import math
from bisect import bisect_right, insort
from collections.abc import Sequence

from meshwright.spec.sharded_tensor import Rectangle


def check_within(name: str, rectangle: Rectangle, shape: Sequence[int]) -> None:
    """Raise ValueError unless a rectangle, which errors call `name`, is not empty and lies within a shape."""
    if any(len(numbers) != len(shape) for numbers in rectangle):
        raise ValueError(f"{name} has {len(rectangle[0])} dims, but the tensor has {len(shape)}")
    for offset, size, length in zip(*rectangle, shape, strict=True):
        if size < 1 or offset + size > length:
            raise ValueError(f"{name} lies outside its shape {tuple(shape)}")


def hull(rectangles: Sequence[Rectangle]) -> Rectangle:
    """Return the smallest rectangle around all."""
    first = tuple(map(min, zip(*(offsets for offsets, _ in rectangles), strict=True)))
    ends = ([o + s for o, s in zip(*rectangle, strict=True)] for rectangle in rectangles)
    end = map(max, zip(*ends, strict=True))
    return first, tuple(e - f for e, f in zip(end, first, strict=True))


def common(left: Rectangle, right: Rectangle) -> Rectangle | None:
    """Return the intersection of two rectangles; None if it is empty."""
    offsets, sizes = [], []
    for first, size, other, length in zip(*left, *right, strict=True):
        start = max(first, other)
        end = min(first + size, other + length)
        if end <= start:
            return None
        offsets.append(start)
        sizes.append(end - start)
    return tuple(offsets), tuple(sizes)


def check_cover(name: str, shape: Sequence[int], rectangles: Sequence[Rectangle]) -> None:
    """Raise ValueError unless the rectangles, all within the shape, fill it and share no element."""
    volume = sum(math.prod(sizes) for _, sizes in rectangles)
    if volume != math.prod(shape) or _overlapping(rectangles):
        raise ValueError(f"the pieces of {name} do not cover its shape {tuple(shape)} exactly once")


def _overlapping(rectangles: Sequence[Rectangle]) -> bool:
    """Return True if two of the rectangles share an element."""
    if len(rectangles) < 2:
        return False
    dims = range(len(rectangles[0][0]))
    # Sweep along the dim where most starts differ, so that few rectangles are open at once.
    sweep = max(dims, key=lambda dim: len({offsets[dim] for offsets, _ in rectangles}), default=None)
    if sweep is None:
        return True  # a scalar can be covered by one piece only
    open_: list[tuple[int, int]] = []
    for index in sorted(range(len(rectangles)), key=lambda index: rectangles[index][0][sweep]):
        offsets, sizes = rectangles[index]
        del open_[: bisect_right(open_, (offsets[sweep], len(rectangles)))]
        if any(common(rectangles[index], rectangles[other]) for _, other in open_):
            return True
        insort(open_, (offsets[sweep] + sizes[sweep], index))
    return False
