"""The operators of profiled steps that are farthest from the fake trace of the same run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gpu_day import traces
from gpu_day.profiles import MESSAGES
from gpu_day.results import Row

NUMBER = 10
OTHERS = "all others"


def differences(row: Row, cluster: str) -> list[Row]:
    """A row for each operator of a step (`steps`): counts and seconds, measured and by the trace.

    Compiled blocks have few operators of PyTorch left, so that only those with products are told apart there.
    """
    wanted = traces.expected(row["model"], row["compute"], row["gpus"], row["layers"], cluster)
    if wanted is None:
        return []
    found: Mapping[str, Row] = row["operators"]
    if row["compiled"]:
        kept = {name for name, each in wanted.items() if each["flops"] > 0} | {MESSAGES}
        found, wanted = _folded(found, kept), _folded(wanted, kept)
    nothing = {"count": 0, "seconds": 0.0}
    rows = []
    for name in sorted({*found, *wanted}):
        own, theirs = found.get(name, nothing), wanted.get(name, nothing)
        if not own["count"] and abs(theirs["count"]) < 0.5:
            continue
        rows.append(
            {
                "operator": name,
                "count": own["count"],
                "trace_count": round(theirs["count"], 2),
                "seconds": own["seconds"],
                "trace_seconds": round(theirs["seconds"], 9),
            }
        )
    return rows


def _folded(operators: Mapping[str, Row], kept: set[str]) -> dict[str, Row]:
    """Operators with those that are not `kept` as one."""
    found: dict[str, Row] = {name: each for name, each in operators.items() if name in kept}
    others = [each for name, each in operators.items() if name not in kept]
    found[OTHERS] = {field: sum(each[field] for each in others) for field in ("count", "seconds")}
    return found


def largest(rows: Sequence[Row], field: str) -> list[Row]:
    """The rows with the largest differences of "seconds" or of "count", without those that have none."""

    def apart(row: Row) -> float:
        return abs(float(row[field]) - float(row[f"trace_{field}"]))

    least = 0.5 if field == "count" else 1e-7
    return sorted((row for row in rows if apart(row) >= least), key=lambda row: -apart(row))[:NUMBER]
