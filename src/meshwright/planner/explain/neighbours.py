"""The layouts that differ from a given one in one thing, and what each is better or worse at.

One thing is: ranks moved from one axis to another by a factor of two, another ZeRO stage, recompute policy,
schedule, number of stages a rank, microbatch, context mode or order of the axes, experts dealt otherwise, or
sequence parallelism switched.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import permutations
from typing import Any, Literal, get_args

from meshwright.planner.cost.model import CostModel
from meshwright.planner.explain.candidate import TIE, Candidate, Estimate
from meshwright.spec import Layout, RunSpec, UserError
from meshwright.spec.layout import ONE_STAGE, TWO_STAGES, ContextMode, Order, ScheduleName, ulysses_ranks
from meshwright.spec.rules import check
from meshwright.spec.sections import FullRecompute, NoRecompute, SelectiveRecompute
from meshwright.units import gigabytes, percent, seconds

TERMS = (
    "parameters",
    "gradients",
    "optimiser",
    "activations",
    "logits",
    "buffers",
    "fragmentation",
    "context",
    "communicators",
)
"""What a rank's memory is made of, as `Memory` has it."""
_WORTH = 0.25
"""What goes the other way is told of from this share of what changes most."""
_NAMED = {
    "optimiser": "optimiser states",
    "context": "the device's context",
    "communicators": "communicators' buffers",
}
_AXES = ("replicate", "dp", "cp", "tp", "pp")
_LOOPED = ("interleaved", "bfs")
_POLICIES = (NoRecompute(), SelectiveRecompute(), FullRecompute())

Verdict = Literal["fits", "faster", "as fast", "slower", "does not fit"]
"""'fits' where the layout that it starts from does not."""
BETTER = ("fits", "faster")


@dataclass(frozen=True)
class Change:
    """A run whose layout differs in one thing."""

    words: str
    """What differs: 'tp 4 to 8, dp 8 to 4'."""
    keys: tuple[str, ...]
    """The keys that differ."""
    spec: RunSpec


@dataclass(frozen=True)
class Neighbour:
    """A change, and why the layout that it starts from has the edge, or does not."""

    change: Change
    estimate: Estimate
    verdict: Verdict
    why: str
    """One sentence, without the change."""
    most: str
    """The part of the time, or the term of memory, that changes most for the worse, or the better."""
    by: float
    """Seconds or bytes that it changes by."""
    distance: float
    """How far it is from being as good: the share by which it is slower, or over the memory."""

    def to_json(self) -> dict[str, Any]:
        return {
            "change": self.change.words,
            "verdict": self.verdict,
            "why": self.why,
            "most": self.most,
            "by": self.by,
            "seconds": self.estimate.seconds,
            "memory": self.estimate.memory.device,
            "layout": self.change.spec.layout.model_dump(mode="json"),
            "recompute": self.change.spec.recompute.model_dump(mode="json"),
        }


def estimate(spec: RunSpec, on: CostModel) -> Estimate:
    """Time and memory of a layout."""
    return Candidate(spec, on, {}).estimate


def neighbours(
    chosen: Candidate,
    listed: Sequence[tuple[Change, Candidate]],
    capacity: float,
    most: int | None = None,
) -> tuple[Neighbour, ...]:
    """The neighbours of a layout, the nearest to being as good first; those that are better lead.

    With `most`, so many of the neighbours of a layout that fits: those that are further by their time alone
    are not looked at any closer.
    """
    if most is None:
        found = [_judged(chosen.estimate, change, each.estimate, capacity) for change, each in listed]
        return tuple(sorted(found, key=_rank))
    nearest: list[Neighbour] = []
    step = chosen.seconds  # timed first: its path through the lists bounds the others
    queue = [(_distance(each.least / step), place, False) for place, (_, each) in enumerate(listed)]
    judged: dict[int, Neighbour] = {}
    heapq.heapify(queue)
    while queue and len(nearest) < most:
        _, place, timed = heapq.heappop(queue)
        change, each = listed[place]
        if place in judged:
            nearest.append(judged[place])
        elif not timed:
            heapq.heappush(queue, (_distance(each.seconds / step), place, True))
        else:
            judged[place] = _judged(chosen.estimate, change, each.estimate, capacity)
            heapq.heappush(queue, (_rank(judged[place]), place, True))
    return tuple(nearest)


