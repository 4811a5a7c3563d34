"""A layout's state, whole, by kind of value: what a checkpoint holds."""

from __future__ import annotations

from torch import Tensor

from meshwright.train import state
from meshwright.train.gather_full import gather_full
from meshwright.train.step import Trainer

State = dict[str, dict[str, Tensor]]
"""Whole tensors by kind (parameter, router bias, or a moment) and name; empty but on rank 0."""


def gather_state(trainer: Trainer) -> State:
    """Gather parameters, routers' biases and moments on rank 0; collective over the mesh."""
    found: State = {kind: {} for kind in ("parameter", "router bias", *trainer.optimiser.moments)}
    for key, tensor in gather_full(state.tensors(trainer).items(), trainer.mesh).items():
        kind, _, name = key.removeprefix("optim/").partition("/")
        if kind == "model":
            kind = "router bias" if name.endswith(".router.bias") else "parameter"
        found[kind][name] = tensor
    return found
