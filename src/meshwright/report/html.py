"""`report.html`: a run in one file that opens offline and fetches nothing.

Every string of the run is escaped, and a content security policy lets only the page's own script run.
"""

from __future__ import annotations

import base64
import hashlib
import statistics
from collections.abc import Sequence
from html import escape
from importlib import resources
from pathlib import Path
from typing import Any

from meshwright.report import format as fmt
from meshwright.report.chart import Chart, Series, moving_mean
from meshwright.report.experts import experts_section
from meshwright.report.record import RecordedRun, Row, read_run, write_atomically

REPORT = "report.html"
# A longer history shows its newest part: a page is for reading, events.jsonl for searching.
MOST_EVENTS = 200
# From this many steps on the loss is drawn as a mean over the raw curve.
SMOOTH_FROM = 100
_COLOURS = 8


def write_report(out: Path) -> Path:
    """Write `report.html` into the run's folder `out` from its record, and return its path.

    Works for a run that was interrupted, too. Raises `UserError` where `out` is not the folder of a run.
    """
    path = out / REPORT
    write_atomically(path, render(read_run(out)))
    return path


def render(run: RecordedRun) -> str:
    """The page of a run, as HTML."""
    title = text(run.out.resolve().name)
    body = "".join(
        [
            _header(run, title),
            _figures(run),
            _charts(run),
            experts_section(_rows(run, "loss")),
            _memory(run),
            _layout(run),
            _sample(run),
            _tables(run),
        ]
    )
    return document(title, body, asset("page.css"), asset("page.js"))


def document(title: str, body: str, style: str, script: str) -> str:
    """A page in one file, of safe HTML for `title` and `body`; no script but `script` runs in it."""
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{title} - Meshwright</title><style>{style}</style></head>"
        f"<body><main>{body}</main><script>{script}</script></body></html>\n"
    )


def asset(name: str) -> str:
    """A file of this package, as text."""
    return resources.files("meshwright.report").joinpath(name).read_text(encoding="utf-8")


def text(value: Any) -> str:
    """Any string as safe HTML: escaped, control characters made visible, broken surrogates replaced."""
    shown = str(value).encode("utf-8", "replace").decode("utf-8").replace("\r\n", "\n")
    visible = "".join(chr(0x2400 + ord(c)) if ord(c) < 32 and c not in "\n\t" else c for c in shown)
    return escape("".join("\ufffd" if 0x7F <= ord(c) < 0xA0 else c for c in visible))


def _rows(run: RecordedRun, key: str) -> list[Row]:
    """The metrics rows that have `key`, by step."""
    return sorted((row for row in run.metrics if key in row and "step" in row), key=lambda row: row["step"])


def _header(run: RecordedRun, title: str) -> str:
    info = run.info
    parts = [
        f"Meshwright {info['version']}" if "version" in info else "",
        f"{fmt.short(info['parameters'])} parameters" if "parameters" in info else "",
        f"on {info['device']}" if "device" in info else "",
        f"started {str(info['started'])[:16].replace('T', ' ')} UTC" if "started" in info else "",
    ]
    note = ""
    if run.result is None:
        note = (
            '<p class="note">This run has no result yet: it was interrupted or is still going. '
            "The figures are those of the steps recorded so far.</p>"
        )
    about = text("  ·  ".join(part for part in parts if part))
    return f"<header><h1>{title}</h1><p>{about}</p>{note}</header>"


def _so_far(run: RecordedRun) -> dict[str, Any]:
    """The result, or for a run without one what its rows tell."""
    if run.result is not None:
        return run.result
    train, evaluations = _rows(run, "loss"), _rows(run, "val_loss")
    found: dict[str, Any] = {"steps": train[-1]["step"] if train else 0}
    for key in ("tokens_per_second", "mfu"):
        values = [row[key] for row in train if fmt.is_number(row.get(key))]
        found[key] = statistics.median(values) if values else None
    if train:
        found["final_loss"] = train[-1]["loss"]
        memory = [row["memory_bytes"] for row in train if fmt.is_number(row.get("memory_bytes"))]
        found["peak_memory_bytes"] = max(memory, default=None)
    if evaluations:
        found |= {key: evaluations[-1].get(key) for key in ("val_loss", "val_bits_per_byte")}
    return found


