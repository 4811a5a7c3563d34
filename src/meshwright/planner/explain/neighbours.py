"""Layouts that differ from a given one in one thing, and what each gains or loses.

One thing is: ranks moved from one axis to another by a factor of two, another ZeRO stage, recompute policy,
schedule, number of stages a rank, microbatch, context mode or order of the axes, experts dealt otherwise, or
sequence parallelism switched.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import permutations
from typing import Any, Literal, get_args

from meshwright.planner.explain.candidate import TIE, Candidate
from meshwright.planner.layout_levels import POLICIES, context_modes
from meshwright.planner.memory.generic import Memory
from meshwright.planner.programs.rules import ProgramLayouts
from meshwright.planner.programs.table import OWN
from meshwright.spec import Layout, RunSpec
from meshwright.spec.layout import Order
from meshwright.spec.pipeline_schedules import SCHEDULES
from meshwright.spec.rules import is_accepted
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
class Neighbour:
    """A layout that differs in one thing, and why the one that it is compared with is better, or is not."""

    words: str
    """The difference: 'tp 4 to 8, dp 8 to 4'."""
    estimate: Candidate
    verdict: Verdict
    why: str
    """One sentence, without the difference."""
    most: str
    """The part of the time, or the term of memory, that changes most for the worse, or the better."""
    by: float
    """Seconds or bytes that it changes by."""
    distance: float
    """How far it is from being as good: the share by which it is slower, or over the memory."""

    @property
    def rank(self) -> tuple[bool, float]:
        """Sort key: those that are better first, then by how close they are."""
        return self.verdict not in BETTER, self.distance

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "change": self.words,
            "verdict": self.verdict,
            "why": self.why,
            "most": self.most,
            "by": self.by,
            "seconds": self.estimate.seconds,
            "memory": self.estimate.memory.device,
            "layout": self.estimate.spec.layout.model_dump(mode="json"),
            "recompute": self.estimate.spec.recompute.model_dump(mode="json"),
        }


def neighbours(
    chosen: Candidate, listed: Mapping[str, Candidate], capacity: float, most: int | None
) -> tuple[Neighbour, ...]:
    """The neighbours of a layout, those that are better first, then by how close to it they are.

    With `most`, only so many for a layout that fits: memory is not computed for those that are further away
    by their time alone.
    """
    step = chosen.seconds  # timed first: its path through the schedule bounds the others
    nearest: list[tuple[tuple[bool, float], int, Neighbour]] = []
    for place, (words, other) in sorted(enumerate(listed.items()), key=lambda item: item[1][1].bound):
        if len(nearest) == most:
            last = nearest[-1][0]
            if _rank_at_best(other.bound / step) > last or _rank_at_best(other.seconds / step) > last:
                continue
        neighbour = _judged(chosen, words, other, capacity)
        insort(nearest, (neighbour.rank, place, neighbour))
        del nearest[len(listed) if most is None else most :]
    return tuple(neighbour for _, _, neighbour in nearest)


def _rank_at_best(times: float) -> tuple[bool, float]:
    """Best possible rank of a neighbour whose step takes at least `times` as long."""
    faster = times < 1 - TIE
    return not faster, times - 1 if faster else max(times - 1, 0.0)


Update = dict[str, Any]
"""Keys of a layout with new values."""
_ON_OFF = {True: "on", False: "off"}


def changes(spec: RunSpec, program: ProgramLayouts = OWN) -> dict[str, RunSpec]:
    """Words for a change -> the run with it: every one that the rules accept and `program` runs, once; all
    else stays.

    The microbatch stays too, where it is not the change, and step groups stay as many: others learn
    otherwise. With a schedule that splits backwards blocks are not compiled. Blocks stay dealt to stages as
    they are, or as the program deals them.
    """
    base = spec.layout.model_copy(update={"micro_batch": spec.micro_batch})
    found: dict[str, RunSpec] = {}
    seen = [base]
    for update in _updates(spec, base, program.schedules):
        layout = program.dealt(spec.model, base.model_copy(update=update))
        changed, words = spec.model_copy(update={"layout": layout}), _difference(base, update)
        if spec.train.compile and layout.splits_backward:
            train = spec.train.model_copy(update={"compile": False})
            changed, words = changed.model_copy(update={"train": train}), f"{words}, not compiled"
        if (
            _legal(changed)
            and program.broken(changed) is None
            and changed.step_groups == spec.step_groups
            and not _same(layout, base)
            and layout not in seen
        ):
            seen.append(layout)
            found[words] = changed
    for name, policy in POLICIES.items():
        if name != spec.recompute.policy:
            changed = spec.model_copy(update={"layout": base, "recompute": policy})
            found[f"recompute.policy {spec.recompute.policy} to {name}"] = changed
    return found


def _difference(layout: Layout, update: Update) -> str:
    """Words for an update."""
    if "schedule" in update and (chunks := update.get("virtual")):
        words = _difference(layout, {"schedule": update["schedule"]})
        return words + (f" with {chunks} stages a rank" if chunks > 1 else "")
    steps = []
    for name, value in update.items():
        before = layout.chunks if name == "virtual" else getattr(layout, name)
        old, new = (_ON_OFF[each] if isinstance(each, bool) else each for each in (before, value))
        steps.append(f"{name} {old} to {new}")
    return ", ".join(steps)


def _updates(spec: RunSpec, layout: Layout, schedules: Sequence[str]) -> Iterator[Update]:
    """Changes of one thing; some are illegal, or equal to others."""
    yield from _traded(layout, ("replicate", "dp", "cp", "tp", *["pp"] * bool(schedules)))
    if layout.ep * layout.etp > 1:
        yield from _traded(layout, ("ep", "etp"))
    yield from _scaled("ep", layout.ep)
    yield from _scaled("etp", layout.etp)
    if layout.shard_ranks > 1:
        yield from ({"zero": stage} for stage in range(4))
    if layout.pp > 1:
        yield from _schedules(layout, schedules)
    yield from _scaled("micro_batch", spec.micro_batch)
    if layout.cp > 1:
        modes = context_modes(layout.cp, layout.local_kv_heads(spec.model.kv_heads))
        yield from ({"context_mode": mode} for mode in modes)
    if layout.tp > 1:
        yield {"sequence_parallel": not layout.sequence_parallel}
    yield from ({"order": order} for order in get_args(Order))


def _traded(layout: Layout, axes: Sequence[str]) -> Iterator[Update]:
    """Twice as many ranks on one axis, half as many on another."""
    for more, less in permutations(axes, 2):
        if (ranks := getattr(layout, less)) % 2 == 0:
            yield {more: 2 * getattr(layout, more), less: ranks // 2}


def _schedules(layout: Layout, schedules: Sequence[str]) -> Iterator[Update]:
    """Another schedule, with as many stages a rank as it has, or another number of stages."""
    for name in schedules:
        chunks = SCHEDULES[name].stages or max(2, layout.chunks)
        yield {"schedule": name} if chunks == layout.chunks else {"schedule": name, "virtual": chunks}
    if SCHEDULES[layout.schedule].stages is None:
        yield from _scaled("virtual", layout.chunks)


def _scaled(name: str, size: int) -> Iterator[Update]:
    """Twice and half of a size."""
    yield {name: 2 * size}
    if size % 2 == 0:
        yield {name: size // 2}


def _legal(spec: RunSpec) -> bool:
    """True for layouts that the rules accept, and that deal experts out only where there are some."""
    deals = spec.layout.ep * spec.layout.etp > 1
    return is_accepted(spec) and (spec.model.moe is not None or not deals)


def _same(one: Layout, other: Layout) -> bool:
    """True if two layouts differ only in an order of axes that moves none of them."""
    used = [[name for name, ranks in each.axes_in_order if ranks > 1] for each in (one, other)]
    return used[0] == used[1] and one.model_copy(update={"order": other.order}) == other


def _judged(chosen: Candidate, words: str, other: Candidate, capacity: float) -> Neighbour:
    """A neighbour with its verdict, and the term of memory or the part of the time that decides it."""
    needs, share = other.memory.device, other.seconds / chosen.seconds - 1
    growth = {name: getattr(other.memory, name) - getattr(chosen.memory, name) for name in TERMS}
    if needs > capacity:
        term, by = _largest(growth)
        cause = f"{gigabytes(by)} more of {named(term)}"
        if by <= 0:  # the given layout does not fit either
            term, by = _largest({name: getattr(other.memory, name) for name in TERMS})
            cause = f"{gigabytes(by)} of it {named(term)}"
        over = needs - capacity
        why = f"needs {gigabytes(needs)}, {gigabytes(over)} too much: {cause}"
        return Neighbour(words, other, "does not fit", why, term, by, max(over / capacity, share))
    if not chosen.fits(capacity):
        term, less = _largest(growth, -1)
        why = f"fits, with {gigabytes(less)} less of {named(term)}, in {seconds(other.seconds)} a step"
        return Neighbour(words, other, "fits", why, term, -less, share)
    if abs(share) <= TIE:
        more = needs - chosen.memory.device
        memory = f"{gigabytes(abs(more))} {'more' if more > 0 else 'less'}" if more else "as much"
        term, by = _largest({name: abs(size) for name, size in growth.items()})
        return Neighbour(words, other, "as fast", f"as fast, with {memory} memory", term, by, abs(share))
    grown = {name: other.parts[name] - chosen.parts[name] for name in chosen.parts}
    sign = 1 if share > 0 else -1
    (part, by), (against, less) = _largest(grown, sign), _largest(grown, -sign)
    verdict: Verdict = "slower" if share > 0 else "faster"
    why = f"{percent(abs(share))} {verdict}: {part} {_signed(sign * by)}"
    if less > _WORTH * by:
        why += f", {against} {_signed(-sign * less)}"
    return Neighbour(words, other, verdict, why, part, sign * by, share)


def _signed(amount: float) -> str:
    return f"{'-' if amount < 0 else '+'}{seconds(abs(amount))}"


def named(term: str) -> str:
    """A term of memory, as a noun."""
    return _NAMED.get(term, term)


def _largest(amounts: Mapping[str, float], sign: int = 1) -> tuple[str, float]:
    """The name and the value of the largest of some amounts, which are multiplied by `sign`."""
    name = max(amounts, key=lambda name: sign * amounts[name])
    return name, sign * amounts[name]
