"""Bytes that a mixture of experts adds to a step: tokens to their experts and back, and their balance."""

from __future__ import annotations

from typing import NamedTuple

from meshwright.planner.rank_view import RankView, Traffic, recomputed, share, widths
from meshwright.spec import ModelSpec, MoeSpec, RunSpec

NUMBER = 8
"""A count of copies in int64, or a sum of a step's balance in float64."""


class Copies(NamedTuple):
    """Copies of tokens that a rank sends to the experts of other ranks in a step, and gets from others.

    Summed over its layers and microbatches; where experts are in slices, a copy for each slice.
    """

    sent: float
    received: float


def routed_tokens(spec: RunSpec) -> int:
    """Tokens of a microbatch that one rank routes: its own, also where tensor ranks have them all."""
    return spec.micro_batch * spec.data.seq_len // (spec.layout.cp * spec.layout.tp)


def admitted(spec: RunSpec, moe: MoeSpec) -> float:
    """The share of a token's copies that find room, where the router is even."""
    length = spec.data.seq_len
    capacity = moe.capacity(length)
    return 1.0 if capacity is None else min(1.0, capacity * moe.experts / (moe.top_k * length))


def even_copies(at: RankView, moe: MoeSpec) -> Copies:
    """What crosses where each expert is chosen equally often, by the tokens of every rank."""
    spec, layout = at.spec, at.spec.layout
    leaving = routed_tokens(spec) * moe.top_k * admitted(spec, moe) * layout.etp
    found = spec.microbatches * at.routed * leaving * share(layout.ep * layout.etp)
    return Copies(found, found)


def expert_wire(at: RankView, moe: MoeSpec, copies: Copies | None) -> Traffic:
    """Tokens and their weights to their experts, what is found and gradients back
    (`parallel/expert_parallel.py`).

    A second forward sends again what it reads: the tokens, unless products are kept. How many copies come is
    told once.
    """
    spec, layout, width = at.spec, at.spec.layout, widths(at.spec)
    ranks = layout.ep * layout.etp
    sent, received = copies or even_copies(at, moe)
    rows, weight = spec.model.hidden * width.compute, width.exact
    trips = spec.microbatches * at.routed * min(layout.expert_parts, routed_tokens(spec))
    told = trips * (ranks - 1) * (moe.experts // layout.ep) * NUMBER
    forward = sent * (rows + weight) + received * rows
    backward = sent * rows + received * (rows + weight)
    again = sent * (rows + weight) if recomputed(spec, "matmul") else 0.0
    return {("expert", "all_to_all"): told + forward + backward + again if ranks > 1 else 0.0}


def balance_counts(model: ModelSpec, moe: MoeSpec) -> int:
    """Numbers that a step counts of the balance of all layers with experts of the model."""
    return sum(map(model.has_experts, range(model.layers))) * (moe.experts + 4)


def balance_wire(at: RankView, moe: MoeSpec) -> Traffic:
    """Messages of ranks that share sequences about their routing (`parallel/router_balance.py`)."""
    spec, layout = at.spec, at.spec.layout
    times = spec.microbatches * at.routed * share(layout.cp * layout.tp)
    counts = spec.micro_batch * moe.experts * 4 if moe.aux_loss else 0
    chosen = spec.micro_batch * spec.data.seq_len * moe.top_k * 4 if moe.capacity_factor is not None else 0
    return {("sequence", "all_reduce"): 2 * times * counts, ("sequence", "all_gather"): times * chosen}
