"""Context parallelism: the tokens of a sequence over n ranks, and attention that crosses them.

Splits        a sequence into 2n equal chunks, of which rank r holds r and 2n-1-r: under a causal mask that is
              equal work for all (Grattafiori et al. 2024, §3.3.2; cf. Brandon et al. 2023).
Saves         all activations of a block, to 1/n.
Modes         ring: keys and values travel (Liu et al. 2023; Li et al. 2021). gather: all ranks get all keys
              and values (Grattafiori et al. 2024). ulysses: all tokens of some heads instead of all heads of
              some tokens (Jacobs et al. 2023). ring+ulysses: neighbours do the latter, among such groups runs
              the former (Fang & Zhao 2024). All are exact.
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
              With one rank, or a ring of one, nothing. Query heads that share keys do not repeat them.
              Values of fewer channels than the keys (latent attention) travel with zeros for the others.
Keeps         for the backward: q, k, v, out, the log-sum-exp (N H a bytes); gather also all keys and values.

A ring's next block is under way while the present one is computed on, in the backward also the sums that come
home; sums over blocks are in fp32 at least (on CUDA flash attention first rounds each block's share to the
input's format). On an axis of one rank the same code sends nothing.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from meshwright.model.attention import with_wide_values
from meshwright.model.attention_intervals import AttentionIntervals, sight
from meshwright.model.decoder import Decoder
from meshwright.parallel.fused_comm_ops import Tensors
from meshwright.parallel.mesh import Axis, Mesh
from meshwright.parallel.recompute import RecomputeCache
from meshwright.parallel.ring_attention import JointGather, JointRing, gather_attention, ring_attention
from meshwright.parallel.ulysses import Exchange, JointToHeads, JointToTokens
from meshwright.spec.layout import ContextMode


def zigzag(length: int, ranks: int, rank: int) -> Tensor:
    """The places (length / ranks,) of a sequence that a rank holds, rising: its chunks of 2 `ranks`.

    One rank holds all places. ValueError where `length` is not a multiple of 2 `ranks`.
    """
    if ranks == 1:
        return torch.arange(length)
    if length % (2 * ranks):
        raise ValueError(f"{length} tokens cannot be cut into {2 * ranks} equal chunks")
    chunk = length // (2 * ranks)
    late = (2 * ranks - 1 - rank) * chunk
    return torch.cat([torch.arange(rank * chunk, (rank + 1) * chunk), torch.arange(late, late + chunk)])


def share(tensor_BS: Tensor, axis: Axis) -> Tensor:
    """(B, S, ...) -> (B, S / n, ...): this rank's places, contiguous; with one rank the tensor itself."""
    if axis.size == 1:
        return tensor_BS
    places = zigzag(tensor_BS.shape[1], axis.size, axis.rank)
    return tensor_BS.index_select(1, places.to(tensor_BS.device))