def _figures(run: RecordedRun) -> str:
    """The headline figures; what the run does not know is left out, except the loss."""
    found = _so_far(run)
    loss, bits, steps = found.get("final_loss"), found.get("val_bits_per_byte"), found.get("steps")
    finite = "at the last step" if fmt.is_number(loss) else "not finite at the last step"
    planned = f"of {fmt.count(run.info['total_steps'])}" if fmt.is_number(run.info.get("total_steps")) else ""
    cards = [
        ("Training loss", fmt.fixed(loss), "", finite if steps else ""),
        ("Validation loss", fmt.fixed(found.get("val_loss")), "", "nats per token"),
        ("Held-out text", fmt.fixed(bits, 3), "bits/byte", _against_xz(bits, found.get("xz_bits_per_byte"))),
        ("Throughput", fmt.count(found.get("tokens_per_second")), "tokens/s", "over all ranks"),
        ("MFU", fmt.percent(found.get("mfu")), "", _of_matmul(found.get("matmul_flops_per_second"))),
        ("Peak memory", fmt.size(found.get("peak_memory_bytes")), "", "of one rank"),
        ("Steps", fmt.count(steps), "", planned),
        ("Time", fmt.duration(found.get("seconds")), "", ""),
    ]
    known = (card for card in cards if card[1] != fmt.ABSENT or card[0] == "Training loss")
    return f'<dl class="figures">{"".join(figure(*card) for card in known)}</dl>'


def _against_xz(bits: Any, xz: Any) -> str:
    if not (fmt.is_number(bits) and fmt.is_number(xz) and xz > 0):
        return ""
    relation = "below" if bits < xz else "above"
    return f"{fmt.percent(abs(1 - bits / xz))} {relation} xz -9e ({fmt.fixed(xz, 3)})"


def _of_matmul(rate: Any) -> str:
    return f"of {fmt.short(rate / 1e9)} GFLOP/s in matmul" if fmt.is_number(rate) else ""


def figure(name: str, value: str, unit: str, aside: str) -> str:
    """A headline figure, for a `<dl class="figures">`."""
    small = f" <small>{text(unit)}</small>" if unit and value != fmt.ABSENT else ""
    below = f'<dd class="aside">{text(aside)}</dd>' if aside else ""
    return f'<div><dt>{text(name)}</dt><dd class="value">{text(value)}{small}</dd>{below}</div>'


def _series(name: str, rows: Sequence[Row], key: str, colour: int = 0, css: str = "line") -> Series:
    values = [row[key] if fmt.is_number(row[key]) else None for row in rows]
    return Series(name, [row["step"] for row in rows], values, colour, css)


def _charts(run: RecordedRun) -> str:
    train, evaluations = _rows(run, "loss"), _rows(run, "val_loss")
    loss = _series("training", train, "loss")
    curves = [loss]
    if len(train) >= SMOOTH_FROM:
        window = len(train) // 50 | 1
        mean = Series(f"mean of {window:,} rows", loss.x, moving_mean(loss.y, window), 0)
        curves = [_series("training", train, "loss", css="faint"), mean]
    if evaluations:
        curves.append(_series("validation", evaluations, "val_loss", 1, "dots"))
    charts = [
        Chart("loss", "Loss (nats per token)", curves, log=True, mark_gaps=True, wide=True),
        _single(run, "tokens_per_second", "Throughput (tokens/s)", "tokens/s", 2, from_zero=True),
        _single(run, "grad_norm", "Gradient norm", "grad norm", 3, log=True, mark_gaps=True),
        _single(run, "lr", "Learning rate", "lr", 4, from_zero=True),
    ]
    return f'<h2>Curves</h2><div class="charts">{"".join(chart.html() for chart in charts)}</div>'


