"""The exchanges of islands: what a rank sends of each fragment, in which steps, and what is under way.

A fragment is begun at a step of its own in each period of `outer.every` steps, and its result is used
`outer.delay` steps later (`islands/outer.py`). After a run's last step everything is exchanged.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from meshwright.planner.rank_view import RankView, part_elements, widths
from meshwright.spec import RunSpec
from meshwright.spec.eight_bit import block_of
from meshwright.spec.parameter_groups import run_parameters
from meshwright.spec.parameters import Parameter


@dataclass(frozen=True)
class Fragment:
    """A rank's part of a fragment, in elements; each entry of the lists is a message."""

    units: tuple[int, ...]
    """Parameters of each unit, padding included."""
    encoded: tuple[int, ...]
    """Bytes of each unit's message; none where it is of exact numbers."""
    biases: tuple[int, ...]
    """Biases of each router."""
    apart: int
    """Tied embeddings that the first and the last pipeline rank hold apart."""


def exchanged_width(spec: RunSpec) -> float:
    """Bytes in which an exchange sends a number of the difference between an anchor and its parameter, in the
    mean of a model's numbers."""
    if not spec.outer.compressed:
        return widths(spec).exact
    every = [p for unit in run_parameters(spec).values() for p in unit if p.trainable]
    sent = sum(_encoded_bytes(spec, parameter, parameter.size) for parameter in every)
    return sent / sum(parameter.size for parameter in every)


def _encoded_bytes(spec: RunSpec, parameter: Parameter, elements: int) -> int:
    """Bytes of the message of some elements of a parameter (`islands/outer_compression.py`)."""
    if len(parameter.shape) < 2:
        return elements * widths(spec).exact
    block = block_of(parameter, spec.model.heads) if spec.outer.has_blocks else 1
    return elements // block * spec.outer.block_bytes(block, widths(spec).exact)


def fragments(view: RankView) -> list[Fragment]:
    """The fragments of a rank of one of several islands."""
    spec, layout, moe = view.spec, view.spec.layout, view.spec.model.moe
    units: list[list[int]] = [[] for _ in range(spec.outer.fragments)]
    encoded: list[list[int]] = [[] for _ in units]
    biases: list[list[int]] = [[] for _ in units]
    apart = [0 for _ in units]
    for name, listed in view.pieces().items():
        place = spec.outer.fragment_of(name, spec.model.tied)
        for routed, ranks in ((False, layout.shard_ranks), (True, layout.expert_data_ranks)):
            ranks = ranks if layout.zero else 1
            every = [(p, piece) for p, piece in listed if piece.routed == routed]
            held = [(p, piece) for p, piece in every if p.trainable]
            if held:
                parts = [(p, part_elements(piece, ranks)) for p, piece in held]
                units[place].append(sum(size for _, size in parts))
                if spec.outer.compressed:
                    encoded[place].append(sum(_encoded_bytes(spec, p, size) for p, size in parts))
            if routed and every and moe is not None and moe.bias:
                biases[place].append(moe.experts)
            if spec.model.tied and view.embed != view.head:
                apart[place] += sum(part_elements(q, ranks) for p, q in held if p.name == "embed.weight")
    each = zip(units, encoded, biases, apart, strict=True)
    return [Fragment(tuple(own), tuple(sent), tuple(counts), both) for own, sent, counts, both in each]


def begun(spec: RunSpec, step: int | None) -> dict[int, float]:
    """Fragment -> number of its exchanges that begin in `step`, from 1; the mean of all steps if None."""
    outer = spec.outer
    if step is None:
        return dict.fromkeys(range(outer.fragments), 1 / outer.every)
    return dict.fromkeys(outer.begins(step, spec.train.total_steps), 1.0)


def ended(spec: RunSpec, step: int | None) -> dict[int, float]:
    """Fragment -> number of its exchanges whose result is used after a step, as `begun` counts them."""
    if step is None:
        return begun(spec, step)
    outer, last = spec.outer, spec.train.total_steps
    until = step if step == last else step - outer.delay + 1
    found = Counter(
        part for at in range(max(1, step - outer.delay), until) for part in outer.begins(at, last)
    )
    return {**(found + Counter(outer.begins(step, last) if step == last else ()))}


def fullest_step(spec: RunSpec, sizes: list[int]) -> int:
    """The step of the second period that begins an exchange and after which most bytes are under way.

    `sizes` are the bytes of each fragment.
    """
    every = spec.outer.every
    steps = [at for at in range(every + 1, 2 * every + 1) if spec.outer.begins(at, last=0)]
    return max(steps, key=lambda at: sum(sizes[part] for part, _ in spec.outer.under_way(at + 1)))
