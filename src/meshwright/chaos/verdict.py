"""Verdict on a run under faults: figures of each fault and kind, and the oracles that must hold."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from meshwright.chaos.chaos import ENDS, TOLD_S, Chaos, Course
from meshwright.chaos.faults import KINDS
from meshwright.runs.record import Row, read_run
from meshwright.spec import RunSpec

ORACLES = {
    "ended": "the run ended well",
    "noticed": "every fault was noticed that must be",
    "named": "what was reported names the fault and the rank, and nothing else was reported",
    "explained": "no failure without a fault",
    "parameters": "the final parameters are those of the run without faults",
    "samples": "the samples are those of the run without faults",
    "rows": "metrics.jsonl has each step once",
    "clean": "no process, temporary folder or partial checkpoint is left behind",
}
"""Oracles of a run under faults; those of digests are not asked (None) after kinds that change numbers."""


def figures(chaos: Chaos) -> list[Row]:
    """Return a row for each fault that has hit: seconds until noticed, resumed and back, and the verdict."""
    courses = chaos.courses()
    return [
        _row(chaos, number, course, [later for other, later in courses.items() if other > number])
        for number, course in courses.items()
    ]


def _row(chaos: Chaos, number: int, course: Course, later: Sequence[Course]) -> Row:
    """Return the row of a fault, of which `later` ones may hit before it is noticed in a replay."""
    fault, hit, kind = course.placed, course.hit, KINDS[course.fault.kind]
    acted = hit.acted / 1e9
    noticed, message = course.noticed, course.message
    told, unnoticed = None, kind.failure is not None and noticed is None
    if kind.event is not None and not (kind.damages and course.target is None):
        alike = [other.hit.acted / 1e9 for other in later if KINDS[other.fault.kind].event == kind.event]
        told = chaos.event(number, course.target, min(alike, default=math.inf))
        lost = kind.failure is None and _ended_before(acted + TOLD_S, later)
        unnoticed = unnoticed or (told is None and not lost)
    if kind.failure is not None:
        who = f"rank {fault.rank} " if kind.ranked else ""
        named = course.told == kind.failure[0] and kind.failure[1] in message and who in message
    else:
        named = course.told not in ENDS
        if told is not None:
            noticed, message = told[1], str(told[0].get("message", told[0]["kind"]))
    return {
        **fault.to_json(),
        "at": acted - chaos.began,
        "noticed": None if noticed is None else max(0.0, noticed - acted),
        "resumed": hit.resumed / 1e9 - acted if hit.resumed else None,
        "back": hit.back / 1e9 - acted if hit.back else None,
        "lost": max(0, hit.acted_step - hit.resumed_step) if hit.resumed else 0,
        "target": course.target,
        "message": message,
        "unnoticed": unnoticed,
        "misnamed": noticed is not None and not named,
    }


def _ended_before(until: float, later: Sequence[Course]) -> bool:
    """True if one of the `later` faults ended the ranks before a time, and so what they had to record."""
    return any(other.hit.acted / 1e9 < until for other in later if KINDS[other.fault.kind].failure)


def by_kind(rows: Sequence[Row]) -> list[Row]:
    """Return a row for each kind: how many, seconds until noticed and back (median, worst), and the sums."""
    found = []
    for name in KINDS:
        own = [row for row in rows if row["kind"] == name]
        if own:
            found.append(
                {
                    "kind": name,
                    "n": len(own),
                    **_median_and_worst("noticed", own),
                    **_median_and_worst("back", own),
                    **{key: sum(row[key] for row in own) for key in ("lost", "unnoticed", "misnamed")},
                }
            )
    return found


def _median_and_worst(key: str, rows: Sequence[Row]) -> Row:
    values = [row[key] for row in rows if row[key] is not None]
    if not values:
        return {f"{key}_median": None, f"{key}_worst": None}
    return {f"{key}_median": statistics.median(values), f"{key}_worst": max(values)}


def _mean(key: str, rows: Sequence[Row]) -> float | None:
    """Return the mean of a figure over the faults after which ranks were started again, or None."""
    values = [row[key] for row in rows if row["resumed"] is not None and row[key] is not None]
    return statistics.fmean(values) if values else None


def incomplete_rows(spec: RunSpec, out: Path) -> list[int]:
    """Return the steps whose row is missing in the metrics of a run that has ended, or there twice."""
    last, every = spec.train.last_step, spec.train.log_every
    expected = {step for step in range(1, last + 1) if step % every == 0 or step == last}
    counts = Counter(row["step"] for row in read_run(out).metrics if "loss" in row)
    return sorted(step for step in expected | set(counts) if counts[step] != (step in expected))


def report(
    spec: RunSpec,
    chaos: Chaos,
    twin: Mapping[str, Any],
    result: Mapping[str, Any] | None,
    seconds: float,
    left: Sequence[str],
) -> Row:
    """Return the figures of a run under faults, and the oracles.

    It took `seconds`, ended with `result` (None where it failed), and left behind what `left` names; `twin`
    has the times of the run without faults, and the digests that this one must end with.
    """
    rows = figures(chaos)
    missing = incomplete_rows(spec, chaos.run) if result is not None else []
    altered = any(KINDS[row["kind"]].alters for row in rows)
    oracles: dict[str, bool | None] = {
        "ended": result is not None,
        "noticed": not any(row["unnoticed"] for row in rows),
        "named": not any(row["misnamed"] for row in rows),
        "explained": not chaos.unexplained,
    }
    for name in ("parameters", "samples"):
        key = f"{name}_sha256"
        oracles[name] = None if altered else result is not None and result[key] == twin[key]
    oracles |= {"rows": result is not None and not missing, "clean": not left}
    saves, stopped = chaos.plan.hits.saves
    return {
        "planned": len(chaos.plan.hits.faults),
        "injected": len(rows),
        "steps": spec.train.last_step,
        "seconds": seconds,
        "unfaulted_seconds": twin["wall_seconds"],
        "effective": None if result is None else twin["wall_seconds"] / seconds,
        "step_seconds": twin["step_seconds"],
        "detection_seconds": _mean("noticed", rows),
        "restart_seconds": _mean("resumed", rows),
        "save_seconds": stopped / 1e9 / saves if saves else None,
        "holds": all(value is not False for value in oracles.values()),
        "oracles": oracles,
        "unexplained": chaos.unexplained,
        "left_behind": list(left),
        "incomplete_steps": missing,
        "kinds": by_kind(rows),
        "faults": rows,
    }
