"""Bytes that one rank sends in one optimiser step, by axis and operation: what the program records, exactly.

Bytes are those of a bandwidth-optimal algorithm over n ranks and a whole of S bytes: all-gather and
reduce-scatter S (n-1)/n, all-reduce twice that (Thakur et al. 2005). Every rank of one place in the pipeline
sends the same.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from math import ceil, prod

from meshwright.schedule import Schedule, schedule_of, steps
from meshwright.spec import ModelSpec, RunSpec
from meshwright.spec.parameters import Parameter, Piece, parameters_of, piece_of
from meshwright.spec.parts import SavedOp, SelectiveRecompute
from meshwright.spec.stages import Stage, stages

Traffic = dict[tuple[str, str], float]
"""(axis, operation) -> bytes."""

BYTES = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2}
SCALAR = 8
"""A number that ranks agree on, in float64."""


@dataclass(frozen=True)
class Widths:
    """Bytes of an element: to compute in, of master weights, of gradients on the wire, of exact sums."""

    compute: int
    master: int
    reduce: int
    exact: int


def widths(spec: RunSpec) -> Widths:
    """The formats of a run; fp64 is fp64 throughout."""
    compute = BYTES[spec.precision.compute]
    if compute == 8:
        return Widths(8, 8, 8, 8)
    return Widths(compute, 4, BYTES[spec.precision.reduce], 4)


@dataclass(frozen=True)
class _Place:
    """A rank's place in the pipeline: its stages, and what of the model they hold."""

    spec: RunSpec
    schedule: Schedule
    own: tuple[Stage, ...]

    @property
    def layers(self) -> int:
        return sum(len(stage.blocks) for stage in self.own)

    @property
    def embed(self) -> bool:
        return any(stage.embed for stage in self.own)

    @property
    def head(self) -> bool:
        return any(stage.head for stage in self.own)

    def pieces(self) -> dict[str, list[tuple[Parameter, Piece]]]:
        """What a tensor rank holds of each unit's parameters."""
        spec, layout = self.spec, self.spec.layout
        return {
            unit: [(p, piece_of(p, spec.model, layout.tp, 0, layout.sequence_parallel)) for p in listed]
            for unit, listed in parameters_of(spec.model, self.own).items()
        }


def _place(spec: RunSpec, rank: int) -> _Place:
    schedule = schedule_of(spec.layout, spec.microbatches)
    every = stages(spec.model, spec.layout, spec.data.seq_len)
    return _Place(spec, schedule, tuple(every[index] for index in schedule.stages_of(rank)))


def traffic(spec: RunSpec, pipeline_rank: int = 0) -> Traffic:
    """Everything that a rank sends in one step, forward to update."""
    found: Counter[tuple[str, str]] = Counter()
    at = _place(spec, pipeline_rank)
    for part in (_states(at), _tensor(at), _shared(at), _context(at), _pipeline(at), _scalars(spec)):
        found.update(part)
    return {key: float(sent) for key, sent in found.items() if sent}


def _share(ranks: int) -> float:
    return (ranks - 1) / ranks


def shards(spec: RunSpec) -> int:
    """Ranks that each hold a part of the states."""
    return spec.layout.shard_ranks if spec.layout.zero else 1


def part_elements(piece: Piece, ranks: int) -> int:
    """Elements that one of `ranks` stores of a piece, padding included."""
    rows, *others = piece.shape
    return ceil(rows / ranks) * prod(others)


def recomputed(spec: RunSpec, kind: SavedOp) -> bool:
    """Whether a block's backward first does again what is of this kind."""
    if isinstance(spec.recompute, SelectiveRecompute):
        return kind not in spec.recompute.save
    return spec.recompute.policy == "full"


def _states(at: _Place) -> Traffic:
    """Parameters and gradients between the data ranks (`parallel/data.py`)."""
    spec, layout, width = at.spec, at.spec.layout, widths(at.spec)
    ranks, zero = shards(spec), layout.zero
    units = [
        ranks * sum(part_elements(piece, ranks) for _, piece in listed) for listed in at.pieces().values()
    ]
    whole = sum(units)
    if ranks == 1:
        axis, size = (
            ("shard", layout.shard_ranks) if layout.replicate == 1 else ("replicate", layout.replicate)
        )
        return {(axis, "all_reduce"): 2 * whole * width.reduce * _share(size)}
    gathered = reduced = whole  # once a step in a pipeline
    if layout.pp == 1 and zero >= 2:
        reduced = spec.microbatches * whole
    if layout.pp == 1 and zero == 3:  # the first unit and the last are kept from forward to backward
        gathered = spec.microbatches * (2 * whole - units[0] - units[-1])
    return {
        ("shard", "all_gather"): gathered * width.compute * _share(ranks),
        ("shard", "reduce_scatter"): reduced * width.reduce * _share(ranks),
        ("replicate", "all_reduce"): 2 * whole / ranks * width.master * _share(layout.replicate),
    }


