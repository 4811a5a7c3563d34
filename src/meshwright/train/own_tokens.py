"""The part of a data rank's batch that a rank computes, and its microbatches."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from meshwright.data.loader import Batch
from meshwright.parallel.context_parallel import share
from meshwright.parallel.mesh import Mesh


def own_tokens(batch: Batch, mesh: Mesh) -> Batch:
    """A context rank's tokens of each sequence of a batch; `documents` stay those of whole sequences."""
    axis = mesh.context
    tokens, targets, positions = (share(x, axis) for x in (batch.tokens, batch.targets, batch.positions))
    return replace(batch, tokens=tokens, targets=targets, positions=positions)


def microbatches(batch: Batch, size: int, device: torch.device) -> Iterator[Batch]:
    """Each microbatch in order, on the device, to which the batch is copied as a whole."""
    count, there = batch.tokens.shape[0], batch.to(device)
    for start in range(0, count, size):
        yield there.rows(start, min(start + size, count))
