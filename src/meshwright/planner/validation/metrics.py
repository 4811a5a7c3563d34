"""How far predictions are from measured runs: time, memory, order, choice, and what does not fit.

Each row is predicted from what it says alone. Where it does not say which of several things was run, the
one that its authors would have chosen is taken: the fastest of those that are predicted to fit. Rows that
cannot be predicted are counted by reason.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

from meshwright.planner.cost.model import CostModel
from meshwright.planner.cost.step import step_time
from meshwright.planner.cost.uncertainty import interval
from meshwright.planner.memory.generic import Generic, Memory
from meshwright.planner.validation.calibration import is_used
from meshwright.planner.validation.cases import PUBLISHED, Case, PredictionError, Row, case_of, read
from meshwright.spec import RunSpec, UserError


@dataclass(frozen=True)
class Prediction:
    """A row, and what was predicted for it."""

    case: Case
    spec: RunSpec
    """The one of the case's runs that was taken."""
    seconds: float
    memory: Memory

    @property
    def time_error(self) -> float | None:
        """Predicted over measured seconds, less 1."""
        measured = self.case.seconds
        return None if measured is None else self.seconds / measured - 1

    @property
    def interval(self) -> tuple[float, float]:
        """Seconds between which 90% of such runs lie; what was inferred widens it."""
        return interval(self.seconds, unknown=len(self.case.inferred))

    @property
    def covers(self) -> bool:
        """Whether the measured time lies within the interval."""
        low, high = self.interval
        return self.case.seconds is not None and low <= self.case.seconds <= high

    @property
    def bytes(self) -> float:
        """What the row's measurement counts: what is allocated, or all that the driver sees."""
        return self.memory.device if self.case.memory_kind == "device" else self.memory.allocated

    @property
    def memory_error(self) -> float | None:
        """Predicted over measured bytes, less 1."""
        measured = self.case.memory
        return None if measured is None else self.bytes / measured - 1

    @property
    def fits(self) -> bool:
        """Whether it was predicted to fit."""
        return self.memory.device <= self.case.cluster.device.memory


COLUMNS = ("source", "model", "gpu")
"""What a report can be made by."""
_NEARLY = 1.1
"""What a policy may need over the device's memory, to be the one of a run that is known to have fitted."""


def predict(case: Case) -> Prediction:
    """The fastest of the case's runs that fit, with the least recomputation that does."""
    on = CostModel(case.cluster, case.stack, case.format)
    capacity = case.cluster.device.memory
    held = [(spec, Generic(on).peak(spec)) for spec in case.specs]
    possible = [each for each in held if each[1].device <= capacity * _NEARLY] or held[-1:]
    alike = [each for each in possible if each[0].recompute == possible[0][0].recompute]
    fitting = [each for each in alike if each[1].device <= capacity]
    timed = (
        Prediction(case, spec, _seconds(spec, on, case.block_only), needed)
        for spec, needed in fitting or alike
    )
    return min(timed, key=lambda each: each.seconds)


def _seconds(spec: RunSpec, on: CostModel, block_only: bool) -> float:
    return on.blocks(spec).passes(False).total if block_only else step_time(spec, on).seconds


@dataclass(frozen=True)
class Validation:
    """All rows of a table."""

    table: Path
    read: tuple[Row, ...]
    predictions: tuple[Prediction, ...]
    skipped: dict[int, str]
    """Row -> why it cannot be predicted."""


def validate(table: Path = PUBLISHED) -> Validation:
    """Predict every row of a table. Raises `UserError` for a file that is none."""
    rows = read(table)
    made: list[Prediction] = []
    skipped: dict[int, str] = {}
    for row in rows:
        try:
            made.append(predict(case_of(row, rows)))
        except (PredictionError, UserError) as why:
            skipped[row.number] = str(why)
    return Validation(table, tuple(rows), tuple(made), skipped)


def errors(found: Iterable[float | None]) -> dict[str, float | int | None]:
    """Mean, median and 90th percentile of absolute errors, in percent."""
    sizes = sorted(100 * abs(error) for error in found if error is not None)
    if not sizes:
        return {"mean_abs_pct": None, "median_abs_pct": None, "p90_abs_pct": None, "rows": 0}
    high = sizes[min(len(sizes) - 1, int(0.9 * len(sizes)))]
    return {
        "mean_abs_pct": fmean(sizes),
        "median_abs_pct": median(sizes),
        "p90_abs_pct": high,
        "rows": len(sizes),
    }


def groups(predictions: Iterable[Prediction]) -> list[list[Prediction]]:
    """Runs of one model and batch on one cluster that differ in how they were laid out, three or more."""
    found: dict[tuple[Any, ...], list[Prediction]] = {}
    for each in predictions:
        if each.case.seconds is None or each.case.block_only:
            continue
        row = each.case.row
        key = (
            row.words["source"],
            row.words["model"],
            row.words["gpu"],
            row.numbers["gpus"],
            row.numbers["seq_len"],
            each.spec.train.batch_tokens,
            each.case.format,
        )
        found.setdefault(key, []).append(each)
    return [listed for listed in found.values() if len(listed) > 2]


