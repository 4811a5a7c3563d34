"""Embedding and cross entropy over a vocabulary that is split over tensor ranks (Shoeybi et al. 2019, §3).

A rank computes the logits of its part of the vocabulary only, and sends two numbers a token in the loss, or
with soft targets five, and six where hidden states are compared, too; for log-probabilities three. The sum
over the parts is in `model/chunked_cross_entropy.py` and `model/log_probs.py`.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from meshwright.comm.collectives import gather_rows
from meshwright.comm.mesh import Axis
from meshwright.kernels.score_changes import capped
from meshwright.model.chunked_cross_entropy import VocabularyPart, linear_cross_entropy
from meshwright.model.embedding import embedding
from meshwright.model.hooks import flat
from meshwright.model.log_probs import linear_log_probs
from meshwright.model.soft_targets import SoftTargets
from meshwright.parallel.recompute_cache import RecomputeCache
from meshwright.parallel.tensor_linears import EnterParallelRegion, leave_parallel_region
from meshwright.spec.parameters import Piece


class VocabParallel:
    """Embedding and head on one rank of the tensor axis, each with a part of the vocabulary."""

    def __init__(self, axis: Axis, sequence: bool, embed: Piece, head: Piece) -> None:
        self._axis, self._sequence, self._embed, self._head = axis, sequence, embed, head
        self._enter = EnterParallelRegion(axis, sequence, RecomputeCache())

    def embed(
        self, tokens_BT: Tensor, positions: Tensor, weight: Tensor, position_weight: Tensor | None
    ) -> Tensor:
        """(B, T/n or T, D): the ranks' rows are summed; a rank's are 0 for tokens of another rank's part."""
        row = tokens_BT - self._embed.first
        elsewhere = (row < 0) | (row >= self._embed.size)
        rows = embedding(row.masked_fill(elsewhere, 0), weight)
        rows = rows.masked_fill(elsewhere.unsqueeze(-1), 0)
        x_BTD = leave_parallel_region(rows, self._axis, self._sequence)
        if position_weight is None:
            return x_BTD
        positions = positions.expand(tokens_BT.shape)
        if self._sequence:  # this rank's tokens of (B, T) flattened
            positions = positions.reshape(self._axis.size, len(tokens_BT), -1)[self._axis.rank]
        return x_BTD + embedding(positions, position_weight)

    def predict(
        self,
        x_BTD: Tensor,
        weight: Tensor,
        targets_BT: Tensor | None,
        scale: float,
        soft: SoftTargets | None = None,
        softcap: float | None = None,
    ) -> Tensor:
        """`scale` times the summed loss, a scalar, for which no rank gathers another's logits; or without
        targets the logits (B, T, V) of all ranks, without their gradient."""
        shard = self._head
        x_BTD = self._enter(x_BTD)[0]  # one name, so that the shard of tokens is freed before the loss
        if targets_BT is None:
            parts = gather_rows(capped(F.linear(x_BTD, weight).detach(), softcap), self._axis)
            return torch.cat(list(parts), -1)[..., : shard.global_shape[0]]
        tokens, targets = x_BTD.flatten(0, 1), targets_BT.flatten()
        return linear_cross_entropy(tokens, weight, targets, None, self._part, scale, flat(soft), softcap)

    def log_probs(
        self, x_BTD: Tensor, weight: Tensor, targets_BT: Tensor, softcap: float | None, entropy: bool
    ) -> tuple[Tensor, Tensor]:
        """Log-probabilities of targets, and entropies, (B, T) each, alike on all ranks of the axis."""
        tokens, targets = self._enter(x_BTD)[0].flatten(0, 1), targets_BT.flatten()
        found = linear_log_probs(tokens, weight, targets, None, self._part, softcap, entropy)
        return found[0].view_as(targets_BT), found[1].view_as(targets_BT)

    @property
    def _part(self) -> VocabularyPart:
        """This rank's part of the vocabulary."""
        axis, head = self._axis, self._head
        gather, rows = partial(gather_rows, axis=axis), head.size - head.padding
        return VocabularyPart(head.first, rows, gather, axis.rank, axis.size)
