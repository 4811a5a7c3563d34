"""Errors of predictions against measured runs: time, memory, ranking, choice of layout, and out of memory.

Each row is predicted from its own cells. Of several runs that it may describe, the one that its authors would
have chosen counts: the fastest of those predicted to fit. Rows that cannot be predicted are counted by
reason.
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
from meshwright.planner.validation.cases import Case, case_of
from meshwright.planner.validation.table import PUBLISHED, PredictionError, Row, read
from meshwright.spec import RunSpec, UserError


@dataclass(frozen=True)
class Prediction:
    """The predicted time and memory of a measured run."""

    case: Case
    spec: RunSpec
    """The chosen run of the case."""
    seconds: float
    memory: Memory

    @property
    def time_error(self) -> float | None:
        """Predicted over measured seconds, less 1."""
        measured = self.case.seconds
        return None if measured is None else self.seconds / measured - 1

    @property
    def interval(self) -> tuple[float, float]:
        """90% prediction interval in seconds, (low, high); inferred properties widen it."""
        return interval(self.seconds, unknown=len(self.case.inferred))

    @property
    def covers(self) -> bool:
        """True if the measured time lies within the interval."""
        low, high = self.interval
        return self.case.seconds is not None and low <= self.case.seconds <= high

    @property
    def bytes(self) -> float:
        """Predicted bytes of the kind that the row measured: allocated, or all that the driver reports."""
        return self.memory.device if self.case.memory_kind == "device" else self.memory.allocated

    @property
    def memory_error(self) -> float | None:
        """Predicted over measured bytes, less 1."""
        measured = self.case.memory
        return None if measured is None else self.bytes / measured - 1

    @property
    def fits(self) -> bool:
        """True if the run was predicted to fit into memory."""
        return self.memory.device <= self.case.cluster.device.memory


COLUMNS = ("source", "model", "gpu")
"""Columns that a report can be broken down by."""
_NEARLY = 1.1
"""A run that is known to have fitted may be predicted at up to this multiple of the device's memory. Source:
assumed."""


def predict(case: Case) -> Prediction:
    """The fastest of the case's runs that fit, with the least recomputation that fits."""
    costs = CostModel(case.cluster, case.stack, case.format)
    capacity = case.cluster.device.memory
    needs = [(spec, Generic(costs).peak(spec)) for spec in case.specs]
    possible = [(spec, need) for spec, need in needs if need.device <= capacity * _NEARLY] or needs[-1:]
    least = [(spec, need) for spec, need in possible if spec.recompute == possible[0][0].recompute]
    fitting = [(spec, need) for spec, need in least if need.device <= capacity]

    def seconds(spec: RunSpec) -> float:
        return costs.blocks(spec).passes(False).total if case.block_only else step_time(spec, costs).seconds

    timed = (Prediction(case, spec, seconds(spec), need) for spec, need in fitting or least)
    return min(timed, key=lambda prediction: prediction.seconds)


@dataclass(frozen=True)
class Validation:
    """The rows of a table, and their predictions."""

    table: Path
    read: tuple[Row, ...]
    predictions: tuple[Prediction, ...]
    skipped: dict[int, str]
    """Number of a row -> reason why it cannot be predicted."""


def validate(table: Path = PUBLISHED) -> Validation:
    """Predict every row of a table. Raises `UserError` for a file that is not a table of runs."""
    rows = read(table)
    predictions: list[Prediction] = []
    skipped: dict[int, str] = {}
    for row in rows:
        try:
            predictions.append(predict(case_of(row, rows)))
        except (PredictionError, UserError) as reason:
            skipped[row.number] = str(reason)
    return Validation(table, tuple(rows), tuple(predictions), skipped)


def errors(relative: Iterable[float | None]) -> dict[str, float | int | None]:
    """Mean, median and 90th percentile of absolute relative errors, in percent; None is left out."""
    sizes = sorted(100 * abs(error) for error in relative if error is not None)
    high = sizes[min(len(sizes) - 1, int(0.9 * len(sizes)))] if sizes else None
    return {
        "mean_abs_pct": fmean(sizes) if sizes else None,
        "median_abs_pct": median(sizes) if sizes else None,
        "p90_abs_pct": high,
        "rows": len(sizes),
    }


def groups(predictions: Iterable[Prediction]) -> list[list[Prediction]]:
    """Groups of three or more runs of one model and batch on one cluster that differ in their layouts."""
    by_key: dict[tuple[Any, ...], list[Prediction]] = {}
    for prediction in predictions:
        if prediction.case.seconds is None or prediction.case.block_only:
            continue
        row = prediction.case.row
        key = (
            row.words["source"],
            row.words["model"],
            row.words["gpu"],
            row.numbers["gpus"],
            row.numbers["seq_len"],
            prediction.spec.train.batch_tokens,
            prediction.case.format,
        )
        by_key.setdefault(key, []).append(prediction)
    return [group for group in by_key.values() if len(group) > 2]


