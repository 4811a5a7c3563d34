"""How programs name the tensors of a decoder, and where these names are in a checkpoint.

A `Naming` is a table of one program's names: its `mark` recognises them, wherever a program nested the model
(`model.`, `module.`), and its `pieces` say which of the decoder's parameters each tensor holds.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from meshwright.exchange.hf_state_dict import HfTensor
from meshwright.exchange.stored_weights import StoredWeights
from meshwright.exchange.tensor_store import RenamedStore, TensorStore
from meshwright.spec import ModelSpec, UserError
from meshwright.spec.sharded_tensor import Rectangle


@dataclass(frozen=True)
class Naming:
    """The names of a program: tensors of a model begin with one of `roots`, and have the tensor `mark`."""

    program: str
    mark: str
    roots: tuple[str, ...]
    pieces: Callable[[ModelSpec, Collection[str], str], Iterator[HfTensor]]
    """(spec, names of a checkpoint, beginning of errors) -> its tensors, those of a parameter consecutively.
    Raises `UserError` for a model that the program's names do not describe."""
    heads: tuple[str, ...] = ()
    """Names of the head, which a tied model may have beside its embedding."""
    unused: tuple[str, ...] = ()
    """Ends of the names of tensors that are no weights."""


class NamedWeights(StoredWeights):
    """The tensors of a store under the names of a program (`Weights`), but for HF's (`HfWeights`)."""

    def __init__(self, where: str, spec: ModelSpec, store: TensorStore, naming: Naming) -> None:
        self._naming = naming
        super().__init__(where, spec, store, naming.pieces(spec, store.headers, where))

    def is_redundant(self, name: str) -> bool:
        """Return True for the head of a tied model, and for what a program has besides weights."""
        return name.endswith(self._naming.unused) or (self._spec.tied and name in self._naming.heads)

    def _check_value(self, piece: HfTensor, place: Rectangle, value: Tensor) -> None:
        """Raise `UserError` for a tied head that has other values than the embedding."""
        if piece.parameters[0] != "embed.weight" or not self._spec.tied:
            return
        for name in self._naming.heads:
            if name not in self._store.headers:
                continue
            same = self._store.headers[name][1] == self._store.headers[piece.hf][1]
            if not same or not torch.equal(next(self._store.parts(name, [place])), value):
                raise UserError(
                    f"{self._where}: the config ties the head to the embedding, but the tensor {name} has "
                    f"other values than {piece.hf}; set tie_word_embeddings to false in config.json"
                )


def model_part(store: TensorStore, mark: str, roots: tuple[str, ...]) -> RenamedStore | None:
    """Return the tensors of a model, by their names in it, of a store that may have others, too.

    The model is where `mark` is nested least: an optimiser's copies have longer names. None without `mark`.
    """
    ends = [name for name in store.headers if name == mark or name.endswith(f".{mark}")]
    if not ends:
        return None
    prefix = min(ends, key=len).removesuffix(mark)
    names = {name[len(prefix) :]: name for name in store.headers if name.startswith(prefix)}
    return RenamedStore(store, {new: old for new, old in names.items() if new.startswith(roots)})
