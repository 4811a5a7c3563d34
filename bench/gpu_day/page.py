"""The page of a day: the machine, and a table for each part."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from gpu_day import traces
from gpu_day.differences import differences, largest
from gpu_day.results import FAILED, Result, Row

Table = Sequence[Row]


def page(results: Sequence[Result], command: str, date: str) -> str:
    """The page in Markdown."""
    nominal = any(result.nominal for result in results)
    lines = ["# A day on GPUs" if not nominal else "# A day on GPUs, rehearsed on a device that is faked", ""]
    lines += [f"`{command}`, {date}.", ""]
    if nominal:
        lines += ["Times are those of the host, and mean nothing.", ""]
    lines += ["## Parts", ""]
    lines += table(
        (
            {
                "part": each.part,
                "state": each.state,
                "seconds": round(each.seconds, 1),
                "why": _first(each.why),
            }
            for each in results
        ),
        ("part", "state", "seconds", "why"),
    )
    by_kind: dict[str, list[Result]] = {}
    for each in results:
        by_kind.setdefault(each.kind, []).append(each)
    for kind, own in by_kind.items():
        if any(each.rows for each in own):
            lines += ["", *SECTIONS[kind](own, _machine(results))]
    left = [{"part": each.part, **row} for each in results for row in each.left_out]
    if left:
        lines += ["", "## Left out", "", *table(left, ("part", "what", "why"))]
    failed = [each for each in results if each.state == FAILED]
    if failed:
        lines += ["", "## What failed", ""]
        for each in failed:
            lines += [f"{each.part}:", "", "```text", each.why, "```", ""]
    return "\n".join(lines).rstrip() + "\n"


def _first(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1][:120] if lines else ""


def _machine(results: Sequence[Result]) -> dict[str, Any]:
    rows = [row for each in results if each.kind == "machine" for row in each.rows]
    return {row["fact"]: row.get("value") for row in rows}


# Tables -------------------------------------------------------------------------------------------------


def table(rows: Iterable[Row], columns: Sequence[str]) -> list[str]:
    """The lines of a table; what a row lacks is empty, and an error stands in its last column."""
    lines = [f"| {' | '.join(each.replace('_', ' ') for each in columns)} |", f"|{' --- |' * len(columns)}"]
    for row in rows:
        cells = [_cell(row.get(column)) for column in columns]
        if "error" in row:
            cells[-1] = _cell(row["error"])
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1e4 else f"{value:,.0f}"
    if isinstance(value, int):
        return f"{value:,}"
    return " ".join(str(value).replace("|", "\\|").split())[:200]


# Sections -----------------------------------------------------------------------------------------------


def _facts(results: Sequence[Result], _: Row) -> list[str]:
    return ["## Machine", "", *table(_rows(results), ("fact", "value"))]


def _tests(results: Sequence[Result], _: Row) -> list[str]:
    rows = _rows(results)
    columns = ("file", "collected", "passed", "failed", "skipped", "not_run", "seconds", "remark")
    lines = ["## GPU tests", "", *table(rows, columns)]
    failures = [{"file": row["file"], **each} for row in rows for each in row.get("failures", ())]
    if failures:
        lines += ["", "Failures:", "", *table(failures, ("file", "test", "why"))]
    reasons = [
        {"file": row["file"], "skipped": count, "reason": reason}
        for row in rows
        for reason, count in row.get("reasons", {}).items()
    ]
    if reasons:
        lines += ["", "Skipped:", "", *table(reasons, ("file", "skipped", "reason"))]
    return lines


def _verdicts(results: Sequence[Result], _: Row) -> list[str]:
    columns = ("layout", "equal", "worst_relative", "own_worst_relative", "own_tolerance", "launches",
               "races", "seconds", "remark")  # fmt: skip
    return ["## Layouts beside one device (`meshwright verify`)", "", *table(_rows(results), columns)]


def _attention(results: Sequence[Result], _: Row) -> list[str]:
    rows = []
    for row in _rows(results):
        told = {key: row[key] for key in ("model", "backend", "head_dim")}
        flat = {
            f"{way} {field}": row[way][field]
            for way in ("forward", "backward")
            for field in ("seconds", "tflops", "share_of_datasheet")
            if way in row
        }
        rows.append(told | flat | {key: row[key] for key in ("error",) if key in row})
    columns = ("model", "backend", "head_dim", "forward tflops", "forward share_of_datasheet",
               "backward tflops", "backward share_of_datasheet", "remark")  # fmt: skip
    return ["## Attention, causal", "", *table(rows, columns)]


def _products(results: Sequence[Result], _: Row) -> list[str]:
    columns = ("kind", "model", "product", "m", "k", "n", "tflops", "share_of_datasheet", "remark")
    return ["## Products", "", *table(_rows(results), columns)]


def _steps(results: Sequence[Result], machine: Row) -> list[str]:
    rows = _rows(results)
    columns = ("model", "compute", "compiled", "gpus", "layers", "steps", "step_seconds",
               "tokens_per_second_per_gpu", "mfu", "causal_mfu", "peak_memory_bytes", "kernels_a_step",
               "kernel_seconds", "remark")  # fmt: skip
    lines = ["## Steps", "", "Model FLOPs utilisation is of the dense peak of bf16, also in fp8.", ""]
    lines += table(rows, columns)
    cluster = _cluster(machine)
    for row in (row for row in rows if "kernels" in row):
        lines += ["", f"### {_name_of(row)}", "", "Kernels:", ""]
        lines += table(row["kernels"], ("kernel", "operator", "count", "seconds", "share"))
        apart = differences(row, cluster)
        if not apart:
            lines += ["", f"There is no fake trace of a step on {row['gpus']} GPUs."]
            continue
        columns = ("operator", "count", "trace_count", "seconds", "trace_seconds")
        for field in ("seconds", "count"):
            told = f"The largest differences of {field} from the fake trace, with the rates of {cluster}"
            found = largest(apart, field)
            lines += ["", f"{told}:", "", *table(found, columns)] if found else ["", f"{told}: none."]
    return lines


def _name_of(row: Row) -> str:
    return f"{row['model']}, {row['compute']}, {'compiled' if row['compiled'] else 'eager'}"


def _cluster(machine: Row) -> str:
    from meshwright.hardware.catalogue import CLUSTERS, CUDA_NAMES

    name, capability = str(machine.get("GPU") or ""), str(machine.get("compute capability") or "9.0")
    own = next((key for part, key in CUDA_NAMES.items() if f" {part} " in f" {name} "), None)
    assert own is None or own in CLUSTERS
    major, _, minor = capability.partition(".")
    return traces.nearest(own, (int(major), int(minor or 0)))


def _rows(results: Sequence[Result]) -> list[Row]:
    return [row for each in results for row in each.rows]


SECTIONS: dict[str, Callable[[Sequence[Result], Row], list[str]]] = {
    "machine": _facts,
    "gpu_tests": _tests,
    "verify_layouts": _verdicts,
    "attention": _attention,
    "products": _products,
    "steps": _steps,
}
"""Kind of a part -> the lines of its section."""
