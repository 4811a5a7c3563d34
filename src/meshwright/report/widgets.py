"""Pieces of a plan's page: stacked bars, a plot of points, tables."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from meshwright.report.chart import HEIGHT, WIDTH, Scale, fit, tick_labels
from meshwright.report.html import text

MANY = 12
"""Rows of bars from which they are thinner."""


@dataclass(frozen=True)
class Bar:
    """A row: parts, each a share of the whole width, with a colour and what pointing at it tells."""

    name: str
    parts: Sequence[tuple[str, float, str]]
    """(colour's class, share, words)."""
    total: str


def bars(rows: Sequence[Bar], limit: float | None = None) -> str:
    """Stacked bars, one a row; a line through all at the share `limit`."""
    line = "" if limit is None else f'<b class="limit" style="left:{100 * limit:.2f}%"></b>'
    body = ""
    for row in rows:
        pieces = "".join(
            f'<i class="{css}" style="width:{100 * share:.3f}%" title="{text(words)}"></i>'
            for css, share, words in row.parts
            if share > 0
        )
        body += (
            f'<div class="row"><span class="name" title="{text(row.name)}">{text(row.name)}</span>'
            f'<div class="track">{pieces}{line}</div><span class="total">{text(row.total)}</span></div>'
        )
    return f'<div class="bars{" many" if len(rows) > MANY else ""}">{body}</div>'


def keys(named: Iterable[tuple[str, str]]) -> str:
    """What colours mean: (class, words)."""
    items = "".join(f'<span class="key {css}">{text(words)}</span>' for css, words in named)
    return f'<p class="keys">{items}</p>'


def legend(parts: Iterable[tuple[str, str, str]]) -> str:
    """Colours with their amounts: (class, name, amount)."""
    rows = "".join(
        f'<div><dt class="key {css}">{text(name)}</dt><dd>{text(amount)}</dd></div>'
        for css, name, amount in parts
    )
    return f'<dl class="parts">{rows}</dl>'


def facts(rows: Mapping[str, str]) -> str:
    """Names and values, one below the other."""
    body = "".join(f"<div><dt>{text(name)}</dt><dd>{text(value)}</dd></div>" for name, value in rows.items())
    return f'<dl class="card facts">{body}</dl>'


def table(heads: Sequence[str], rows: Sequence[Sequence[str]], css: Sequence[str]) -> str:
    """A table in a card; `css` are the classes of the columns, cells are plain text."""
    head = "".join(f'<th class="{name}">{text(cell)}</th>' for cell, name in zip(heads, css, strict=True))
    body = ""
    for row in rows:
        cells = zip(row, css, heads, strict=True)
        body += f"<tr>{''.join(_cell(cell, name, title) for cell, name, title in cells)}</tr>"
    return (
        f'<div class="card scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
    )


VERDICTS = {"fits": "good", "faster": "good", "as fast": "even", "slower": "worse", "does not fit": "over"}
"""What a judgement looks like."""


def _cell(cell: str, css: str, head: str) -> str:
    """A cell, with its column's name for screens on which there is no room for columns."""
    shown = f'<span class="verdict {VERDICTS[cell]}">{text(cell)}</span>' if cell in VERDICTS else text(cell)
    return f'<td class="{css}" data-head="{text(head)}">{shown}</td>'


@dataclass(frozen=True)
class Points:
    """Points of one kind: (x, y, words)."""

    name: str
    css: str
    points: Sequence[tuple[float, float, str]]
    joined: bool = False


def plot(title: str, groups: Sequence[Points], names: tuple[str, str], limit: tuple[float, str]) -> str:
    """A plot of points; `names` are those of the axes, `limit` a value of y with its words."""
    xs = [x for group in groups for x, _, _ in group.points]
    ys = [y for group in groups for _, y, _ in group.points]
    across, up = fit(xs, False, False), fit([*ys, limit[0]], False, True)
    drawn = "".join(_grid(up)) + f'<path class="bad" d="M0 {_down(up, limit[0])}H{WIDTH}"/>'
    for group in groups:
        drawn += _front(group, across, up) if group.joined else ""
        drawn += "".join(
            f'<path class="{group.css} points" d="M{WIDTH * across.at(x):.1f} {_down(up, y)}h0">'
            f"<title>{text(words)}</title></path>"
            for x, y, words in group.points
        )
    shown = [
        f'<span class="key points {group.css}">{text(group.name)}</span>' for group in groups if group.points
    ]
    shown.append(f'<span class="key bad">{text(limit[1])}</span>')
    return (
        f'<figure class="chart wide plot"><figcaption><b>{text(title)}</b>{"".join(shown)}</figcaption>'
        f'<div class="frame"><div class="view"><svg viewBox="0 0 {WIDTH} {HEIGHT}" '
        f'preserveAspectRatio="none">{drawn}</svg>{_labels(up)}</div>{_below(across)}'
        f'<span class="axis-name">{text(names[0])} against {text(names[1])}</span></div></figure>'
    )


def _front(group: Points, across: Scale, up: Scale) -> str:
    """Steps between points of which none is better in both."""
    places = [(WIDTH * across.at(x), _down(up, y)) for x, y, _ in sorted(group.points)]
    line = "".join(f"H{x:.1f}V{y}" for x, y in places[1:])
    return f'<path class="{group.css} front" d="M{places[0][0]:.1f} {places[0][1]}{line}"/>' if places else ""


def _grid(up: Scale) -> list[str]:
    return [f'<path class="grid" d="M0 {_down(up, mark)}H{WIDTH}"/>' for mark in up.ticks(6)]


def _labels(up: Scale) -> str:
    marks = up.ticks(6)
    return "".join(
        f'<span class="y" style="top:{100 * (1 - up.at(mark)):.2f}%">{label}</span>'
        for mark, label in zip(marks, tick_labels(marks), strict=True)
    )


def _below(across: Scale) -> str:
    marks = across.ticks(5)
    return "".join(
        f'<span class="x" style="left:{100 * across.at(mark):.2f}%">{label}</span>'
        for mark, label in zip(marks, tick_labels(marks), strict=True)
    )


def _down(up: Scale, value: float) -> str:
    return f"{HEIGHT * (1 - up.at(value)):.1f}"
