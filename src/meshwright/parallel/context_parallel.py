"""Context parallelism: the tokens of a sequence over n ranks, and attention that crosses them.

Splits        a sequence into 2n equal chunks, of which rank r holds r and 2n-1-r: under a causal mask that is
              equal work for all (Grattafiori et al. 2024, §3.3.2; cf. Brandon et al. 2023).
Saves         all activations of a block, to 1/n.
Modes         ring: keys and values are passed from rank to rank (Liu et al. 2023; Li et al. 2021). gather:
              all ranks get all keys and values (Grattafiori et al. 2024). ulysses: each rank gets all tokens
              of some heads (Jacobs et al. 2023). ring+ulysses: neighbours exchange heads, and a ring connects
              such groups (Fang & Zhao 2024). All are exact.
Wire          bytes that a rank sends, each layer and microbatch, for N = B T local tokens, H query and K
              key-value heads of d channels, b bytes of the format to compute in and a of its sums (4; 8 for
              fp64), f(n) = (n-1)/n:
                ring          forward   shift           (n-1) 2 N K d b
                              backward  shift           (n-1) 2 N K d b + n 2 N K d a
                gather        forward   all_gather      2 n N K d b f(n)
                              backward  reduce_scatter  2 n N K d a f(n)
                ulysses       forward   all_to_all      2 N (H + K) d b f(n)
                              backward  all_to_all      2 N (H + K) d b f(n)
                ring+ulysses  with u ranks of Ulysses and n/u of the ring: those of ulysses with f(u), and
                              those of the ring with n/u for n
              One rank, or a ring of one, sends nothing. Keys are not repeated for the query heads that share
              them. Values with fewer channels than keys (latent attention) are sent padded with zeros.
Keeps         for the backward: q, k, v, out, the log-sum-exp (N H a bytes); gather also all keys and values.

A ring transfers the next block while it computes on the present one, in the backward also the sums of
gradients; sums over blocks are in at least fp32 (on CUDA flash attention first rounds each block's share to
the input's format).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor

from meshwright.comm.collectives import gather_rows
from meshwright.comm.mesh import Axis, Mesh
from meshwright.kernels.attention_intervals import AttentionIntervals, attention_intervals
from meshwright.kernels.score_changes import UNCHANGED, ScoreChanges
from meshwright.kernels.with_backward import with_backward
from meshwright.model.attention import Attend, with_wide_values
from meshwright.model.hooks import Mask
from meshwright.parallel.fused_comm_ops import Tensors
from meshwright.parallel.recompute_cache import RecomputeCache
from meshwright.parallel.ring_attention import GatherAttention, KeyParts, RingAttention
from meshwright.parallel.ulysses import ExchangeOp, HeadExchange, Run, runs_of
from meshwright.spec import ModelSpec
from meshwright.spec.layout import ContextMode


def zigzag(length: int, ranks: int, rank: int) -> Tensor:
    """Positions (length / ranks,) of a sequence that a rank holds, ascending: two of 2 `ranks` equal chunks.

    A single rank holds all positions. Raises ValueError if `length` is not a multiple of 2 `ranks`.
    """
    if ranks == 1:
        return torch.arange(length)
    if length % (2 * ranks):
        raise ValueError(f"{length} tokens cannot be cut into {2 * ranks} equal chunks")
    chunk = length // (2 * ranks)
    starts = (rank * chunk, (2 * ranks - 1 - rank) * chunk)
    return torch.cat([torch.arange(start, start + chunk) for start in starts])


def share(tensor_BS: Tensor, axis: Axis) -> Tensor:
    """This rank's tokens of (B, S, ...), contiguous: (B, S / n, ...); with one rank the tensor itself."""
    if axis.size == 1:
        return tensor_BS
    places = zigzag(tensor_BS.shape[1], axis.size, axis.rank)
    return tensor_BS.index_select(1, places.to(tensor_BS.device, non_blocking=True))


def whole_sequences(part_BT: Tensor, axis: Axis) -> Tensor:
    """Numbers (B, S) of the tokens of whole sequences, from those of this rank's (B, S / n): undoes `share`.

    All ranks compute the same of the whole, so the gradient of a rank's part is its part of the gradient.
    """
    if axis.size == 1:
        return part_BT
    places = torch.cat([zigzag(part_BT.shape[1] * axis.size, axis.size, rank) for rank in range(axis.size)])

    def gather(part: Tensor) -> Tensor:
        by_rank = gather_rows(part, axis).transpose(0, 1).flatten(1)
        there = places.to(part.device, non_blocking=True)
        return torch.empty_like(by_rank).index_copy_(1, there, by_rank)

    whole: Tensor = with_backward(gather, lambda grad: share(grad, axis), part_BT)
    return whole


