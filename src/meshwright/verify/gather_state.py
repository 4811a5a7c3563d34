"""A layout's state, whole, by kind of value: what a checkpoint holds."""

from __future__ import annotations

from itertools import chain

import torch
from torch import Tensor

from meshwright.checkpoint.gather_full import gather_full
from meshwright.optim.eight_bit import SIGNED, UNSIGNED, dequantised
from meshwright.train import state
from meshwright.train.step import Trainer
from meshwright.verify.kinds import kind_of

State = dict[str, dict[str, Tensor]]
"""Whole tensors by kind (parameter, router bias, a moment, or ema) and name; empty but on rank 0."""


def gather_state(trainer: Trainer) -> State:
    """Gather parameters, routers' biases, moments and averages on rank 0; collective over the run's mesh.

    Moments in 8 bits are dequantised. `kind_of` tells their kinds and names.
    """
    averages = [kind for part in trainer.parts for kind, _, _ in part.averages()]
    kinds = ("parameter", "router bias", *trainer.optimiser.moments, *averages)
    found: State = {kind: {} for kind in kinds}
    frozen = ((f"{trainer.prefix}model/{n}", each) for n, each in trainer.states.frozen_parameters())
    every = chain(state.tensors(trainer).items(), frozen)
    for key, tensor in gather_full(every, trainer.run_mesh).items():
        kind, name = kind_of(key, bool(trainer.prefix))
        found.setdefault(kind, {})[name] = tensor
    for kind, values in (("exp_avg", SIGNED), ("exp_avg_sq", UNSIGNED)):
        for name, scales in found.pop(f"{kind}_scale", {}).items():
            codes, held = found[kind][name], scales.new_tensor(values, dtype=torch.float32).to(scales.dtype)
            blocks = dequantised(codes.view(scales.numel(), -1), scales.view(-1), held)
            found[kind][name] = blocks.view(codes.shape)
    return found
