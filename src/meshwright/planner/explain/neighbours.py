"""Layouts that differ from a given one in one thing, and what each gains or loses.

One thing is: ranks moved from one axis to another by a factor of two, another ZeRO stage, recompute policy,
schedule, number of stages a rank, microbatch, context mode or order of the axes, experts dealt otherwise, or
sequence parallelism switched.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import permutations
from typing import Any, Literal, get_args

from meshwright.planner.explain.candidate import TIE, Candidate
from meshwright.planner.layout_space import LOOPED, POLICIES
from meshwright.planner.memory.generic import Memory
from meshwright.spec import Layout, RunSpec, UserError
from meshwright.spec.layout import ONE_STAGE, TWO_STAGES, ContextMode, Order, ScheduleName, ulysses_ranks
from meshwright.spec.rules import check
from meshwright.units import gigabytes, percent, seconds

TERMS = tuple(field.name for field in fields(Memory) if field.name != "rank")
"""Terms of a rank's memory, as in `Memory`."""
_WORTH = 0.25
"""An opposite change is reported if it is at least this share of the largest change."""
_NAMED = {
    "optimiser": "optimiser states",
    "context": "the device's context",
    "communicators": "communicators' buffers",
}

Verdict = Literal["fits", "faster", "as fast", "slower", "does not fit"]
"""'fits' is for a neighbour of a layout that does not fit itself."""
BETTER = ("fits", "faster")


@dataclass(frozen=True)
class Change:
    """A run whose layout differs in one thing."""

    words: str
    """The difference: 'tp 4 to 8, dp 8 to 4'."""
    keys: tuple[str, ...]
    """The keys that differ."""
    spec: RunSpec


@dataclass(frozen=True)
class Neighbour:
    """A change, and why the layout that it starts from is better, or is not."""

    change: Change
    estimate: Candidate
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
        """Plain values."""
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


def neighbours(
    chosen: Candidate,
    listed: Sequence[tuple[Change, Candidate]],
    capacity: float,
    most: int | None = None,
) -> tuple[Neighbour, ...]:
    """The neighbours of a layout, those that are better first, then by how close to it they are.

    With `most`, only so many for a layout that fits: memory is not computed for those that are further away
    by their time alone.
    """
    if most is None:
        return tuple(sorted((_judged(chosen, change, each, capacity) for change, each in listed), key=_rank))
    nearest: list[Neighbour] = []
    step = chosen.seconds  # timed first: its path through the schedule bounds the others
    queue = [(_distance(each.bound / step), place, False) for place, (_, each) in enumerate(listed)]
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
            judged[place] = _judged(chosen, change, each, capacity)
            heapq.heappush(queue, (_rank(judged[place]), place, True))
    return tuple(nearest)


def _rank(neighbour: Neighbour) -> tuple[bool, float]:
    """Sort key: the lower, the earlier it is listed."""
    return neighbour.verdict not in BETTER, neighbour.distance


def _distance(times: float) -> tuple[bool, float]:
    """Best possible sort key of a neighbour whose step takes at least `times` as long."""
    faster = times < 1 - TIE
    return not faster, times - 1 if faster else max(times - 1, 0.0)


# Enumeration.


def changes(spec: RunSpec) -> list[Change]:
    """Every neighbour that the rules accept, once; all else stays, the microbatch included."""
    base = spec.layout.model_copy(update={"micro_batch": spec.micro_batch})
    found: list[Change] = []
    seen = [base]
    for words, update in _updates(spec, base):
        layout = base.model_copy(update=update)
        made = spec.model_copy(update={"layout": layout})
        if _legal(made) and not _same(layout, base) and layout not in seen:
            seen.append(layout)
            found.append(Change(words, tuple(update), made))
    for name, policy in POLICIES.items():
        if name != spec.recompute.policy:
            words = f"recompute.policy {spec.recompute.policy} to {name}"
            made = spec.model_copy(update={"layout": base, "recompute": policy})
            found.append(Change(words, ("recompute",), made))
    return found


Update = tuple[str, dict[str, object]]


