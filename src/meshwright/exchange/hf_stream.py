"""Weights under the names of HF, between programs in memory: one tensor at a time, of any layout."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import prod
from typing import cast

import torch
from torch import Tensor

from meshwright.checkpoint.gather_full import gather_full
from meshwright.checkpoint.weights import Wanted, WeightPart
from meshwright.comm.collectives import start_broadcast
from meshwright.comm.mesh import Mesh
from meshwright.exchange.hf_state_dict import HfTensor, copies, hf_tensors
from meshwright.exchange.parameter_source import LastRead
from meshwright.exchange.stored_weights import tensor_shapes
from meshwright.parallel.flat_param import Stored, UnpaddedDTensor
from meshwright.spec import ModelSpec, UserError

Held = Tensor | UnpaddedDTensor
"""A rank's part of a parameter."""
NamedTensors = Iterable[tuple[str, Tensor]]
"""(name in HF's files, whole tensor), in any order."""


class GatheredParameters:
    """Parameters and routers' biases of a sharded model as a `ParameterSource`, each whole on every rank.

    `held` are this rank's parts of those that it has. All ranks of the mesh ask for the same ones in the same
    order; one is in memory at a time.
    """

    def __init__(self, model: ModelSpec, held: Mapping[str, Held], mesh: Mesh, dtype: torch.dtype) -> None:
        self._held, self._mesh, self.dtype = held, mesh, dtype
        self.shapes: Mapping[str, Sequence[int]] = tensor_shapes(model)

    def __getitem__(self, name: str, /) -> Tensor:
        """Return one of them in its own format, on the mesh's device."""
        mesh, own = self._mesh, [(name, cast(Stored, self._held[name]))] if name in self._held else []
        whole = gather_full(own, mesh).get(name)
        bias = name.endswith(".router.bias")  # fp32 in any run
        if whole is None:
            assert mesh.rank > 0, f"no rank holds {name}"
            dtype = torch.float32 if bias else self.dtype
            whole = torch.empty(tuple(self.shapes[name]), dtype=dtype, device=mesh.device)
        elif not bias:  # frozen parameters are kept in the format to compute in
            whole = whole.to(self.dtype)
        start_broadcast(whole, 0, mesh.world).wait()
        return whole


def hf_state(
    model: ModelSpec, held: Mapping[str, Held], mesh: Mesh, master: torch.dtype, dtype: torch.dtype | None
) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, whole tensor on the CPU) of the model as its HF folder has them, on every rank.

    They are in `dtype`, by default as stored, in the `master` format. Collective over the mesh, whose ranks
    take the same ones in the same order; one parameter is in memory at a time.
    """
    source = LastRead(GatheredParameters(model, held, mesh, master))
    for piece in hf_tensors(model):
        yield piece.hf, piece.join(source, dtype or master)


class StreamedWeights:
    """Named tensors of a model of HF, as they come, under the decoder's names.

    `checkpoint.weights.fill` takes a rank's part of them.
    """

    def __init__(self, model: ModelSpec, tensors: NamedTensors) -> None:
        self._model, self._tensors, self._shapes = model, tensors, tensor_shapes(model)

    def parts(self, wanted: Wanted) -> Iterator[WeightPart]:
        """Yield each tensor's parameters, whole or an expert's part, that are wanted here.

        Raises `UserError` for a tensor that is unknown, misshapen, not finite, given twice or missing.
        """
        seen: set[str] = set()
        elements: Counter[str] = Counter()
        pieces, redundant = self._pieces(), self._redundant()
        for name, value in self._tensors:
            if name in redundant:
                continue
            if name not in pieces or name in seen:
                problem = "was given twice" if name in seen else "is no tensor of this model"
                raise UserError(f"load_hf_state: {name} {problem}; give each tensor of the model once")
            seen.add(name)
            self._check(name, value, pieces[name])
            parts = pieces[name].split(value.detach().cpu(), self._shapes)
            for number, (parameter, part) in enumerate(zip(pieces[name].parameters, parts, strict=True)):
                elements[parameter] += part.numel()
                if parameter in wanted:
                    rectangle = pieces[name].rectangle(number, self._shapes)
                    yield WeightPart(parameter, rectangle, part.view(rectangle[1]))
        for piece in hf_tensors(self._model):
            lacking = any(elements[each] < prod(self._shapes[each]) for each in piece.parameters)
            if lacking and piece.hf not in seen:
                raise UserError(f"load_hf_state: lacks the tensor {piece.hf}; give all tensors of the model")

    def _check(self, name: str, value: Tensor, piece: HfTensor) -> None:
        wanted = piece.shape(self._shapes)
        if tuple(value.shape) != wanted:
            raise UserError(
                f"load_hf_state: the tensor {name} has shape {list(value.shape)}, but this model has "
                f"{list(wanted)}"
            )
        if not torch.isfinite(value).all():
            raise UserError(
                f"load_hf_state: the tensor {name} has values that are not finite; give another copy of it"
            )

    def _pieces(self) -> dict[str, HfTensor]:
        """Every tensor that the model's files may have, by name: experts by one tensor each, or stacked."""
        both = (*hf_tensors(self._model, stacked=True), *hf_tensors(self._model))
        return {piece.hf: piece for piece in both if not piece.copy}

    def _redundant(self) -> set[str]:
        """Names of copies of other tensors."""
        return {*copies(self._model), *(["lm_head.weight"] if self._model.tied else [])}
