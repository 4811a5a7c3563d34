"""Gradients that are computed aside: between two steps, to look at them, and without any effect on the run.

`Trainer.gradients` changes more than gradients: fp8's largest numbers are noted, routers count their tokens,
the batch that was moved ahead is used up. None of that belongs to the run where no step follows.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain

import torch

from meshwright.train.step import Trainer


@contextmanager
def aside(trainer: Trainer) -> Iterator[None]:
    """Let `trainer.gradients` be called inside the context, between two steps; all ranks enter it together.

    At the end gradients are dropped, and everything that a forward or backward changes is as it was: scales
    and the numbers that they follow from, the routers' counts, the loss scale, what is known of the next
    batch, and the state of torch's generators. Parameters, moments and averages change in an update only.
    """
    changing = [part.of_gradients() for part in trainer.parts]
    objects = [trainer, trainer.loss_scale, trainer.states, *chain.from_iterable(own for own, _ in changing)]
    attributes = [(each, dict(vars(each))) for each in objects]
    tensors = list(chain.from_iterable(own for _, own in changing))
    copies = [(tensor, tensor.clone()) for tensor in tensors]
    device = trainer.mesh.device
    try:
        generators = torch.random.fork_rng([device] if device.type == "cuda" else [])
        with generators, trainer.exact():
            yield
    finally:
        trainer.states.end_step()
        for each, kept in attributes:
            vars(each).update(kept)
        with torch.no_grad():
            for tensor, copy in copies:
                tensor.copy_(copy)
