"""An explanation as plain text, within 100 columns."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence

from meshwright.planner.cost.exchange import exchange_facts
from meshwright.planner.explain.candidate import Candidate
from meshwright.planner.explain.explanation import Explanation, describe
from meshwright.planner.explain.neighbours import TERMS, Neighbour, named
from meshwright.planner.explain.sensitivity import MOST, Assumption
from meshwright.planner.memory.generic import Memory
from meshwright.units import gigabytes, percent, seconds

WIDTH = 100
_SMALL = 5e-4
"""Least share of the step of a part of the time that is shown."""
_NEIGHBOURS = 12
"""Neighbours that are shown; JSON and the page have all."""


def text(found: Explanation) -> str:
    """The whole explanation."""
    near = neighbour_lines(found.neighbours, len(found.neighbours), "which --json and --out have")
    turns = assumption_lines(found.assumptions)
    if not found.fits(found.capacity):
        turns = wrapped("the layout does not fit, so nothing is compared with it")
    sections = {
        "time, of the busiest pipeline rank and of all in the mean": _time(found),
        "memory, by pipeline rank": _memory(found),
        "communication, of one rank in one step": _communication(found),
        "neighbours": near,
        "what would change the choice": turns,
    }
    only = found.cluster.device.planning_only if found.costs.stack.ours else ""
    lines = [*([f"{only}."] if only else []), *head(found)]
    for title, body in sections.items():
        lines += [f"\n{title}:", *body] if body else []
    return "\n".join(lines)


def routing(found: Candidate) -> str:
    """A clause on what uneven routing costs; an empty text without expert ranks."""
    if (uneven := found.uneven) is None:
        return ""
    (low, high), steps, needs = uneven["rows"], uneven["step_seconds"], uneven["memory"]
    if low == high:
        return f"even, since the capacity leaves no expert rank more than {high:.2f} times the mean"
    return (
        f"even but for chance; if the busiest of {found.spec.layout.ep} expert ranks gets {low:.2f} to "
        f"{high:.2f} times the mean, a step takes {seconds(steps[0])} to {seconds(steps[1])} and the fullest "
        f"rank {gigabytes(needs[0])} to {gigabytes(needs[1])}"
    )


def attention(found: Candidate) -> str:
    """The kernels of attention of this program on the cluster's devices; an empty text for other programs."""
    if (kernels := found.attention) is None:
        return ""
    return "; ".join([f"by {kernels.words}", *kernels.notes])


def blocks(found: Candidate) -> str:
    """Words for what the cluster's GPUs run of this program's blocks; empty for other programs."""
    if not found.costs.counted:
        return ""
    if found.spec.train.compile:
        return "compiled, as a run on such GPUs does unless train.compile = false"
    return "not compiled"


def offload(found: Candidate) -> str:
    """Clauses on moments and activations outside the device, and what that costs; empty without any."""
    clauses = []
    if (away := found.offloaded) is not None:
        place = {"host": "in the host's memory", "disk": "in a mapped file"}[found.spec.train.offload]
        clauses.append(
            f"moments {place}, {_of_rank_and_node(away)}; the optimiser takes {seconds(away['seconds'])}, "
            f"and {seconds(away['seconds_on_device'])} with moments on the device"
        )
    if (away := found.offloaded_activations) is not None:
        clauses.append(
            f"activations in the host's memory, {_of_rank_and_node(away)}; blocks wait "
            f"{seconds(away['seconds'])} of a step for their copies"
        )
    return "; ".join(clauses)


def _of_rank_and_node(away: dict[str, float]) -> str:
    return f"{gigabytes(away['bytes'])} a rank and {gigabytes(away['node_bytes'])} a node"


def head(found: Explanation) -> list[str]:
    """The layout, its step, and the probability that it fits."""
    spec, costs, (low, high) = found.spec, found.costs, found.interval
    cluster, model, data = found.cluster, spec.model, spec.data
    facts = {
        "run": f"{model.preset or model.hf or model.family}, {spec.train.batch_tokens:,} tokens a step"
        f"{spec.train.warmup_in_words} in sequences of {data.seq_len:,}, in "
        f"{costs.format or spec.precision.compute}",
        "layout": describe(spec),
        "on": f"{cluster.in_words} ({cluster.name}), stack {costs.stack.name}",
        "step": f"{seconds(found.seconds)}, in 9 of 10 cases within {seconds(low)} to {seconds(high)}; "
        f"{found.tokens_per_second:,.0f} tokens/s; MFU {percent(found.mfu)}, with causal attention "
        f"{percent(found.causal_mfu)}",
        "memory": f"{gigabytes(found.memory.device)} of {gigabytes(found.room)} on pipeline rank "
        f"{found.memory.rank}; fits with a probability of {percent(found.fits_probability)}",
        "attention": attention(found),
        "blocks": blocks(found),
        "routing": routing(found),
        "sharding": found.sharding,
        "offload": offload(found),
        **exchange_facts(found.exchange),
        "never measured": "; ".join(found.never_measured),
    }
    width = max(map(len, facts)) + 2
    lines = []
    for name, fact in facts.items():
        if not fact:
            continue
        lines += textwrap.wrap(f"{name:<{width}}{fact}", WIDTH, subsequent_indent=" " * width)
    return lines


