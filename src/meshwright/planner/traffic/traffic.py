"""Bytes that one rank sends in one optimiser step, by axis and operation: what the program records, exactly.

Bytes are those of a bandwidth-optimal algorithm over n ranks and a whole of S bytes: all-gather and
reduce-scatter S (n-1)/n, all-reduce twice that (Thakur et al. 2005). Every rank of one place in the pipeline
sends the same, but for tokens to their experts, which the router decides.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from meshwright.planner.rank_view import (
    RankView,
    Traffic,
    part_elements,
    place_of,
    recomputed,
    shards,
    share,
    widths,
)
from meshwright.planner.traffic.traffic_moe import Copies, balance_counts, balance_wire, expert_wire
from meshwright.schedule import steps
from meshwright.spec import ModelSpec, RunSpec
from meshwright.spec.parameters import Piece

SCALAR, _TOTALS = 8, 5
"""Bytes of a number that ranks agree on, in float64, and how many there are (`train/step.py`, `Totals`)."""


def traffic(spec: RunSpec, pipeline_rank: int = 0, copies: Copies | None = None) -> Traffic:
    """Everything that a rank sends in one step, forward to update.

    `copies` tells how many of the step's tokens the router sent across; by default it is even.
    """
    found: Counter[tuple[str, str]] = Counter()
    at = place_of(spec, pipeline_rank)
    for part in (*_states(at), _tensor(at), _shared(at), _context(at), _pipeline(at), _scalars(spec)):
        found.update(part)
    if spec.model.moe is not None:
        found.update(expert_wire(at, spec.model.moe, copies))
        found.update(balance_wire(at, spec.model.moe))
    return {key: float(sent) for key, sent in found.items() if sent}


def _states(at: RankView) -> Iterator[Traffic]:
    """Parameters and gradients between the data ranks (`parallel/data_parallel.py`), unit by unit."""
    gathers = _gathers(at)
    for name, listed in at.pieces().items():
        for routed in (False, True):
            pieces = [piece for _, piece in listed if (piece.experts is not None) == routed]
            yield _unit(at.spec, pieces, routed, gathers.get(name, 1))


def _gathers(at: RankView) -> dict[str, int]:
    """How often each unit is gathered in a step by ZeRO-3 without a pipeline; elsewhere each is once.

    A block is gathered for its forward and for its backward. The head and the last block stay whole in
    between; the first block stays whole from its backward to the next microbatch's forward; the embedding's
    backward reads nothing. Tied ends stay whole through the step.
    """
    each, blocks = at.spec.microbatches, at.spec.model.layers
    if at.spec.layout.zero < 3 or at.spec.layout.pp > 1:
        return {}
    found = dict.fromkeys(at.pieces(), 2 * each)
    found |= {"embed": 1 if at.spec.model.tied else each, "head": each}
    found["blocks.0"] = each + 1
    found[f"blocks.{blocks - 1}"] = each if blocks > 1 else 1
    return found


def _unit(spec: RunSpec, pieces: Sequence[Piece], routed: bool, gathers: int) -> Traffic:
    """What moves together: a unit's parameters, or its routed experts, apart from them."""
    layout, width, zero = spec.layout, widths(spec), spec.layout.zero
    axis, ranks = ("expert_data", layout.expert_data_ranks) if routed else ("shard", layout.shard_ranks)
    parts = ranks if zero else 1
    whole = parts * sum(part_elements(piece, parts) for piece in pieces)
    if parts == 1:
        axis, ranks = (axis, ranks) if layout.replicate == 1 else ("replicate", layout.replicate)
        return {(axis, "all_reduce"): 2 * whole * width.reduce * share(ranks)}
    each = spec.microbatches if layout.pp == 1 else 1  # in a pipeline everything is once a step
    return {
        (axis, "all_gather"): gathers * whole * width.compute * share(ranks),
        (axis, "reduce_scatter"): (each if zero >= 2 else 1) * whole * width.reduce * share(ranks),
        ("replicate", "all_reduce"): 2 * whole / ranks * width.master * share(layout.replicate),
    }