def _updates(spec: RunSpec, layout: Layout) -> Iterator[Update]:
    """Changes of one thing in words and values; some are illegal, or equal to others."""
    yield from _traded(layout, ("replicate", "dp", "cp", "tp", "pp"))
    if layout.ep * layout.etp > 1:
        yield from _traded(layout, ("ep", "etp"))
    for name in ("ep", "etp"):
        yield from _scaled(layout, name, getattr(layout, name))
    if layout.shard_ranks > 1:
        yield from (_one(layout, "zero", stage) for stage in range(4))
    if layout.pp > 1:
        yield from _schedules(layout)
    yield from _scaled(layout, "micro_batch", spec.micro_batch)
    local = layout.local_kv_heads(spec.model.kv_heads)
    for mode in get_args(ContextMode) if layout.cp > 1 else ():
        joint = mode == "ring+ulysses" and ulysses_ranks(layout.cp, local, mode) in (1, layout.cp)
        if not joint:  # else it is another mode's second name
            yield _one(layout, "context_mode", mode)
    if layout.tp > 1:
        yield _one(layout, "sequence_parallel", not layout.sequence_parallel)
    yield from (_one(layout, "order", order) for order in get_args(Order))


def _traded(layout: Layout, axes: Sequence[str]) -> Iterator[Update]:
    """Twice as many ranks on one axis, half as many on another."""
    for more, less in permutations(axes, 2):
        if (ranks := getattr(layout, less)) % 2 == 0:
            both: dict[str, object] = {more: 2 * getattr(layout, more), less: ranks // 2}
            yield ", ".join(_step(layout, name, size) for name, size in both.items()), both


def _schedules(layout: Layout) -> Iterator[Update]:
    for name in get_args(ScheduleName):
        chunks = 1 if name in ONE_STAGE else 2 if name in TWO_STAGES else max(2, layout.chunks)
        words, update = _one(layout, "schedule", name)
        if chunks == layout.chunks:
            yield words, update
        else:
            words += f" with {chunks} stages a rank" if chunks > 1 else ""
            yield words, {**update, "virtual": chunks}
    if layout.schedule in LOOPED:
        yield from _scaled(layout, "virtual", layout.chunks)


def _scaled(layout: Layout, name: str, size: int) -> Iterator[Update]:
    yield _step(layout, name, 2 * size, size), {name: 2 * size}
    if size % 2 == 0:
        yield _step(layout, name, size // 2, size), {name: size // 2}


def _one(layout: Layout, name: str, value: object) -> Update:
    return _step(layout, name, value), {name: value}


def _step(layout: Layout, name: str, value: object, before: object = None) -> str:
    old = getattr(layout, name) if before is None else before
    shown = [("on" if each else "off") if isinstance(each, bool) else str(each) for each in (old, value)]
    return f"{name} {shown[0]} to {shown[1]}"


def _legal(spec: RunSpec) -> bool:
    try:
        check(spec)
    except UserError:
        return False
    return spec.model.moe is not None or spec.layout.ep * spec.layout.etp == 1


def _same(one: Layout, other: Layout) -> bool:
    """True if two layouts differ only in an order of axes that moves none of them."""
    used = [[name for name, ranks in each.axes_in_order if ranks > 1] for each in (one, other)]
    return used[0] == used[1] and one.model_copy(update={"order": other.order}) == other


# Comparison.


def _judged(chosen: Candidate, change: Change, other: Candidate, capacity: float) -> Neighbour:
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


def _too_large(chosen: Candidate, change: Change, other: Candidate, capacity: float) -> Neighbour:
    over = other.memory.device - capacity
    term, by = _largest(_growth(chosen, other))
    grown = f"{gigabytes(by)} more of {named(term)}"
    if by <= 0:  # the given layout does not fit either
        term, by = _largest({name: getattr(other.memory, name) for name in TERMS})
        grown = f"{gigabytes(by)} of it {named(term)}"
    why = f"needs {gigabytes(other.memory.device)}, {gigabytes(over)} too much: {grown}"
    slower = other.seconds / chosen.seconds - 1
    return Neighbour(change, other, "does not fit", why, term, by, max(over / capacity, slower))


def named(term: str) -> str:
    """A term of memory, as a noun."""
    return _NAMED.get(term, term)


def _growth(chosen: Candidate, other: Candidate) -> dict[str, float]:
    return {name: getattr(other.memory, name) - getattr(chosen.memory, name) for name in TERMS}


def _largest(changes: dict[str, float]) -> tuple[str, float]:
    name = max(changes, key=lambda each: changes[each])
    return name, changes[name]
