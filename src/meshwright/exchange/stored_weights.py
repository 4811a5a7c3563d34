"""A decoder's parameters out of stored tensors: which of them make which, checked and read one at a time."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

import torch
from torch import Tensor

from meshwright.exchange.hf_state_dict import HfTensor, Shapes
from meshwright.exchange.tensor_store import TensorStore
from meshwright.spec import ModelSpec, UserError
from meshwright.spec.parameters import parameters

DTYPES = ("F64", "F32", "F16", "BF16")
"""Number formats of weights that are read, by their names in safetensors files."""


class StoredWeights:
    """The tensors of a store under the decoder's names, read one at a time (`Weights`).

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

    def rounded_inputs(self) -> list[str]:
        """The parameters whose layers round their inputs, too, by the recipe of quantised weights."""
        return []

    def take(self, names: Collection[str]) -> Iterator[tuple[str, Tensor]]:
        """Yield (parameter, value) of these parameters, each once, in the dtype of the file.

        Tensors of files that hold none of them are not read.
        """
        stacked: list[Tensor] = []
        for piece in self._pieces:
            if not any(name in names for name in piece.parameters):
                continue
            tensor = self._store.read(piece.hf)
            if not torch.isfinite(tensor).all():
                raise UserError(
                    f"{self._where}: the tensor {piece.hf} has values that are not finite; give another copy "
                    "of the model"
                )
            self._check_value(piece, tensor)
            parts = piece.split(tensor, self._shapes)
            if piece.expert is None:
                named = zip(piece.parameters, parts, strict=True)
                yield from (each for each in named if each[0] in names)
                continue
            (parameter,), (part,) = piece.parameters, parts
            shape = self._shapes[parameter]
            if piece.expert == 0:
                stacked = [part.new_empty(shape)]
            stacked[0][piece.expert] = part
            if piece.expert == shape[0] - 1:
                yield parameter, stacked.pop()

    def is_redundant(self, name: str) -> bool:
        """Return True for a tensor of the store that is no weight of the decoder."""
        return False

    def why_lacking(self, name: str) -> str:
        """Return the cause and the remedy of a tensor that the store lacks, or ''."""
        return ""

    def _check_value(self, piece: HfTensor, tensor: Tensor) -> None:
        """Raise `UserError` if a tensor that was read contradicts another one."""

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
        biased = filter(spec.has_experts, range(spec.layers))
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
