"""Weights with another number of rows for the vocabulary: new tokens start as the mean of the others.

The mean keeps the new tokens' logits at the level of the others, so that the loss on old text barely moves
(Hewitt 2021, "Initializing new word embeddings for pretrained language models"). transformers draws new rows
from a normal distribution around it instead, whose covariance is 1e-9 of the old rows'.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from meshwright.checkpoint.rectangles import common
from meshwright.checkpoint.save_plan import narrow
from meshwright.checkpoint.weights import ReadBytes, Wanted, WeightPart, Weights, whole
from meshwright.exchange.stored_weights import tensor_shapes
from meshwright.spec import ModelSpec
from meshwright.spec.sharded_tensor import Rectangle


class ResizedWeights:
    """The weights of a model with more or fewer rows of embedding and head (`Weights`)."""

    def __init__(self, weights: Weights, stored: ModelSpec, model: ModelSpec) -> None:
        self._weights = weights
        shapes = tensor_shapes(model)
        self._resized = {
            name: shape for name, shape in tensor_shapes(stored).items() if shape != shapes.get(name, shape)
        }
        """Shape in the files of each parameter that has other rows here."""

    @property
    def exact(self) -> bool:
        """True if weights are in float64."""
        return self._weights.exact

    def parts(self, wanted: Wanted) -> Iterator[WeightPart]:
        """Yield parts that together cover the wanted rectangles; new rows are the mean of the old ones."""
        old, new = self._old_and_new(wanted)
        yield from self._weights.parts(old)
        for name, rectangles in new.items():
            mean = self._mean(name)
            for offsets, sizes in rectangles:
                columns = narrow(mean, (offsets[1:], sizes[1:]))
                yield WeightPart(name, (offsets, sizes), columns.expand(sizes))

    def reading(self, wanted: Wanted) -> ReadBytes:
        """Return what `parts` of these would take: for new rows all of the old ones are read."""
        old, new = self._old_and_new(wanted)
        means = {name: [whole(self._resized[name])] for name in new}
        return self._weights.reading(old).then(self._weights.reading(means))

    def _old_and_new(self, wanted: Wanted) -> tuple[dict[str, list[Rectangle]], dict[str, list[Rectangle]]]:
        """Return what of wanted rectangles the files have, and what are new rows."""
        old: dict[str, list[Rectangle]] = {}
        new: dict[str, list[Rectangle]] = {}
        for name, rectangles in wanted.items():
            rows = self._resized[name][0] if name in self._resized else None
            for rectangle in rectangles:
                kept, added = (rectangle, None) if rows is None else _divided(rectangle, rows)
                for found, listed in ((kept, old), (added, new)):
                    if found is not None:
                        listed.setdefault(name, []).append(found)
        return old, new

    def _mean(self, name: str) -> Tensor:
        """Return the mean of the rows in the files, in float64."""
        shape = self._resized[name]
        total = torch.zeros(shape[1:], dtype=torch.float64)
        for part in self._weights.parts({name: [whole(shape)]}):
            offsets, sizes = part.rectangle
            narrow(total, (offsets[1:], sizes[1:])).add_(part.value.sum(0, dtype=torch.float64))
            del part  # before the next one is read
        return total / shape[0]


def _divided(rectangle: Rectangle, rows: int) -> tuple[Rectangle | None, Rectangle | None]:
    """Return the parts of a rectangle within the first `rows` rows, and beyond them."""
    (first, *others), (count, *sizes) = rectangle
    end = first + count
    before = common(rectangle, ((0, *others), (rows, *sizes)))
    beyond = max(first, rows)
    after = ((beyond, *others), (end - beyond, *sizes)) if end > beyond else None
    return before, after