def _single(run: RecordedRun, key: str, title: str, name: str, colour: int, **options: bool) -> Chart:
    return Chart(key.replace("_", "-"), title, [_series(name, _rows(run, key), key, colour)], **options)


def _memory(run: RecordedRun) -> str:
    """A stacked bar of one rank's memory; what its components do not explain of the peak is one more part."""
    found = dict((run.result or {}).get("memory") or {})
    peak = found.pop("peak", (run.result or {}).get("peak_memory_bytes"))
    parts = {name: amount for name, amount in found.items() if fmt.is_number(amount) and amount > 0}
    if not parts:
        return ""
    rest = peak - sum(parts.values()) if fmt.is_number(peak) else 0
    if rest > 0.005 * sum(parts.values()):
        named = any("activation" in name for name in parts)
        parts["not attributed" if named else "activations and other"] = rest
    total = sum(parts.values())
    ranked = list(enumerate(parts.items()))
    bar = "".join(
        f'<i class="c{i % _COLOURS}" style="width:{100 * amount / total:.3f}%" '
        f'title="{text(name)}: {fmt.size(amount)}"></i>'
        for i, (name, amount) in ranked
    )
    legend = "".join(
        f'<div><dt class="key c{i % _COLOURS}">{text(str(name).replace("_", " "))}</dt>'
        f"<dd>{fmt.size(amount)} &#183; {fmt.percent(amount / total)}</dd></div>"
        for i, (name, amount) in ranked
    )
    tail = f'<p class="aside">Peak of one rank: {fmt.size(peak)}.</p>' if fmt.is_number(peak) else ""
    return (
        f'<h2>Memory by component, of the fullest rank</h2><div class="card"><div class="stack">{bar}</div>'
        f'<dl class="parts">{legend}</dl>{tail}</div>'
    )


_AXES = {
    "replicate": "copies of the ZeRO group",
    "dp": "data parallel",
    "cp": "context parallel",
    "tp": "tensor parallel",
    "pp": "pipeline stages",
}


def _layout(run: RecordedRun) -> str:
    layout = (run.info.get("spec") or {}).get("layout")
    named = (run.result or {}).get("layout", run.info.get("layout"))
    if not isinstance(layout, dict):
        return f'<h2>Layout</h2><div class="card">{text(named)}</div>' if named else ""
    sizes = {axis: layout.get(axis, 1) for axis in _AXES}
    ranks = 1
    for axis_size in sizes.values():
        ranks *= axis_size
    chips = " &#215; ".join(
        f'<span class="{"one" if axis_size == 1 else "many"}" title="{_AXES[axis]}">'
        f"{axis} <b>{text(axis_size)}</b></span>"
        for axis, axis_size in sizes.items()
    )
    zero = {
        0: "ZeRO 0: every data rank keeps parameters, gradients and optimiser states",
        1: "ZeRO 1: optimiser states sharded",
        2: "ZeRO 2: optimiser states and gradients sharded",
        3: "ZeRO 3: optimiser states, gradients and parameters sharded",
    }.get(layout.get("zero", 0), f"ZeRO {layout.get('zero')}")
    return (
        f'<h2>Layout</h2><div class="card"><p class="axes">{chips} = '
        f"<b>{ranks:,} rank{'s' * (ranks > 1)}</b></p>"
        f'<p class="aside">{text(". ".join([zero, *_ways(layout)]))}.</p></div>'
    )


