"""The exchanges of islands: what a rank sends of each fragment, in which steps, and what it holds for them.

A fragment is begun at a step of its own in each period of `outer.every` steps, and its result is used
`outer.delay` steps later (`islands/outer.py`). After a run's last step everything is exchanged.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from meshwright.planner.group_shapes import GroupShape, axes
from meshwright.planner.rank_view import RankView, part_elements, widths
from meshwright.planner.traffic.message import Message, Phase
from meshwright.spec import RunSpec
from meshwright.spec.eight_bit import block_of
from meshwright.spec.parameter_groups import run_parameters
from meshwright.spec.parameters import Parameter

BIAS, UPDATES, STOPS = 4, 8, 8
"""Bytes of a router's bias, of the number of an island's updates, and of that of ranks asked to stop."""


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
        place = spec.outer.fragment_of(name, spec.model.head_embeds)
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
            if spec.model.head_embeds and view.embed != view.head:
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


def fullest_step(view: RankView) -> int:
    """The step of the second period that begins an exchange and after which most bytes are under way.

    1 where all ranks step together.
    """
    spec, every = view.spec, view.spec.outer.every
    if spec.step_groups == 1:
        return 1
    sizes = difference_bytes(view)
    steps = [at for at in range(every + 1, 2 * every + 1) if spec.outer.begins(at, last=0)]
    return max(steps, key=lambda at: sum(sizes[part] for part, _ in spec.outer.under_way(at + 1)))


# Messages and memory -----------------------------------------------------------------------------------


def messages(view: RankView, number: int | None) -> Iterator[Message]:
    """How far islands' parameters have moved, and ranks that were asked to stop (`islands/outer.py`).

    `number` is that of the step, from 1; by default exchanges count in the mean over a period.
    """
    spec, groups = view.spec, axes(view.spec.layout)
    if spec.step_groups == 1:
        return
    parts, width, islands = fragments(view), widths(spec).exact, groups.replicate.ranks
    call = partial(Message, "replicate", group=groups.replicate, phase=Phase.STEP, where="unit")
    for part, count in begun(spec, number).items():
        if spec.outer.quorum is not None:  # to each other island (`comm/mailbox.py`)
            each = count * (islands - 1)
            yield from (call("send", size, width, count=each) for size in parts[part].units)
            yield from (call("send", size, BIAS, count=each) for size in parts[part].biases)
            continue
        if spec.outer.compressed:
            yield from (call("all_gather", islands * size, 1, count=count) for size in parts[part].encoded)
        else:
            yield from (call("all_reduce", size, width, count=count) for size in parts[part].units)
        yield from (call("all_reduce", size, BIAS, count=count) for size in parts[part].biases)
        yield call("scalars", 1, STOPS, count=count)
    ends = GroupShape(2, groups.pipeline.stride * (spec.layout.pp - 1))
    for part, count in ended(spec, number).items():
        apart = parts[part].apart, widths(spec).exact
        yield Message("pipeline", "broadcast", *apart, ends, Phase.STEP, "unit", count)


def shared_numbers(spec: RunSpec) -> int:
    """Numbers that islands hold alike for each of the parameters: its anchor and outer momentum."""
    return 2 if spec.step_groups > 1 else 0


def own_numbers(spec: RunSpec) -> int:
    """Numbers that each island holds besides for each of the parameters: what it has not sent yet."""
    return int(spec.step_groups > 1 and spec.outer.kept_error > 0)


def bytes_held(view: RankView) -> int:
    """Bytes that a rank of an island holds for its exchanges, at their most."""
    spec, exact = view.spec, widths(view.spec).exact
    if spec.step_groups == 1:
        return 0
    parts, sizes = fragments(view), difference_bytes(view)
    held = spec.outer.under_way(fullest_step(view) + 1)
    biases = BIAS * sum(map(sum, (part.biases for part in parts)))
    units = sum(map(sum, (part.units for part in parts)))
    states = shared_numbers(spec) + own_numbers(spec)
    return states * exact * units + biases + UPDATES + sum(sizes[part] for part, _ in held)


def difference_bytes(view: RankView) -> list[int]:
    """Bytes of how far each fragment of a rank has moved from its anchor, or where messages are compressed,
    of the one that is sent of it and of those that come from all islands."""
    spec, exact, parts = view.spec, widths(view.spec).exact, fragments(view)
    biases = [BIAS * sum(part.biases) for part in parts]
    if spec.outer.compressed:
        messages = 1 + spec.step_groups
        return [messages * sum(part.encoded) + own for part, own in zip(parts, biases, strict=True)]
    return [exact * sum(part.units) + own for part, own in zip(parts, biases, strict=True)]


def decoded_bytes(view: RankView) -> int:
    """Bytes of the unit whose compressed messages take most to write, or to add up."""
    if not view.spec.outer.compressed:
        return 0
    exact, parts = widths(view.spec).exact, fragments(view)
    pairs = (pair for part in parts for pair in zip(part.units, part.encoded, strict=True))
    return max((exact * elements + 2 * sent for elements, sent in pairs), default=0)


def bytes_at_once(view: RankView) -> int:
    """Bytes of an exchange that ends in the step in which it begins, and of the unit that is encoded or
    decoded then."""
    spec = view.spec
    if spec.step_groups == 1:
        return 0
    return (0 if spec.outer.delay else max(difference_bytes(view))) + decoded_bytes(view)