def ranked(parts: Mapping[str, float]) -> list[tuple[str, float]]:
    """Parts with their amounts, the largest first."""
    return sorted(parts.items(), key=lambda item: -item[1])


def _time(found: Explanation) -> list[str]:
    step, mean = found.seconds, found.mean_parts
    rows = [["", f"rank {found.time.rank}", "", "mean", ""]]
    for name, amount in ranked(found.parts):
        if max(amount, mean[name]) >= _SMALL * step:
            shares = percent(amount / step), seconds(mean[name]), percent(mean[name] / step)
            rows.append([name, seconds(amount), *shares])
    rows.append(["step", seconds(step), "100.0%", "", ""])
    return table(rows)


def _memory(found: Explanation) -> list[str]:
    shown = shown_ranks(found)
    rows = [["", *(f"rank {memory.rank}" for memory in shown)]]
    for name in sorted(TERMS, key=lambda term: -getattr(found.memory, term)):
        sizes = [getattr(memory, name) for memory in shown]
        if any(sizes):
            rows.append([named(name), *map(gigabytes, sizes)])
    rows.append(["in all", *(gigabytes(memory.device) for memory in shown)])
    return table(rows)


def shown_ranks(found: Explanation) -> list[Memory]:
    """The pipeline ranks that are shown: all, or the first, the fullest, some between and the last."""
    count, fullest = len(found.memories), found.memory.rank
    shown = {0, 1, count // 4, count // 2, 3 * count // 4, count - 2, count - 1, fullest}
    return [memory for memory in found.memories if count <= 8 or memory.rank in shown]


def _communication(found: Explanation) -> list[str]:
    rows = [["axis", "ranks", "sent", "seconds", "hidden", "over", "a device's link", "used"]]
    for load in found.axes:
        cells = [
            load.axis,
            str(load.ranks),
            gigabytes(load.bytes),
            seconds(load.seconds),
            percent(load.hidden),
        ]
        for level in load.levels:
            rows.append([*cells, level.level, gigabytes(level.bytes), percent(level.utilisation)])
            cells = [""] * len(cells)
    return table(rows, left=(0, 5)) if found.axes else ["none: one rank sends nothing"]


def neighbour_lines(listed: Sequence[Neighbour], count: int, elsewhere: str) -> list[str]:
    """The nearest neighbours of `count`, and where the others are."""
    shown = listed[:_NEIGHBOURS]
    lines = [line for each in shown for line in wrapped(f"{each.words}: {each.why}")]
    if count > len(shown):
        lines.append(f"  and {count - len(shown)} more, {elsewhere}")
    return lines


def assumption_lines(listed: Sequence[Assumption]) -> list[str]:
    """Changes of figures that would change the choice, a sentence for each figure, and one for all others."""
    lines, rest = [], []
    for figure in listed:
        turns = [
            f"{turn.percent:+d}% and "
            + (f"'{turn.preferred}' is preferred" if turn.preferred else "nothing here fits")
            for turn in figure.turns
        ]
        if turns:
            lines += wrapped(f"{figure.name} ({figure.value}): {'; '.join(turns)}")
        else:
            rest.append(f"{figure.name} ({figure.value})")
    return lines + (wrapped(f"no change within {MOST}% either way of {', '.join(rest)}") if rest else [])


def wrapped(line: str) -> list[str]:
    """A list's entry, in lines."""
    return textwrap.wrap(line, WIDTH, initial_indent="  ", subsequent_indent="      ")


def table(rows: Sequence[Sequence[str]], left: Sequence[int] = (0,)) -> list[str]:
    """Rows of aligned cells; columns in `left` are aligned to the left, others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [
            cell.ljust(width) if place in left else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(["", *cells]).rstrip())
    return lines