def _ways(layout: dict[str, Any]) -> list[str]:
    """How the axes that are used split the work."""
    found = []
    if layout.get("pp", 1) > 1:
        cut = layout.get("stages", "even")
        blocks = cut if isinstance(cut, str) else ", ".join(map(str, cut)) + " blocks"
        virtual = layout.get("virtual")
        each = f", {virtual} on a rank" if virtual else ""
        found.append(f"Pipeline {layout.get('schedule')}: stages cut {blocks}{each}")
    if layout.get("tp", 1) > 1:
        shared = "shared" if layout.get("sequence_parallel", True) else "whole"
        found.append(f"Tensor ranks: tokens {shared} between the layers' insides")
    if layout.get("cp", 1) > 1:
        found.append(f"Context ranks: attention crosses by {layout.get('context_mode')}")
    ep, etp = layout.get("ep", 1), layout.get("etp", 1)
    if ep * etp > 1:
        slices = f", each in {etp} slices" if etp > 1 else ""
        found.append(f"Experts: over {ep} ranks folded out of dp x cp x tp{slices}")
    return found


def _sample(run: RecordedRun) -> str:
    sample = (run.result or {}).get("sample")
    if not isinstance(sample, dict):
        return ""
    prompt, written = str(sample.get("prompt", "")), str(sample.get("text", ""))
    written = written.removeprefix(prompt)
    return (
        f'<h2>Sample</h2><div class="card"><pre dir="auto"><b>{text(prompt)}</b>{text(written)}</pre></div>'
    )


def _tables(run: RecordedRun) -> str:
    parts = [_events(run), _spec(run), _fingerprints(run)]
    if not any(parts):
        return ""
    return f"<h2>Details</h2>{''.join(parts)}"


def _events(run: RecordedRun) -> str:
    if not run.events:
        return ""
    shown = run.events[-MOST_EVENTS:]
    more = f", the last {len(shown)} shown" if len(shown) < len(run.events) else ""
    body = "".join(
        _table_row(
            text(event.get("time", ""))[:19].replace("T", " "),
            text(event.get("kind", "")),
            text(fmt.fields_text({k: v for k, v in event.items() if k not in ("time", "kind")}, " · ")),
        )
        for event in shown
    )
    head = "<tr><th>Time (UTC)</th><th>Event</th><th>Fields</th></tr>"
    table = f"<table><thead>{head}</thead><tbody>{body}</tbody></table>"
    return details(
        f"Events ({len(run.events):,}{more})", f'<div class="scroll">{table}</div>', open_=len(shown) <= 12
    )


def _spec(run: RecordedRun) -> str:
    spec = run.info.get("spec")
    if not isinstance(spec, dict):
        return ""
    sections = "".join(
        f"<section><h3>{text(name)}</h3><table><tbody>{_key_values(part)}</tbody></table></section>"
        for name, part in spec.items()
        if isinstance(part, dict)
    )
    return details("Spec", f'<div class="spec">{sections}</div>')


def _key_values(part: dict[str, Any]) -> str:
    return "".join(_table_row(text(key), text(fmt.value_text(value))) for key, value in part.items())


def _fingerprints(run: RecordedRun) -> str:
    names = {"parameters_sha256": "Parameters, SHA-256", "samples_sha256": "Samples consumed, SHA-256"}
    found = {title: (run.result or {}).get(key) for key, title in names.items()}
    body = "".join(_table_row(title, text(value), css="mono") for title, value in found.items() if value)
    return details("Fingerprints", f"<table><tbody>{body}</tbody></table>") if body else ""


def _table_row(*cells: str, css: str = "") -> str:
    """A row of cells that are HTML already."""
    last = len(cells) - 1
    return f"<tr>{''.join(_cell(cell, css if i == last else '') for i, cell in enumerate(cells))}</tr>"


def _cell(content: str, css: str) -> str:
    return f'<td class="{css}">{content}</td>' if css else f"<td>{content}</td>"


def details(summary: str, content: str, open_: bool = False) -> str:
    """What opens on a click; `content` is HTML."""
    return f"<details{' open' if open_ else ''}><summary>{text(summary)}</summary>{content}</details>"