def _rank(neighbour: Neighbour) -> tuple[bool, float]:
    """The lower, the earlier it is told of."""
    return neighbour.verdict not in BETTER, neighbour.distance


def _distance(times: float) -> tuple[bool, float]:
    """The lowest rank of a neighbour that takes so many times as long at least."""
    faster = times < 1 - TIE
    return not faster, times - 1 if faster else max(times - 1, 0.0)


# Which there are.


def changes(spec: RunSpec) -> list[Change]:
    """Every neighbour that the rules accept, once; what is not changed stays, the microbatch included."""
    base = spec.layout.model_copy(update={"micro_batch": spec.micro_batch})
    found: list[Change] = []
    seen = [base]
    for words, update in (
        *_moved(base),
        *_states(base),
        *_pipelined(base),
        *_cut(spec, base),
        *_placed(base),
    ):
        layout = base.model_copy(update=update)
        made = spec.model_copy(update={"layout": layout})
        if _legal(made) and not _same(layout, base) and layout not in seen:
            seen.append(layout)
            found.append(Change(words, tuple(update), made))
    for policy in _POLICIES:
        if policy.policy != spec.recompute.policy:
            words = f"recompute.policy {spec.recompute.policy} to {policy.policy}"
            made = spec.model_copy(update={"layout": base, "recompute": policy})
            found.append(Change(words, ("recompute",), made))
    return found


Update = tuple[str, dict[str, object]]


