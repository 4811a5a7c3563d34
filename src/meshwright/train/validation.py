"""Validation: the likelihood of held-out text, by source and for each of a trainer's sets of weights."""

from __future__ import annotations

from typing import Any

from meshwright.comm.mesh import Mesh
from meshwright.data.corpus import Corpus
from meshwright.data.loader import Loader
from meshwright.spec import RunSpec
from meshwright.train.callbacks import Observers
from meshwright.train.held_out import Likelihood, likelihoods, total
from meshwright.train.step import Trainer

Row = dict[str, Any]


class Validation:
    """The first `train.eval_tokens` held-out tokens of a run; without held-out text nothing is measured."""

    def __init__(
        self,
        spec: RunSpec,
        mesh: Mesh,
        trainer: Trainer,
        corpus: Corpus,
        loader: Loader,
        observers: Observers,
    ) -> None:
        self._mesh, self._max_tokens = mesh, spec.train.eval_tokens
        self._trainer, self._corpus, self._loader, self._observers = trainer, corpus, loader, observers
        self._last: Row = {}

    def measure(self, step: int) -> None:
        """Evaluate after `step` and tell the observers. All ranks call this."""
        if self._corpus.validation.target_tokens == 0:
            return
        self._mesh.heartbeat.phase("evaluate")
        self._last = {"step": step}
        for name, weights in self._trainer.models():
            with weights:
                self._last |= self._likelihoods(name)
        self._observers.on_eval(self._last)

    def _likelihoods(self, name: str) -> Row:
        """Return the numbers of the weights in place; of others than the run's own the loss alone."""
        parts = likelihoods(self._loader.validation, self._trainer.nll, self._mesh, self._max_tokens)
        whole = total(parts)
        of_parts = {
            f"val_{key}": value
            for part in self._trainer.parts
            for key, value in part.held_out_metrics().items()
        }
        if name:
            return {f"val_loss_{name}": whole.loss}
        sources = {
            source: {"loss": part.loss, **_bits_per_byte(part)}
            for source, part in zip(self._corpus.names, parts, strict=True)
            if part.tokens
        }
        bits = {f"val_{key}": value for key, value in _bits_per_byte(whole).items()}
        row: Row = {"val_loss": whole.loss, **bits, **of_parts}
        return row | ({"val_sources": sources} if len(parts) > 1 else {})

    def result(self) -> Row:
        """Return the fields of the run's result: None where nothing was measured."""
        row = {key: self._last.get(key) for key in ("val_loss", "val_bits_per_byte")}
        row |= {"val_sources": self._last["val_sources"]} if "val_sources" in self._last else {}
        others = [f"val_loss_{name}" for name, _ in self._trainer.models() if name]
        return row | {key: self._last.get(key) for key in others}


def _bits_per_byte(part: Likelihood) -> dict[str, float]:
    """Return `bits_per_byte`, and nothing of what spells no text, such as answers that are compared."""
    return {} if part.bits_per_byte is None else {"bits_per_byte": part.bits_per_byte}
