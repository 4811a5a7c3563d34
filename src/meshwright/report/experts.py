"""How a run's experts shared the tokens: curves of the balance, and the load of every expert at the end."""

from __future__ import annotations

from html import escape
from typing import Any

from meshwright.report import format as fmt
from meshwright.report.chart import Chart, Series
from meshwright.report.record import Row

_CURVES = {
    "Load of an expert (1 = even)": {"load_max": "fullest", "load_min": "emptiest"},
    "Router entropy (nats)": {"router_entropy": "entropy"},
    "Balance loss (1 = even)": {"aux_loss": "balance loss"},
    "Router z-loss": {"z_loss": "z-loss"},
    "Copies dropped (share)": {"dropped": "dropped"},
}
"""Title -> the curves by key; those that are 0 throughout are not drawn."""


def experts_section(rows: list[Row]) -> str:
    """HTML of the metrics rows, by step, that tell of experts; nothing without them."""
    rows = [row for row in rows if "load_max" in row]
    if not rows:
        return ""
    drawn = "".join(
        Chart(next(iter(curves)).replace("_", "-"), title, _series(curves, rows), from_zero=True).html()
        for title, curves in _CURVES.items()
        if any(row.get(key) for row in rows for key in curves)
    )
    return f'<h2>Experts</h2><div class="charts">{drawn}</div>{_loads(rows)}'


def _series(curves: dict[str, str], rows: list[Row]) -> list[Series]:
    steps = [row["step"] for row in rows]
    return [
        Series(name, steps, [row[key] if fmt.is_number(row.get(key)) else None for row in rows], colour)
        for colour, (key, name) in enumerate(curves.items())
    ]


def _loads(rows: list[Row]) -> str:
    """A row of cells for each layer: the darker, the more of the last step's tokens chose the expert."""
    last = next((row for row in reversed(rows) if isinstance(row.get("expert_load"), dict)), None)
    if last is None:
        return ""
    every = last["expert_load"]
    lines = "".join(_line(layer, loads) for layer, loads in every.items())
    count = max(map(len, every.values()), default=0)
    if count <= 64:
        lines += "<tr><th>expert</th>" + "".join(f"<th>{number}</th>" for number in range(count)) + "</tr>"
    return (
        f'<div class="card"><p class="aside">Load of each expert at step {fmt.count(last["step"])}, in even '
        f"shares: a row for each layer, a cell for each expert; full colour is twice an even share.</p>"
        f'<div class="scroll"><table class="loads"><tbody>{lines}</tbody></table></div></div>'
    )


def _line(layer: Any, loads: list[float]) -> str:
    cells = "".join(
        f'<td style="opacity:{min(1.0, max(0.04, load / 2)):.2f}" title="expert {number}: {load:.2f}"></td>'
        for number, load in enumerate(loads)
        if fmt.is_number(load)
    )
    return f"<tr><th>layer {escape(str(layer))}</th>{cells}</tr>"
