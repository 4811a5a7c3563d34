"""The weights that `model.weights` names, opened for a run that starts from them."""

from __future__ import annotations

from meshwright.checkpoint.weights import Weights
from meshwright.exchange.hf import HfWeights
from meshwright.spec import ModelSpec
from meshwright.spec.hf.special_tokens import check_within, side_files
from meshwright.spec.weights import check_fits, hf_model, weight_source
from meshwright.weights.load import check_trainable
from meshwright.weights.saved_weights import SavedWeights


def open_weights(model: ModelSpec) -> Weights | None:
    """Return the weights that a run of `model` starts from; None for random ones.

    Raises `UserError` for a folder that is not there or holds no such weights, and for a model that
    contradicts them.
    """
    source = weight_source(model.weights)
    if source is None:
        return None
    if not source.is_hf:
        saved = SavedWeights(source.folder, source.step)
        check_fits(model, saved.spec.model, source)
        return saved
    check_within(source.folder / "config.json", source.folder, "model.weights")
    side_files(source.folder, "model.weights")  # they are copied into the run's folder
    theirs = hf_model(source.folder, "model.weights")
    check_fits(model, theirs, source)
    weights = HfWeights(source.folder, theirs)
    check_trainable(weights, source.folder, "model.weights")
    return weights
