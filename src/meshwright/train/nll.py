"""The loss of a batch without gradients, and the number that it is divided by."""

from __future__ import annotations

import torch
from torch import Tensor

from meshwright.data.loader import Batch
from meshwright.parallel.context_parallel import share
from meshwright.parallel.loss_normalization import count_targets
from meshwright.parallel.microbatches import microbatches, own_tokens
from meshwright.parallel.pipeline_parallel import Pipeline


def nll(pipeline: Pipeline, micro_batch: int, batch: Batch) -> Tensor:
    """Return this rank's share of a batch's negative log-likelihood and of its targets, (2,) in float64.

    The sums over all ranks are in nats, and the number of targets. All ranks of the mesh call this, each with
    the samples of its data rank.
    """
    own = own_tokens(batch, pipeline.mesh)
    return loss_and_count(pipeline, micro_batch, own, own_targets(pipeline, batch))


@torch.no_grad()
def loss_and_count(pipeline: Pipeline, micro_batch: int, own: Batch, count: int) -> Tensor:
    """Return this rank's share of the loss of a batch, of which it has the tokens `own`, and of its `count`,
    (2,) in float64."""
    mesh = pipeline.mesh
    micros = list(microbatches(own, micro_batch, mesh.device))
    for stage in pipeline.stages.values():
        stage.target_weight = 1.0
    losses = pipeline.forward(micros)
    found = torch.zeros(2, dtype=torch.float64, device=mesh.device)
    if losses and mesh.tensor.rank == 0:
        found[0] = torch.stack(losses).double().sum()
        found[1] = count
    return found


def own_targets(pipeline: Pipeline, batch: Batch) -> int:
    """Return the targets whose loss this rank computes, and no other of its tensor ranks counts."""
    if not pipeline.has_end or pipeline.mesh.tensor.rank > 0:
        return 0
    return count_targets(share(batch.targets, pipeline.mesh.context))
