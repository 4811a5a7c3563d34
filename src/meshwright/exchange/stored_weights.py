"""A decoder's parameters out of stored tensors: which of them make which, checked and read part by part."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from meshwright.checkpoint.rectangles import common
from meshwright.checkpoint.save_plan import narrow
from meshwright.checkpoint.weights import ReadBytes, Wanted, WeightPart
from meshwright.exchange.hf_state_dict import HfTensor, Shapes
from meshwright.exchange.tensor_store import DTYPES_BY_NAME, TensorStore
from meshwright.spec import ModelSpec, UserError
from meshwright.spec.parameters import parameters
from meshwright.spec.sharded_tensor import Rectangle

DTYPES = ("F64", "F32", "F16", "BF16")
"""Number formats of weights that are read, by their names in safetensors files."""


class _Asked(NamedTuple):
    """A rectangle of a parameter that is wanted of a tensor of a file."""

    number: int
    """Which of the tensor's parameters it is of."""
    rectangle: Rectangle
    around: Rectangle
    """The whole heads that it lies in, where their channels are in another order."""
    place: Rectangle
    """Where these are in the tensor."""


class StoredWeights:
    """The tensors of a store under the decoder's names, read part by part (`Weights`).

    Opening checks, from the headers, that no tensor of the `pieces` is missing, that every shape is the one
    that `spec` asks for, every dtype a floating-point one, and that the store has no other tensors but those
    that `is_redundant` knows; reading checks that every value is finite. All raise `UserError`, which starts
    with `where` and has the tensor's name.
    """

    def __init__(self, where: str, spec: ModelSpec, store: TensorStore, pieces: Iterable[HfTensor]) -> None:
        self._where, self._spec, self._store = where, spec, store
        self._shapes = tensor_shapes(spec)
        self._pieces: list[HfTensor] = []
        self._check(pieces)

    @property
    def exact(self) -> bool:
        """True if a weight is in float64."""
        return any(self._store.headers[piece.hf][2] == "F64" for piece in self._pieces if not piece.exact)

    @property
    def dtype(self) -> torch.dtype | None:
        """The format of all weights that are not fp32 in any file; None where they have several."""
        names = {self._store.headers[piece.hf][2] for piece in self._pieces if not piece.exact}
        return DTYPES_BY_NAME[names.pop()] if len(names) == 1 else None

    @property
    def all_exact(self) -> bool:
        """True if all weights are in float64, but for tensors that are fp32 whatever the weights are."""
        return all(piece.exact or self._store.headers[piece.hf][2] == "F64" for piece in self._pieces)

    def rounded_inputs(self) -> list[str]:
        """The parameters whose layers round their inputs, too, by the recipe of quantised weights."""
        return []

    def parts(self, wanted: Wanted) -> Iterator[WeightPart]:
        """Yield the wanted rectangles of parameters in the dtype of the file, in the order of its tensors.

        Of experts, which are tensors of their own in files, each is a part. Tensors that have none of them
        are not read.
        """
        for piece in self._pieces:
            asked = list(self._asked(piece, wanted))
            values = self._store.parts(piece.hf, [each.place for each in asked]) if asked else iter(())
            for number, rectangle, around, place in asked:
                value = next(values)
                self._check_finite(piece, value)
                self._check_value(piece, place, value)
                found = narrow(piece.part(number, value, self._shapes), rectangle, around[0])
                yield WeightPart(piece.parameters[number], rectangle, found)
                del value, found  # before the next one is read

    def reading(self, wanted: Wanted) -> ReadBytes:
        """Return what `parts` of these would take, without reading them."""
        found = ReadBytes()
        for piece in self._pieces:
            if places := [each.place for each in self._asked(piece, wanted)]:
                found = found.then(self._store.reading(piece.hf, places))
        return found

    def _asked(self, piece: HfTensor, wanted: Wanted) -> Iterator[_Asked]:
        """Yield what is wanted of a piece."""
        for number, name in enumerate(piece.parameters):
            if name in wanted:
                own = piece.rectangle(number, self._shapes)
                for rectangle in wanted[name]:
                    if (shared := common(rectangle, own)) is not None:
                        around = piece.whole_heads(number, shared, self._shapes)
                        yield _Asked(number, shared, around, piece.place(number, around, self._shapes))

    def _check_finite(self, piece: HfTensor, value: Tensor) -> None:
        # The least and the greatest are NaN if any number is, and take no memory, as a mask would.
        if not all(map(torch.isfinite, torch.aminmax(value))):
            raise UserError(
                f"{self._where}: the tensor {piece.hf} has values that are not finite; give another copy "
                "of the model"
            )

    def is_redundant(self, name: str) -> bool:
        """Return True for a tensor of the store that is no weight of the decoder."""
        return False

    def why_lacking(self, name: str) -> str:
        """Return the cause and the remedy of a tensor that the store lacks, or ''."""
        return ""

    def _check_value(self, piece: HfTensor, place: Rectangle, value: Tensor) -> None:
        """Raise `UserError` if a rectangle that was read of a tensor contradicts another tensor."""

    def _check(self, expected: Iterable[HfTensor]) -> None:
        """Note the pieces one by one: a config.json that asks for more than there is ends at the first."""

        def wanted() -> Iterator[tuple[str, tuple[int, ...]]]:
            for piece in expected:
                self._pieces.append(piece)
                yield piece.hf, piece.shape(self._shapes)

        headers = self._store.headers
        shapes = {name: shape for name, (_, shape, _) in headers.items()}
        check_tensors(self._where, wanted(), shapes, self.is_redundant, self.why_lacking)
        for piece in self._pieces:
            dtype = headers[piece.hf][2]
            if dtype not in DTYPES:
                raise UserError(
                    f"{self._where}: the tensor {piece.hf} is in {dtype}; convert it to one of "
                    f"{', '.join(DTYPES)} first"
                )


def tensor_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Return the shapes of `Decoder.tensors()`, without a decoder: a config.json may ask for any size."""
    shapes = {each.name: each.shape for unit in parameters(spec).values() for each in unit}
    if spec.moe is not None and spec.moe.bias:
        biased = filter(spec.has_experts, (*range(spec.layers), *spec.mtp_layers))
        shapes |= {f"blocks.{layer}.mlp.router.bias": (spec.moe.experts,) for layer in biased}
    return shapes


def check_tensors(
    where: str,
    wanted: Iterable[tuple[str, Sequence[int]]],
    shapes: Shapes,
    is_redundant: Callable[[str], bool] = lambda _: False,
    why_lacking: Callable[[str], str] = lambda _: "",
) -> None:
    """Raise `UserError`, which starts with `where`, unless the shapes are those of the model's tensors.

    `wanted` gives the model's names and shapes; it is read no further than to the first that is missing.
    """
    known = set()
    for name, shape in wanted:
        known.add(name)
        if name not in shapes:
            why = why_lacking(name)
            raise UserError(f"{where} lacks the tensor {name}, which this model has{why}")
        if tuple(shapes[name]) != tuple(shape):
            raise UserError(
                f"{where}: the tensor {name} has shape {list(shapes[name])}, but this model has {list(shape)}"
            )
    for name in shapes:
        if name not in known and not is_redundant(name):
            raise UserError(f"{where} has a tensor {name}, which this model does not have")
