"""The weights that `model.weights` and `lora.weights` name, opened for a run that starts from them."""

from __future__ import annotations

from meshwright.checkpoint.weights import Weights
from meshwright.exchange.foreign.caller import MODEL_WEIGHTS
from meshwright.exchange.foreign.source import Source, open_source
from meshwright.spec import ModelSpec, RunSpec
from meshwright.spec.files import user_path
from meshwright.spec.hf.special_tokens import side_files
from meshwright.spec.weights import WeightSource, check_fits, weight_source
from meshwright.weights.initial_adapters import with_adapters
from meshwright.weights.load import check_trainable
from meshwright.weights.resized import ResizedWeights
from meshwright.weights.saved_weights import SavedWeights


def open_weights(spec: RunSpec) -> Weights | None:
    """Return the weights that a run starts from, with adapters that it goes on from; None for random ones.

    Raises `UserError` for a folder that is not there or holds no such weights, and for a model or adapters
    that contradict them.
    """
    return with_adapters(spec, _of_model(spec.model))


def _of_model(model: ModelSpec) -> Weights | None:
    source = weight_source(model.weights)
    if source is None:
        return None
    if source.is_run:
        saved = SavedWeights(source.folder, source.step)
        check_fits(model, saved.spec.model, source)
        return _resized(saved, saved.spec.model, model)
    theirs, weights, folder, *_ = opened(model, source)
    side_files(folder, "model.weights")  # they are copied into the run's folder
    check_fits(model, theirs, source)
    check_trainable(weights, source.folder, "model.weights")
    return _resized(weights, theirs, model)


def _resized(weights: Weights, stored: ModelSpec, model: ModelSpec) -> Weights:
    """Return the weights with the model's number of rows for the vocabulary."""
    return weights if stored.vocab_size == model.vocab_size else ResizedWeights(weights, stored, model)


def opened(model: ModelSpec, source: WeightSource) -> Source:
    """Return an HF folder, or another program's checkpoint with the config.json that `model.hf` names.

    Raises `UserError`.
    """
    where, near = source.folder, None
    if source.is_foreign and model.hf is not None:
        named = user_path(model.hf, "model.hf")
        near = named if named.is_dir() else named.parent
    if (where / "adapter_config.json").is_file() and source.is_foreign:
        return open_source(where, MODEL_WEIGHTS, base=near)
    return open_source(where, MODEL_WEIGHTS, config=near)
