"""Which keys each query sees, as one interval of places: causal, packed documents and a sliding window.

A document is a run of places with equal ids, so what a query sees is an interval that ends at itself; two
integers for a query stand for a mask of S. Shapes: B batch, T queries of this rank, S the whole sequence.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class AttentionIntervals:
    """Which keys the queries of this rank see: an interval for each, of places in the whole sequence.

    Neither `at` nor a row of `first` ever falls. The tensors are on the CPU, where work is planned; `whole`
    lets ranks that exchange queries tell what others' queries see without asking.
    """

    at: Tensor
    """(T,) int64: place of each local query in the whole sequence."""
    first: Tensor
    """(B, T) int64: the first place that it sees; the last is its own."""
    length: int
    """S."""
    whole: Tensor
    """(B, S) int64: `first` of every place of the sequence."""
    windowed: bool
    """Whether a window, and not documents alone, ends what is seen."""
    device: torch.device
    """Where the queries and keys are."""
    together: AttentionIntervals | None = None
    """Of the queries of all ranks that exchange heads for tokens with this one, where it is known."""

    def of(self, at: Tensor) -> AttentionIntervals:
        """The sight of the queries at other places (T',), rising."""
        return AttentionIntervals(at, self.whole[:, at], self.length, self.whole, self.windowed, self.device)


def sight(
    documents_BS: Tensor | None,
    length: int,
    window: int | None,
    at: Tensor,
    batch: int,
    device: torch.device | str,
) -> AttentionIntervals:
    """The sight of the queries at places `at` (T,) of sequences of `length` tokens.

    `documents_BS` are the whole sequences' ids: a query sees the run of equal ids that it is in. `window` is
    the number of positions that it sees at most, its own included. Waits for `documents_BS` where they are
    on another device: make one for a microbatch, not for a layer. ValueError where their shape is another.
    """
    if documents_BS is not None and documents_BS.shape != (batch, length):
        raise ValueError(f"documents are {tuple(documents_BS.shape)}, not {(batch, length)}")
    windowed = window is not None and window < length
    whole = document_starts(documents_BS, length)
    if window is not None:
        whole = torch.maximum(whole, torch.arange(length) - (window - 1))
    whole = whole.expand(batch, length)
    at = at.cpu()
    return AttentionIntervals(at, whole[:, at], length, whole, windowed, torch.device(device))


def document_starts(documents_BS: Tensor | None, length: int) -> Tensor:
    """(B, S) int64 on the CPU: where the run of equal ids begins that a place is in; (1, S) of 0 without."""
    places = torch.arange(length)
    if documents_BS is None:
        return places.new_zeros(1, length)
    ids = documents_BS.cpu()
    begins = torch.zeros(ids.shape, dtype=torch.bool)
    begins[:, 1:] = ids[:, 1:] != ids[:, :-1]
    return torch.where(begins, places, 0).cummax(1).values