class _Groups:
    """Positions of the context ranks, and of the groups of neighbours that exchange heads.

    Without such an exchange each rank is a group.
    """

    def __init__(self, mesh: Mesh) -> None:
        self.axis, self.heads = mesh.context, mesh.ulysses
        self._own = mesh.context.rank // mesh.ulysses.size
        self.exchange = lru_cache(self._exchange)
        self.runs = lru_cache(self._runs)
        self._unions = lru_cache(self._united)

    def _places(self, length: int) -> list[Tensor]:
        """Positions (T,) of each context rank in sequences of `length` tokens."""
        return [zigzag(length, self.axis.size, rank) for rank in range(self.axis.size)]

    def _exchange(self, local: int) -> HeadExchange:
        """The exchange of heads in this rank's group, for `local` tokens a rank."""
        u, places = self.heads.size, self._places(local * self.axis.size)
        return HeadExchange(self.heads, places[self._own * u : (self._own + 1) * u])

    def _runs(self, length: int) -> list[Run]:
        """The context ranks' rows in the order of positions."""
        return runs_of(self._places(length))

    def own_heads(self, heads: Tensor) -> Tensor:
        """The part of numbers of all heads (H,) that this rank has of its group's exchange."""
        count = len(heads) // self.heads.size
        return heads.narrow(0, self.heads.rank * count, count) if self.heads.size > 1 else heads

    def _united(self, length: int) -> list[Tensor]:
        """Positions (u T,) of each group together, ascending."""
        u, places = self.heads.size, self._places(length)
        groups = (places[first : first + u] for first in range(0, len(places), u))
        return [torch.cat(group).sort().values for group in groups]

    def key_parts(self, whole: Tensor, device: torch.device, gathered: bool) -> KeyParts:
        """The keys of each group in turn, or all if `gathered`, for the queries of this rank's group;
        `AttentionIntervals` lists the other parameters."""
        length = whole.shape[1]
        unions = self._unions(length)
        own, parts = unions[self._own], [torch.arange(length)] if gathered else unions
        return KeyParts(AttentionIntervals(own, whole[:, own], length, whole, device), parts)


_RECENT = 2
"""Microbatches whose plans, one for each window of the layers, are kept. A compiled pipeline may have more in
flight: it then plans each of them once for its forward and once for its backward."""


class ContextAttention:
    """Attention of queries, keys and values sharded over the context axis.

    Built once for a decoder; `cache` keeps results for a recomputing forward. Without it the attention is
    custom operators of a compiled block.
    """

    def __init__(
        self,
        mesh: Mesh,
        mode: ContextMode,
        cache: RecomputeCache | None,
        windows: int = 1,
        softcap: float | None = None,
        sinks: bool = False,
    ) -> None:
        """`windows` is the number of different windows of the layers; they are called with this cap, and with
        sinks or without."""
        self._changes = softcap, sinks
        self._groups, self._cache, self._device = _Groups(mesh), cache, mesh.context.device
        self._gathers, self._ring = mode == "gather", mesh.ring
        self._compiled = self._make(self._parts_of, None)
        self._recent: deque[KeyParts] = deque(maxlen=_RECENT * windows)
        self._to_heads = ExchangeOp(mesh.ulysses, self._groups.exchange, True, cache)
        self._to_tokens = ExchangeOp(mesh.ulysses, self._groups.exchange, False, cache)

    def __call__(
        self,
        q_BTHd: Tensor,
        k_BTKd: Tensor,
        v_BTKd: Tensor,
        mask: KeyParts | Tensor,
        changes: ScoreChanges = UNCHANGED,
        /,
    ) -> Tensor:
        """(B, T, H, d) for queries whose positions are those of `zigzag`; `mask` is what `mask` returns."""
        assert (changes.softcap, changes.sinks is not None) == self._changes
        tensors = [] if changes.sinks is None else [self._groups.own_heads(changes.sinks)]
        if isinstance(mask, Tensor):
            tensors, attend = [*tensors, mask], self._compiled
        else:
            parts = mask
            attend = self._make(lambda _: parts, self._cache)
        if self._groups.heads.size == 1:
            return attend(q_BTHd, k_BTKd, v_BTKd, *tensors)[0]
        q, k, v = self._to_heads(q_BTHd, k_BTKd, v_BTKd)
        return self._to_tokens(attend(q, k, v, *tensors)[0])[0]

    def mask(self, intervals: AttentionIntervals) -> KeyParts | Tensor:
        """The plans that layers with one window have in common in a microbatch; for compiled blocks, which
        take tensors only, `intervals.whole`, from which they follow."""
        return intervals.whole if self._cache is None else self._parts_of([intervals.whole])

    def _make(
        self, parts: Callable[[Tensors], KeyParts], cache: RecomputeCache | None
    ) -> RingAttention | GatherAttention:
        if self._gathers:
            return GatherAttention(self._groups.axis, parts, cache, *self._changes, self._groups.runs)
        return RingAttention(self._ring, parts, cache, *self._changes)

    def _parts_of(self, tensors: Tensors) -> KeyParts:
        """The keys that come to this rank's queries, part by part; planned already if met lately.

        Intervals are compared by their values: microbatches without documents have the same, and a compiler
        need not hand on the tensor that it was given.
        """
        (whole,) = tensors
        for parts in self._recent:
            if torch.equal(parts.intervals.whole, whole):
                return parts
        self._recent.append(self._groups.key_parts(whole, self._device, self._gathers))
        return self._recent[-1]


def context_parallel_hooks(
    mesh: Mesh, mode: ContextMode, model: ModelSpec, cache: RecomputeCache | None
) -> tuple[Attend, Mask]:
    """The attention over more than one context rank, and its mask; without `cache` for compiled blocks.

    The decoder is then given the tokens that `share` selects, with their positions, and the documents of
    whole sequences.
    """
    axis = mesh.context
    windows = len({kind.window for kind in model.kinds})
    attention = ContextAttention(mesh, mode, cache, windows, model.attention_softcap, model.attention_sinks)

    def mask(
        queries: int,
        _keys: int,
        window: int | None,
        documents_BS: Tensor | None,
        like: Tensor,
        _dim: int | None,
    ) -> KeyParts | Tensor:
        length = queries * axis.size
        positions = zigzag(length, axis.size, axis.rank)
        intervals = attention_intervals(documents_BS, length, window, positions, len(like), like.device)
        return attention.mask(intervals)

    return attention if model.mla is None else with_wide_values(attention), mask
