"""An explanation as plain text, within 100 columns."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence

from meshwright.planner.explain.explanation import Explanation, describe
from meshwright.planner.explain.neighbours import TERMS, Neighbour, named
from meshwright.planner.explain.sensitivity import MOST, Assumption
from meshwright.units import gigabytes, percent, seconds

WIDTH = 100
_SMALL = 5e-4
"""Least share of the step of a part of the time that is shown."""
_NEIGHBOURS = 12
"""Neighbours that are shown; JSON and the page have all."""


def text(found: Explanation) -> str:
    """The whole explanation."""
    near = neighbour_lines(found.neighbours, len(found.neighbours), "which --json and --out have")
    change_lines = [
        *([] if found.fits else wrapped("the layout does not fit, so nothing is compared with it")),
        *assumption_lines(found.assumptions, found.candidates),
    ]
    sections = (
        ("", head(found)),
        ("time, of the busiest pipeline rank and of all in the mean", _time(found)),
        ("memory, by pipeline rank", _memory(found)),
        ("communication, of one rank in one step", _communication(found)),
        ("neighbours", near),
        ("what would change the choice", change_lines),
    )
    lines: list[str] = []
    for title, body in sections:
        listed = list(body)
        if listed:
            lines += [f"\n{title}:" if title else "", *listed]
    return "\n".join(lines).strip("\n")


def head(found: Explanation) -> list[str]:
    """The layout, its step, and the probability that it fits."""
    spec, costs, low_high = found.spec, found.on, found.interval
    cluster, step = costs.cluster, found.time.seconds
    model, data = spec.model, spec.data
    facts = {
        "run": f"{model.preset or model.hf or model.family}, {spec.train.batch_tokens:,} tokens a step in "
        f"sequences of {data.seq_len:,}, in {costs.format or spec.precision.compute}",
        "layout": describe(spec),
        "on": f"{cluster.count:,} x {cluster.device.name} ({cluster.name}), stack {costs.stack.name}",
        "step": f"{seconds(step)}, in 9 of 10 cases within {seconds(low_high[0])} to {seconds(low_high[1])}; "
        f"{found.layout.tokens_per_second:,.0f} tokens/s",
        "memory": f"{gigabytes(found.fullest.device)} of {gigabytes(found.capacity)} on pipeline rank "
        f"{found.fullest.rank}; fits with a probability of {percent(found.fits_probability)}",
    }
    width = max(map(len, facts))
    return [
        line
        for name, fact in facts.items()
        for line in textwrap.wrap(
            f"{name:<{width}}  {fact}", WIDTH, subsequent_indent=" " * (width + 2), drop_whitespace=True
        )
    ]


def ranked(parts: Mapping[str, float]) -> list[tuple[str, float]]:
    """Parts with their amounts, the largest first."""
    return sorted(parts.items(), key=lambda item: -item[1])


def _time(found: Explanation) -> list[str]:
    step, busy, mean = found.time.seconds, found.time.parts, found.mean_parts
    rows = [["", f"rank {found.time.rank}", "", "mean", ""]]
    for name, amount in ranked(busy):
        if max(amount, mean[name]) >= _SMALL * step:
            shares = percent(amount / step), seconds(mean[name]), percent(mean[name] / step)
            rows.append([name, seconds(amount), *shares])
    rows.append(["step", seconds(step), "100.0%", "", ""])
    return table(rows)


def _memory(found: Explanation) -> list[str]:
    shown = shown_ranks(found)
    rows = [["", *(f"rank {found.memories[rank].rank}" for rank in shown)]]
    for name in sorted(TERMS, key=lambda term: -getattr(found.fullest, term)):
        sizes = [getattr(found.memories[rank], name) for rank in shown]
        if any(sizes):
            rows.append([named(name), *map(gigabytes, sizes)])
    rows.append(["in all", *(gigabytes(found.memories[rank].device) for rank in shown)])
    return table(rows)


def shown_ranks(found: Explanation) -> list[int]:
    """The pipeline ranks that are shown: all, or the first, the fullest, some between and the last."""
    count = len(found.memories)
    if count <= 8:
        return list(range(count))
    return sorted({0, 1, count // 4, count // 2, 3 * count // 4, count - 2, count - 1, found.fullest.rank})


def _communication(found: Explanation) -> list[str]:
    rows = [["axis", "ranks", "sent", "seconds", "hidden", "over", "a device's link", "used"]]
    for each in found.axes:
        sent = gigabytes(each.bytes), seconds(each.seconds), percent(each.hidden)
        first = [each.axis, str(each.ranks), *sent]
        for place, level in enumerate(each.levels):
            own = [level.level, gigabytes(level.bytes), percent(level.utilisation)]
            rows.append([*(first if place == 0 else [""] * len(first)), *own])
    return table(rows, left=(0, 5)) if found.axes else ["none: one rank sends nothing"]


def neighbour_lines(listed: Sequence[Neighbour], count: int, elsewhere: str) -> Iterator[str]:
    """The nearest neighbours of `count`, and where the others are."""
    shown = listed[:_NEIGHBOURS]
    for each in shown:
        yield from wrapped(f"{each.change.words}: {each.why}")
    if count > len(shown):
        yield f"  and {count - len(shown)} more, {elsewhere}"


def assumption_lines(listed: Sequence[Assumption], words: Sequence[str]) -> Iterator[str]:
    """Changes of figures that would change the choice; `words` name the candidates."""
    for each in listed:
        yield from wrapped(turned(each, words))


def turned(each: Assumption, words: Sequence[str]) -> str:
    """The changes of one figure that make another layout preferred, in one sentence."""
    turns = [
        f"{turn.percent:+d}% and "
        + ("nothing here fits" if turn.candidate is None else f"'{words[turn.candidate]}' is preferred")
        for turn in each.turns
    ]
    return f"{each.name} ({each.value}): " + ("; ".join(turns) or f"no change within {MOST}% either way")


def wrapped(line: str) -> list[str]:
    """A list's entry, in lines."""
    return textwrap.wrap(line, WIDTH, initial_indent="  ", subsequent_indent="      ")


def table(rows: Iterable[Sequence[str]], left: Sequence[int] = (0,)) -> list[str]:
    """Rows of aligned cells; columns in `left` are aligned to the left, others to the right."""
    cells = [list(row) for row in rows]
    widths = [max(len(row[place]) for row in cells) for place in range(len(cells[0]))]
    return [
        (
            "  "
            + "  ".join(
                cell.ljust(width) if place in left else cell.rjust(width)
                for place, (cell, width) in enumerate(zip(row, widths, strict=True))
            )
        ).rstrip()
        for row in cells
    ]
