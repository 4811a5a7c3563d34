"""The part of a data rank's batch that a rank computes, and its microbatches."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from meshwright.comm.mesh import Mesh
from meshwright.data.loader import Batch
from meshwright.parallel.context_parallel import share


def own_tokens(batch: Batch, mesh: Mesh) -> Batch:
    """A context rank's tokens of each sequence of a batch, pinned if that is.

    `documents` stay those of whole sequences.
    """
    axis = mesh.context
    parts = [share(x, axis) for x in (batch.tokens, batch.targets, batch.positions)]
    if axis.size > 1 and batch.tokens.is_pinned():  # what is selected of it is not
        parts = [part.pin_memory() for part in parts]
    tokens, targets, positions = parts
    return replace(batch, tokens=tokens, targets=targets, positions=positions)


def microbatches(batch: Batch, size: int, device: torch.device) -> Iterator[Batch]:
    """Each microbatch in order, on the device, to which the batch is copied as a whole."""
    count, there = batch.tokens.shape[0], batch.to(device)
    for start in range(0, count, size):
        yield there.rows(start, min(start + size, count))