def kendall(pairs: Sequence[tuple[float, float]]) -> float | None:
    """Kendall's tau-b of (predicted, measured): 1 where the order is the same, -1 where it is reversed."""
    agree = apart = ties_one = ties_other = 0
    for i, (a, b) in enumerate(pairs):
        for c, d in pairs[:i]:
            first, second = (a > c) - (a < c), (b > d) - (b < d)
            agree += first * second > 0
            apart += first * second < 0
            ties_one += first == 0 and second != 0
            ties_other += second == 0 and first != 0
    either = agree + apart
    scale = ((either + ties_one) * (either + ties_other)) ** 0.5
    return (agree - apart) / scale if scale else None


def regret(listed: Sequence[Prediction]) -> float:
    """By how much the measured time of what is predicted fastest exceeds the fastest, in percent."""
    chosen = min(listed, key=lambda each: each.seconds)
    times = [each.case.seconds for each in listed if each.case.seconds is not None]
    assert chosen.case.seconds is not None
    return 100 * (chosen.case.seconds / min(times) - 1)


def confusion(predictions: Iterable[Prediction]) -> dict[str, int]:
    """What fitted and what did not, predicted and measured."""
    found = {"true_fit": 0, "false_fit": 0, "true_oom": 0, "false_oom": 0}
    for each in predictions:
        if each.case.ran is not None:
            word = "fit" if each.fits else "oom"
            found[f"{'true' if each.fits == each.case.ran else 'false'}_{word}"] += 1
    return found


def summary(found: Validation, rows: Sequence[Row]) -> dict[str, Any]:
    """The figures of a table, or of some of its rows."""
    numbers = {row.number for row in rows}
    predictions = [each for each in found.predictions if each.case.row.number in numbers]
    listed = groups(predictions)
    taus = [
        tau
        for each in listed
        if (tau := kendall([(x.seconds, x.case.seconds or 0.0) for x in each])) is not None
    ]
    return {
        "rows": len(rows),
        "predicted": len(predictions),
        "skipped": dict(Counter(why for number, why in found.skipped.items() if number in numbers)),
        "time": errors(each.time_error for each in predictions),
        "memory": errors(each.memory_error for each in predictions),
        "tau": fmean(taus) if taus else None,
        "regret_pct": fmean(map(regret, listed)) if listed else None,
        "groups": len(listed),
        "oom": confusion(predictions),
    }


def _by(found: Validation, column: str) -> dict[str, Any]:
    """What a column says -> the figures of the rows that say it."""
    listed: dict[str, list[Row]] = {}
    for row in found.read:
        listed.setdefault(row.words[column] or "(not said)", []).append(row)
    return {name: summary(found, rows) for name, rows in listed.items()}


def report(found: Validation, by: str = "source") -> dict[str, Any]:
    """The figures of all rows, of those that did not calibrate the constants, by source and by `by`.

    Raises `UserError` for a column that is none of `COLUMNS`.
    """
    if by not in COLUMNS:
        raise UserError(f"by: '{by}' is no column of runs to report by; give {', '.join(COLUMNS)}")
    published = found.table == PUBLISHED
    used = [row.number for row in found.read if published and is_used(row.number)]
    others = [each for each in found.predictions if each.case.row.number not in used]
    timed = [each for each in found.predictions if each.case.seconds is not None]
    return {
        **summary(found, found.read),
        "covered": fmean(each.covers for each in timed) if timed else None,
        "calibrated_rows": used,
        "others": {
            "time": errors(each.time_error for each in others),
            "memory": errors(each.memory_error for each in others),
        },
        **{f"by_{column}": _by(found, column) for column in {"source": None, by: None}},
    }


def each_row(found: Validation) -> list[dict[str, Any]]:
    """Every row that was predicted: what it was taken for, and both figures."""
    return [
        {
            "row": each.case.row.number,
            "source": each.case.row.words["source"],
            "model": each.case.row.words["model"],
            "stack": each.case.stack.name,
            "cluster": each.case.cluster.device.name,
            "layout": each.spec.layout.describe(),
            "micro_batch": each.spec.micro_batch,
            "recompute": each.spec.recompute.policy,
            "inferred": list(each.case.inferred),
            "seconds": each.case.seconds,
            "predicted": each.seconds,
            "interval": list(each.interval),
            "time_error_pct": None if each.time_error is None else 100 * each.time_error,
            "memory_bytes": each.case.memory,
            "predicted_bytes": each.bytes,
            "memory_error_pct": None if each.memory_error is None else 100 * each.memory_error,
            "fitted": each.case.ran,
            "predicted_to_fit": each.fits,
        }
        for each in found.predictions
    ]


def skipped_rows(found: Validation) -> list[dict[str, Any]]:
    """Every row that was not predicted, and why."""
    return [
        {"row": row.number, "source": row.words["source"], "reason": found.skipped[row.number]}
        for row in found.read
        if row.number in found.skipped
    ]