class ContextAttention:
    """Attention of queries, keys and values that are shared over the context axis, by one of the modes.

    Built once for a decoder. `kept` remembers results for a second forward.
    """

    def __init__(self, mesh: Mesh, mode: ContextMode, kept: RecomputeCache) -> None:
        self.axis, self.mode, self._kept = mesh.context, mode, kept
        self._ring, self._heads = mesh.ring, mesh.ulysses

    def __call__(self, q_BTHd: Tensor, k_BTKd: Tensor, v_BTKd: Tensor, sight: AttentionIntervals) -> Tensor:
        """(B, T, H, d) for the queries at the places of `sight`, which are `zigzag`'s; differentiable."""
        return self.at_places(q_BTHd, k_BTKd, v_BTKd, sight, _places(sight.length, self.axis))

    def at_places(
        self, q_BTHd: Tensor, k_BTKd: Tensor, v_BTKd: Tensor, sight: AttentionIntervals, places: list[Tensor]
    ) -> Tensor:
        """The same where rank r of the axis holds `places[r]` (T,), rising, on the CPU."""
        if self._heads.size == 1:
            return self._attend(q_BTHd, k_BTKd, v_BTKd, sight, places)
        u = self._heads.size
        groups = groups_of(places, u)
        own = groups[self.axis.rank // u]
        exchange = Exchange(self._heads, own)
        unions = [torch.cat(group).sort().values for group in groups]
        q, k, v = exchange.to_heads(q_BTHd, k_BTKd, v_BTKd)
        out = self._attend(q, k, v, sight.together or sight.of(unions[self.axis.rank // u]), unions)
        return exchange.to_tokens(out)

    def united(self, sight: AttentionIntervals) -> AttentionIntervals:
        """`sight` with what ranks that exchange heads see together: one for all layers of a microbatch."""
        u = self._heads.size
        if u == 1:
            return sight
        group = groups_of(_places(sight.length, self.axis), u)[self.axis.rank // u]
        return replace(sight, together=sight.of(torch.cat(group).sort().values))

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, sight: AttentionIntervals, places: list[Tensor]
    ) -> Tensor:
        if self.mode == "gather":
            return gather_attention(q, k, v, sight, places, self.axis, self._kept)
        return ring_attention(q, k, v, sight, places, self._ring, self._kept)


def _places(length: int, axis: Axis) -> list[Tensor]:
    """The places that each rank of the axis holds."""
    return [zigzag(length, axis.size, rank) for rank in range(axis.size)]


def groups_of(places: list[Tensor], u: int) -> list[list[Tensor]]:
    """The places of each u neighbours, who exchange heads."""
    return [places[first : first + u] for first in range(0, len(places), u)]


class Seen(NamedTuple):
    """A `AttentionIntervals` as the tensors that a compiled block is given."""

    at: Tensor
    first: Tensor
    whole: Tensor
    windowed: bool


class JointContextAttention:
    """`ContextAttention` as operators of a compiled block (`joint.py`); it keeps nothing itself."""

    def __init__(self, mesh: Mesh, mode: ContextMode) -> None:
        self.axis, self._heads = mesh.context, mesh.ulysses
        made = JointGather if mode == "gather" else JointRing
        over = mesh.context if mode == "gather" else mesh.ring
        self._attend = [made(over, partial(self._seen, windowed)) for windowed in (False, True)]
        self._to_heads = JointToHeads(mesh.ulysses, self._exchange)
        self._to_tokens = JointToTokens(mesh.ulysses, self._exchange)

    def __call__(self, q_BTHd: Tensor, k_BTKd: Tensor, v_BTKd: Tensor, seen: Seen) -> Tensor:
        """(B, T, H, d), as `ContextAttention`."""
        at, first, whole, windowed = seen
        attend = self._attend[windowed]
        if self._heads.size == 1:
            return attend(q_BTHd, k_BTKd, v_BTKd, at, first, whole)[0]
        q, k, v = self._to_heads(q_BTHd, k_BTKd, v_BTKd)
        return self._to_tokens(attend(q, k, v, at, first, whole)[0])[0]

    def _seen(self, windowed: bool, tensors: Tensors) -> tuple[AttentionIntervals, list[Tensor]]:
        """What the queries see that attention is computed for here, and the places that each rank holds."""
        at, first, whole = tensors
        length = whole.shape[1]
        sight = AttentionIntervals(at, first, length, whole, windowed, self.axis.device)
        if self._heads.size == 1:
            return sight, _places(length, self.axis)
        unions = [torch.cat(group).sort().values for group in self._groups(length)]
        return sight.of(unions[self.axis.rank // self._heads.size]), unions

    def _exchange(self, local: int) -> Exchange:
        groups = self._groups(local * self.axis.size)
        return Exchange(self._heads, groups[self.axis.rank // self._heads.size])

    def _groups(self, length: int) -> list[list[Tensor]]:
        return groups_of(_places(length, self.axis), self._heads.size)


def split_sequences(decoder: Decoder, mesh: Mesh, mode: ContextMode, kept: RecomputeCache | None) -> None:
    """Let the decoder work on this rank's tokens of each sequence. With one context rank nothing is changed.

    It is then given the tokens that `share` cuts out, with their positions, and whole sequences' documents.
    `kept` remembers results for a second forward; without it attention is operators of a compiled block.
    """
    axis = mesh.context
    if axis.size == 1:
        return
    attention = JointContextAttention(mesh, mode) if kept is None else ContextAttention(mesh, mode, kept)

    def visible(
        queries: int, _keys: int, window: int | None, documents_BS: Tensor | None, like: Tensor
    ) -> AttentionIntervals | Seen:
        length = queries * axis.size
        at = zigzag(length, axis.size, axis.rank)
        found = sight(documents_BS, length, window, at, like.shape[0], like.device)
        if isinstance(attention, ContextAttention):
            return attention.united(found)
        return Seen(found.at, found.first, found.whole, found.windowed)

    decoder.visible = visible
    attend = attention if decoder.spec.mla is None else with_wide_values(attention)
    for block in decoder.each_block():
        block.attn.attend = attend