def _tensor(at: _Place) -> Traffic:
    """Activations between the tensor ranks (`parallel/tensor.py`)."""
    spec, layout, width, layers = at.spec, at.spec.layout, widths(at.spec), at.layers
    ends = at.embed + at.head
    tokens = spec.micro_batch * spec.data.seq_len // layout.cp
    channel = spec.microbatches * tokens * width.compute * _share(layout.tp)
    once = channel * spec.model.hidden
    mapped, shared = (channel * each for each in _into_attention(spec.model))
    again = layers if recomputed(spec, "matmul") else 0
    loss = spec.microbatches * 2 * tokens * width.exact * (layout.tp - 1) * at.head
    if layout.tp == 1:
        return {}
    if not layout.sequence_parallel:
        sums = (ends + 3 * layers + again) * once + layers * (mapped + shared)
        return {("tensor", "all_reduce"): 2 * sums, ("tensor", "all_gather"): loss}
    gathered = (ends + 4 * layers + again) * once + (2 * layers + again) * mapped + (layers + again) * shared
    return {
        ("tensor", "all_gather"): gathered + loss,
        ("tensor", "reduce_scatter"): (ends + 3 * layers + again) * once + layers * (mapped + shared),
    }


def _into_attention(model: ModelSpec) -> tuple[int, int]:
    """Channels of a token that enter the maps that make heads, and that all heads share as they are."""
    mla = model.mla
    return (model.hidden, 0) if mla is None else ((mla.q_rank or model.hidden) + mla.kv_rank, mla.rope_dim)


def _context(at: _Place) -> Traffic:
    """Queries, keys and values between the context ranks (`parallel/context.py`)."""
    spec, layout, model, width = at.spec, at.spec.layout, at.spec.model, widths(at.spec)
    heads, kv_heads = model.heads // layout.tp, layout.local_kv_heads(model.kv_heads)
    channels = spec.micro_batch * spec.data.seq_len // layout.cp * model.head_dim
    times = spec.microbatches * at.layers
    keys = times * 2 * channels * kv_heads  # elements of one rank's keys and values
    forwards, n, u = 1 + recomputed(spec, "attention"), layout.cp, layout.ulysses(model.kv_heads)
    if layout.context_mode == "gather":
        return {
            ("context", "all_gather"): forwards * keys * n * width.compute * _share(n),
            ("context", "reduce_scatter"): keys * n * width.exact * _share(n),
        }
    ring = n // u
    passed = (forwards + 1) * (ring - 1) * width.compute + (ring * width.exact if ring > 1 else 0)
    exchanges = 2 if spec.recompute.policy == "none" else 3
    exchanged = times * 2 * channels * (heads + kv_heads) * width.compute * _share(u)
    return {("context", "shift"): keys * passed, ("context", "all_to_all"): exchanges * exchanged}


def _pipeline(at: _Place) -> Traffic:
    """Activations and their gradients from stage to stage, and the gradient of tied ends that lie apart."""
    spec, layout, width = at.spec, at.spec.layout, widths(at.spec)
    shared = layout.tp if layout.sequence_parallel else 1
    message = spec.micro_batch * spec.data.seq_len // layout.cp // shared * spec.model.hidden * width.compute
    listed = steps(at.schedule)[at.schedule.rank_of[at.own[0].index]]
    tied = 0.0
    if spec.model.tied and at.embed != at.head:
        (embed,) = [x for unit in at.pieces().values() for p, x in unit if p.name == "embed.weight"]
        tied = 2 * part_elements(embed, shards(spec)) * width.master * _share(2)
    return {
        ("pipeline", "send"): message * sum(step.target is not None for step in listed),
        ("pipeline", "all_reduce"): tied,
    }


def _shared(at: _Place) -> Traffic:
    """Gradients of what several tensor ranks hold alike, each with a part of the sum; once a step."""
    spec, sent = at.spec, 0.0
    for listed in at.pieces().values():
        for _, piece in listed:
            if piece.summed:
                size = part_elements(piece, shards(spec)) * widths(spec).master
                sent += 2 * size * _share(piece.copies)
    return {("tensor", "all_reduce"): sent}


def _scalars(spec: RunSpec) -> Traffic:
    """The number of targets and the loss over all data ranks, the gradient norm over all its parts."""
    layout = spec.layout
    return {
        ("data", "scalars"): 2 * 2 * SCALAR * _share(layout.data_ranks * layout.cp * layout.pp),
        ("shard", "scalars"): 2 * SCALAR * _share(shards(spec)),
        ("tensor", "scalars"): 2 * SCALAR * _share(layout.tp),
        ("pipeline", "scalars"): 2 * SCALAR * _share(layout.pp),
    }