def _moved(layout: Layout) -> Iterator[Update]:
    """Twice as many ranks on one axis, half as many on another; experts alike."""
    for more, less in permutations(_AXES, 2):
        if (ranks := getattr(layout, less)) % 2 == 0:
            both = {more: 2 * getattr(layout, more), less: ranks // 2}
            yield ", ".join(_step(layout, name, size) for name, size in both.items()), dict(both)
    if layout.ep * layout.etp > 1:
        for more, less in permutations(("ep", "etp"), 2):
            if (ranks := getattr(layout, less)) % 2 == 0:
                both = {more: 2 * getattr(layout, more), less: ranks // 2}
                yield ", ".join(_step(layout, name, size) for name, size in both.items()), dict(both)
    for name in ("ep", "etp"):
        yield from _scaled(layout, name, getattr(layout, name))


def _states(layout: Layout) -> Iterator[Update]:
    if layout.shard_ranks > 1:
        yield from (_one(layout, "zero", stage) for stage in range(4))


def _pipelined(layout: Layout) -> Iterator[Update]:
    if layout.pp == 1:
        return
    for name in get_args(ScheduleName):
        chunks = 1 if name in ONE_STAGE else 2 if name in TWO_STAGES else max(2, layout.chunks)
        virtual = {} if chunks == layout.chunks else {"virtual": chunks}
        words, update = _one(layout, "schedule", name)
        yield (
            words + (f" with {chunks} stages a rank" if virtual and chunks > 1 else ""),
            {**update, **virtual},
        )
    if layout.schedule in _LOOPED:
        yield from _scaled(layout, "virtual", layout.chunks)


def _cut(spec: RunSpec, layout: Layout) -> Iterator[Update]:
    yield from _scaled(layout, "micro_batch", spec.micro_batch)
    local = layout.local_kv_heads(spec.model.kv_heads)
    for mode in get_args(ContextMode) if layout.cp > 1 else ():
        joint = mode == "ring+ulysses" and ulysses_ranks(layout.cp, local, mode) in (1, layout.cp)
        if not joint:  # else it is one of the two by another name
            yield _one(layout, "context_mode", mode)
    if layout.tp > 1:
        yield _one(layout, "sequence_parallel", not layout.sequence_parallel)


def _placed(layout: Layout) -> Iterator[Update]:
    yield from (_one(layout, "order", order) for order in get_args(Order))


def _scaled(layout: Layout, name: str, size: int) -> Iterator[Update]:
    yield _step(layout, name, 2 * size, size), {name: 2 * size}
    if size % 2 == 0:
        yield _step(layout, name, size // 2, size), {name: size // 2}


def _one(layout: Layout, name: str, value: object) -> Update:
    return _step(layout, name, value), {name: value}


def _step(layout: Layout, name: str, value: object, before: object = None) -> str:
    old = getattr(layout, name) if before is None else before
    return f"{name} {_shown(old)} to {_shown(value)}"


def _shown(value: object) -> str:
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else str(value)


def _legal(spec: RunSpec) -> bool:
    try:
        check(spec)
    except UserError:  # a neighbour that cannot be is none
        return False
    return spec.model.moe is not None or spec.layout.ep * spec.layout.etp == 1


def _same(one: Layout, other: Layout) -> bool:
    """Whether two layouts differ in their order only, and that moves no axis."""
    used = [[name for name, ranks in each.axes_in_order if ranks > 1] for each in (one, other)]
    return used[0] == used[1] and one.model_copy(update={"order": other.order}) == other


# What they are worth.


def _judged(chosen: Estimate, change: Change, other: Estimate, capacity: float) -> Neighbour:
    over = other.memory.device - capacity
    if over > 0:
        return _too_large(chosen, change, other, capacity)
    share = other.seconds / chosen.seconds - 1
    if not chosen.fits(capacity):
        term, by = _largest({name: -size for name, size in _growth(chosen, other).items()})
        why = f"fits, with {gigabytes(by)} less of {named(term)}, in {seconds(other.seconds)} a step"
        return Neighbour(change, other, "fits", why, term, -by, share)
    if abs(share) <= TIE:
        more = other.memory.device - chosen.memory.device
        needs = (
            f"{gigabytes(abs(more))} {'more' if more > 0 else 'less'} memory" if more else "as much memory"
        )
        term, by = _largest({name: abs(size) for name, size in _growth(chosen, other).items()})
        return Neighbour(change, other, "as fast", f"as fast, with {needs}", term, by, abs(share))
    grown = {name: other.parts[name] - chosen.parts[name] for name in chosen.parts}
    sign = 1 if share > 0 else -1
    part, by = _largest({name: sign * size for name, size in grown.items()})
    against, less = _largest({name: -sign * size for name, size in grown.items()})
    verdict: Verdict = "slower" if share > 0 else "faster"
    why = f"{percent(abs(share))} {verdict}: {part} {_signed(sign * by)}"
    if less > _WORTH * by:
        why += f", {against} {_signed(-sign * less)}"
    return Neighbour(change, other, verdict, why, part, sign * by, share)


def _signed(amount: float) -> str:
    return f"{'-' if amount < 0 else '+'}{seconds(abs(amount))}"


def _too_large(chosen: Estimate, change: Change, other: Estimate, capacity: float) -> Neighbour:
    over = other.memory.device - capacity
    term, by = _largest(_growth(chosen, other))
    grown = f"{gigabytes(by)} more of {named(term)}"
    if by <= 0:  # the layout that it starts from does not fit either
        term, by = _largest({name: getattr(other.memory, name) for name in TERMS})
        grown = f"{gigabytes(by)} of it {named(term)}"
    why = f"needs {gigabytes(other.memory.device)}, {gigabytes(over)} too much: {grown}"
    slower = other.seconds / chosen.seconds - 1
    return Neighbour(change, other, "does not fit", why, term, by, max(over / capacity, slower))


def named(term: str) -> str:
    """A term of memory in words."""
    return _NAMED.get(term, term)


def _growth(chosen: Estimate, other: Estimate) -> dict[str, float]:
    return {name: getattr(other.memory, name) - getattr(chosen.memory, name) for name in TERMS}


def _largest(changes: dict[str, float]) -> tuple[str, float]:
    name = max(changes, key=lambda each: changes[each])
    return name, changes[name]