def kendall(pairs: Sequence[tuple[float, float]]) -> float | None:
    """Kendall's tau-b of (predicted, measured): 1 for equal order, -1 for reversed order, None if
    undefined."""
    agree = apart = ties_one = ties_other = 0
    for i, (a, b) in enumerate(pairs):
        for c, d in pairs[:i]:
            first, second = (a > c) - (a < c), (b > d) - (b < d)
            agree += first * second > 0
            apart += first * second < 0
            ties_one += first == 0 and second != 0
            ties_other += second == 0 and first != 0
    untied = agree + apart
    scale = ((untied + ties_one) * (untied + ties_other)) ** 0.5
    return (agree - apart) / scale if scale else None


def regret(group: Sequence[Prediction]) -> float:
    """Measured time of the layout predicted fastest, over the fastest measured time, less 1, in percent."""
    times = [(prediction.seconds, prediction.case.seconds or 0.0) for prediction in group]
    chosen = min(times, key=lambda pair: pair[0])
    return 100 * (chosen[1] / min(measured for _, measured in times) - 1)


def confusion(predictions: Iterable[Prediction]) -> dict[str, int]:
    """Counts of runs predicted to fit or not ('fit', 'oom'), by whether that was 'true' or 'false'."""
    counts = {"true_fit": 0, "false_fit": 0, "true_oom": 0, "false_oom": 0}
    for prediction in predictions:
        if prediction.case.ran is not None:
            word = "fit" if prediction.fits else "oom"
            counts[f"{'true' if prediction.fits == prediction.case.ran else 'false'}_{word}"] += 1
    return counts


def summary(validation: Validation, rows: Sequence[Row]) -> dict[str, Any]:
    """The figures of a table, or of some of its rows."""
    numbers = {row.number for row in rows}
    predictions = [each for each in validation.predictions if each.case.row.number in numbers]
    comparable = groups(predictions)
    taus = [kendall([(each.seconds, each.case.seconds or 0.0) for each in group]) for group in comparable]
    defined = [tau for tau in taus if tau is not None]
    return {
        "rows": len(rows),
        "predicted": len(predictions),
        "skipped": dict(Counter(why for number, why in validation.skipped.items() if number in numbers)),
        "time": errors(each.time_error for each in predictions),
        "memory": errors(each.memory_error for each in predictions),
        "tau": fmean(defined) if defined else None,
        "regret_pct": fmean(map(regret, comparable)) if comparable else None,
        "groups": len(comparable),
        "oom": confusion(predictions),
    }


def _by(validation: Validation, column: str) -> dict[str, Any]:
    """Value of a column -> the figures of the rows that have it."""
    rows: dict[str, list[Row]] = {}
    for row in validation.read:
        rows.setdefault(row.words[column] or "(not said)", []).append(row)
    return {name: summary(validation, some) for name, some in rows.items()}


def report(validation: Validation, by: str = "source") -> dict[str, Any]:
    """The figures of all rows, of those that did not calibrate the constants, by source and by `by`.

    Raises `UserError` for a column that is not in `COLUMNS`.
    """
    if by not in COLUMNS:
        raise UserError(f"by: '{by}' is not a column to report by; give one of {', '.join(COLUMNS)}")
    published = validation.table == PUBLISHED
    used = [row.number for row in validation.read if published and is_used(row.number)]
    others = [each for each in validation.predictions if each.case.row.number not in used]
    timed = [each for each in validation.predictions if each.case.seconds is not None]
    return {
        **summary(validation, validation.read),
        "covered": fmean(each.covers for each in timed) if timed else None,
        "calibrated_rows": used,
        "others": {
            "time": errors(each.time_error for each in others),
            "memory": errors(each.memory_error for each in others),
        },
        **{f"by_{column}": _by(validation, column) for column in {"source": None, by: None}},
    }


def each_row(validation: Validation) -> list[dict[str, Any]]:
    """Every predicted row: the run that it was taken for, and the measured and predicted figures."""
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
        for each in validation.predictions
    ]


def skipped_rows(validation: Validation) -> list[dict[str, Any]]:
    """Every row that was not predicted, with the reason."""
    return [
        {"row": row.number, "source": row.words["source"], "reason": validation.skipped[row.number]}
        for row in validation.read
        if row.number in validation.skipped
    ]
