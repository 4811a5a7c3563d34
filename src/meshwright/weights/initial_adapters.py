"""The adapters that `lora.weights` names, opened for a run that goes on from them."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path

from meshwright.checkpoint.weights import ReadBytes, Wanted, WeightPart, Weights
from meshwright.exchange.peft_reader import PeftWeights
from meshwright.spec import ModelSpec, RunSpec
from meshwright.spec.lora import LoraSpec, is_adapter
from meshwright.spec.lora_source import KEY, initial_adapters
from meshwright.spec.weights import WeightSource, check_fits
from meshwright.weights.saved_weights import SavedWeights


class RunAdapters:
    """The adapters in a checkpoint of a run with `[lora]` (`Weights`)."""

    def __init__(self, source: WeightSource, model: ModelSpec) -> None:
        self._saved = SavedWeights(source.folder, source.step)
        check_fits(model, self._saved.spec.model, source)

    @property
    def exact(self) -> bool:
        """True if they are in float64."""
        return self._saved.exact

    def parts(self, wanted: Wanted) -> Iterator[WeightPart]:
        """Yield the stored pieces that overlap wanted rectangles."""
        return self._saved.stored_parts(wanted)

    def reading(self, wanted: Wanted) -> ReadBytes:
        """Return what `parts` of these would take, without reading them."""
        return self._saved.reading(wanted)


class WithAdapters:
    """Weights of a model, and of adapters beside them that are elsewhere (`Weights`)."""

    def __init__(self, base: Weights, adapters: Weights) -> None:
        self._base, self._adapters = base, adapters

    @property
    def exact(self) -> bool:
        """True if weights or adapters are in float64."""
        return self._base.exact or self._adapters.exact

    def parts(self, wanted: Wanted) -> Iterator[WeightPart]:
        """Yield parts of the model's weights, and then of the adapters."""
        base, adapters = _divided(wanted)
        yield from self._base.parts(base)
        yield from self._adapters.parts(adapters)

    def reading(self, wanted: Wanted) -> ReadBytes:
        """Return what `parts` of these would take, without reading them."""
        base, adapters = _divided(wanted)
        return self._base.reading(base).then(self._adapters.reading(adapters))


def with_adapters(spec: RunSpec, base: Weights | None) -> Weights | None:
    """Return the weights of a run's model, and beside them the adapters that it goes on from.

    Raises `UserError` for a folder that is not there, holds no such adapters or contradicts the run.
    """
    lora, source = spec.lora, initial_adapters(spec.model, spec.lora)
    if lora is None or source is None or base is None:
        return base
    if source.is_run:
        return WithAdapters(base, RunAdapters(source, spec.model))
    return WithAdapters(base, _of_peft(source.folder, spec.model, lora))


def _of_peft(folder: Path, model: ModelSpec, lora: LoraSpec) -> PeftWeights:
    found = PeftWeights(folder, model, lora)
    if found.shared:
        warnings.warn(
            f"{KEY}: the layers that {found.shared[0]} joins share an A in {folder}, and are trained with "
            f"one each from here on: the first step is PEFT's, later ones are not",
            stacklevel=2,
        )
    return found


def _divided(wanted: Wanted) -> tuple[Wanted, Wanted]:
    of_adapters = {name: each for name, each in wanted.items() if is_adapter(name)}
    return {name: each for name, each in wanted.items() if name not in of_adapters}, of_adapters