def _tensor(at: RankView) -> Traffic:
    """Activations between the tensor ranks (`parallel/tensor_parallel.py`)."""
    spec, layout, width, layers = at.spec, at.spec.layout, widths(at.spec), at.layers
    ends, mapped = at.embed + at.head, at.mapped
    tokens = spec.micro_batch * spec.data.seq_len // layout.cp
    channel = spec.microbatches * tokens * width.compute * share(layout.tp)
    once = channel * spec.model.hidden
    heads, shared = (channel * each for each in _into_attention(spec.model))
    again = layers if recomputed(spec, "matmul") else 0
    loss = spec.microbatches * 2 * tokens * width.exact * (layout.tp - 1) * at.head
    if layout.tp == 1:
        return {}
    if not layout.sequence_parallel:
        sums = (ends + layers + 2 * mapped + again) * once + layers * (heads + shared)
        whole = 2 * at.routed * once  # each rank routes its own tokens: what they find, and their gradients
        return {("tensor", "all_reduce"): 2 * sums, ("tensor", "all_gather"): loss + whole}
    mapped_again = mapped if again else 0
    gathered = (ends + layers + 3 * mapped + mapped_again) * once
    gathered += (2 * layers + again) * heads + (layers + again) * shared
    return {
        ("tensor", "all_gather"): gathered + loss,
        ("tensor", "reduce_scatter"): (ends + layers + 2 * mapped + again) * once + layers * (heads + shared),
    }


def _into_attention(model: ModelSpec) -> tuple[int, int]:
    """Channels of a token that enter the maps that make heads, and that all heads share as they are."""
    mla = model.mla
    return (model.hidden, 0) if mla is None else ((mla.q_rank or model.hidden) + mla.kv_rank, mla.rope_dim)


def _context(at: RankView) -> Traffic:
    """Queries, keys and values between the context ranks (`parallel/context_parallel.py`)."""
    spec, layout, model, width = at.spec, at.spec.layout, at.spec.model, widths(at.spec)
    heads, kv_heads = model.heads // layout.tp, layout.local_kv_heads(model.kv_heads)
    channels = spec.micro_batch * spec.data.seq_len // layout.cp * model.head_dim
    times = spec.microbatches * at.layers
    keys = times * 2 * channels * kv_heads  # elements of one rank's keys and values
    forwards, n, u = 1 + recomputed(spec, "attention"), layout.cp, layout.ulysses(model.kv_heads)
    if layout.context_mode == "gather":
        return {
            ("context", "all_gather"): forwards * keys * n * width.compute * share(n),
            ("context", "reduce_scatter"): keys * n * width.exact * share(n),
        }
    ring = n // u
    passed = (forwards + 1) * (ring - 1) * width.compute + (ring * width.exact if ring > 1 else 0)
    exchanges = 2 if spec.recompute.policy == "none" else 3
    exchanged = times * 2 * channels * (heads + kv_heads) * width.compute * share(u)
    return {("context", "shift"): keys * passed, ("context", "all_to_all"): exchanges * exchanged}


def _pipeline(at: RankView) -> Traffic:
    """Activations and their gradients from stage to stage, and the gradient of tied ends that lie apart."""
    spec, layout, width = at.spec, at.spec.layout, widths(at.spec)
    shared = layout.tp if layout.sequence_parallel else 1
    message = spec.micro_batch * spec.data.seq_len // layout.cp // shared * spec.model.hidden * width.compute
    listed = steps(at.schedule)[at.schedule.rank_of[at.own[0].index]]
    tied = 0.0
    if spec.model.tied and at.embed != at.head:
        (embed,) = [x for unit in at.pieces().values() for p, x in unit if p.name == "embed.weight"]
        tied = 2 * part_elements(embed, shards(spec)) * width.master * share(2)
    return {
        ("pipeline", "send"): message * sum(step.target is not None for step in listed),
        ("pipeline", "all_reduce"): tied,
    }


def _shared(at: RankView) -> Traffic:
    """Gradients of what several tensor ranks hold alike, each with a part of the sum; once a step."""
    spec, sent = at.spec, 0.0
    for listed in at.pieces().values():
        for _, piece in listed:
            if piece.summed:
                size = part_elements(piece, shards(spec)) * widths(spec).master
                sent += 2 * size * share(piece.copies)
    return {("tensor", "all_reduce"): sent}


def _scalars(spec: RunSpec) -> Traffic:
    """Once a step over all ranks: the norm's square, the loss, the next step's targets, failures and stops.

    With experts their counts go along: E + 4 numbers for each layer of the model that has some.
    """
    moe = spec.model.moe
    counts = balance_counts(spec.model, moe) if moe is not None else 0
    return {("world", "scalars"): 2 * (_TOTALS + counts) * SCALAR * share(spec.layout.world_size)}
