"""The part of a data rank's batch that a rank computes, its microbatches, and the kinds of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from meshwright.comm.mesh import Mesh
from meshwright.data.loader import Batch
from meshwright.parallel.context_parallel import share
from meshwright.spec import RunSpec


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


def kinds_of_microbatches(spec: RunSpec) -> Iterator[Batch]:
    """Microbatches of zeros, one for each way in which documents change what a compiler sees.

    One document needs no mask. Several need one, or their number and the power of two above the longest,
    which a compiler takes for constants until it has seen other ones.
    """
    shape = spec.micro_batch, spec.data.seq_len
    zeros, alone = torch.zeros(shape, dtype=torch.int64), torch.full(shape[:1], -1)
    places = torch.arange(shape[1])
    ends: list[list[int]] = [[]]
    if spec.data.document_mask:
        ends += [[shape[1] // 2], [shape[1] - 2, shape[1] - 1]]
    for each in ends:
        documents = torch.bucketize(places, torch.tensor(each, dtype=torch.int64), right=True)
        yield Batch(zeros, zeros, places.expand(shape), documents.expand(shape), alone, alone)
