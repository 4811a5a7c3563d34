"""Attention masks as one interval of keys per query: causal, packed documents and a sliding window.

A document is a run of positions with equal ids, so a query attends to an interval that ends at itself; two
integers per query replace a mask of S entries. Shapes: B batch, T queries of this rank, S the whole sequence.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor


@dataclass(frozen=True)
class AttentionIntervals:
    """The interval of keys that each query of this rank attends to, in positions of the whole sequence.

    `positions` and each row of `first` are ascending. The tensors are on the CPU, where work is planned.
    """

    positions: Tensor
    """(T,) int64: position of each local query in the whole sequence."""
    first: Tensor
    """(B, T) int64: the first position that it attends to; the last is its own."""
    length: int
    """S."""
    whole: Tensor
    """(B, S) int64: `first` of every position of the sequence, so that no rank asks another for it."""
    device: torch.device
    """Device of the queries and keys."""

    def at(self, positions: Tensor) -> AttentionIntervals:
        """Intervals of the queries at other `positions` (T',), ascending."""
        return AttentionIntervals(positions, self.whole[:, positions], self.length, self.whole, self.device)

    @cached_property
    def is_longest(self) -> Tensor:
        """(B, T) of whether an interval is as long as the longest of the sequences: two of neighbours are if
        a window bounds both, and without a window only where each position is a document."""
        lengths = torch.arange(self.length) - self.whole
        return lengths[:, self.positions] == lengths.max()


def attention_intervals(
    documents_BS: Tensor | None,
    length: int,
    window: int | None,
    positions: Tensor,
    batch: int,
    device: torch.device | str,
) -> AttentionIntervals:
    """Intervals of the queries at `positions` (T,) of sequences of `length` tokens.

    `documents_BS` are document ids of the whole sequences. `window` is the largest number of positions that a
    query attends to, its own included. Waits for `documents_BS` if they are on another device: call it once a
    microbatch, not in each layer. Raises ValueError if their shape is not (batch, length).
    """
    if documents_BS is not None and documents_BS.shape != (batch, length):
        raise ValueError(f"documents are {tuple(documents_BS.shape)}, not {(batch, length)}")
    whole = document_starts(documents_BS, length)
    if window is not None:
        whole = torch.maximum(whole, torch.arange(length) - (window - 1))
    whole = whole.expand(batch, length)
    positions = positions.cpu()
    return AttentionIntervals(positions, whole[:, positions], length, whole, torch.device(device))


def document_starts(documents_BS: Tensor | None, length: int) -> Tensor:
    """First position of each position's document, (B, S) int64 on the CPU; (1, S) zeros without documents."""
    positions = torch.arange(length)
    if documents_BS is None:
        return positions.new_zeros(1, length)
    ids = documents_BS.cpu()
    begins = torch.zeros(ids.shape, dtype=torch.bool)
    begins[:, 1:] = ids[:, 1:] != ids[:, :-1]
    return torch.where(begins, positions, 0).cummax(1).values
