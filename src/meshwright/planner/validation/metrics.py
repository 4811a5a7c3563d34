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
from statistics import fmean
from typing import Any

from meshwright.planner.cost.model import CostModel
from meshwright.planner.cost.step import step_time
from meshwright.planner.cost.uncertainty import interval, regime, spread
from meshwright.planner.memory.generic import Generic, Memory
from meshwright.planner.validation import ranking
from meshwright.planner.validation.calibration import is_used
from meshwright.planner.validation.cases import Case, case_of
from meshwright.planner.validation.error_statistics import errors
from meshwright.planner.validation.infer_layout import DATA_ALONE
from meshwright.planner.validation.table import (
    PUBLISHED,
    PredictionError,
    Row,
    by_reason,
    read,
    rows_in_words,
    unread_columns,
)
from meshwright.spec import Layout, RunSpec, UserError
from meshwright.units import gigabytes


@dataclass(frozen=True)
class Prediction:
    """The predicted time and memory of a measured run."""

    case: Case
    spec: RunSpec
    """The chosen run of the case."""
    seconds: float
    memory: Memory
    recomputed: float = 1.0
    """Share of the layers that the run's policy holds for; the others recompute less."""

    @property
    def time_error_pct(self) -> float | None:
        """Predicted over measured seconds, less 1, in percent; None without a measurement."""
        return _excess_pct(self.seconds, self.case.seconds)

    @property
    def memory_error_pct(self) -> float | None:
        """Predicted over measured bytes, less 1, in percent; None without a measurement."""
        return _excess_pct(self.bytes, self.case.memory)

    @property
    def interval(self) -> tuple[float, float]:
        """90% prediction interval in seconds, (low, high); inferred properties widen it."""
        wider = spread(self.case.cluster, self.case.stack)
        return interval(self.seconds, self.regime, wider, len(self.case.inferred))

    @property
    def regime(self) -> str:
        """'known' or 'new' devices, or 'experts'; see `uncertainty.regime`."""
        return regime(self.case.cluster, self.spec.model)

    @property
    def covers(self) -> bool:
        """True if the measured time lies within the interval."""
        low, high = self.interval
        return self.case.seconds is not None and low <= self.case.seconds <= high

    @property
    def bytes(self) -> float:
        """Predicted bytes of the kind that the row measured: allocated, reserved, or the driver's count."""
        kinds = {"reserved": self.memory.reserved, "device": self.memory.device}
        return kinds.get(self.case.memory_kind, self.memory.allocated)

    @property
    def fits(self) -> bool:
        """True if the run was predicted to fit into memory."""
        return self.memory.device <= self.case.cluster.device.memory * (1 + 1e-9)

    @property
    def runs(self) -> bool:
        """True if the run was predicted to fit into memory, by a program that runs its layout."""
        return self.fits and self.case.runs_layout

    def to_json(self) -> dict[str, Any]:
        """The run that the row was taken for, and the measured and predicted figures."""
        case, spec = self.case, self.spec
        return {
            "row": case.row.number,
            "source": case.row.words["source"],
            "model": case.row.words["model"],
            "stack": case.stack.name,
            "cluster": case.cluster.device.name,
            "layout": spec.layout.describe(),
            "micro_batch": spec.micro_batch,
            "recompute": spec.recompute.policy,
            "recomputed_share": self.recomputed,
            "inferred": [*case.inferred, *case.derived],
            "notes": case.row.notes,
            "seconds": case.seconds,
            "predicted": self.seconds,
            "interval": list(self.interval),
            "time_error_pct": self.time_error_pct,
            "memory_bytes": case.memory,
            "predicted_bytes": self.bytes,
            "memory_error_pct": self.memory_error_pct,
            "fitted": case.ran,
            "predicted_to_fit": self.fits,
            "program_runs_layout": case.runs_layout,
        }


def _excess_pct(predicted: float, measured: float | None) -> float | None:
    return None if measured is None else 100 * (predicted / measured - 1)


_REASONS = 3
"""Most reasons that the error for a table without predictions lists."""
COLUMNS = ("source", "model", "gpu")
"""Columns that a report can be broken down by."""


def _between(more: Memory, less: Memory, share: float) -> Memory:
    """Bytes where a policy holds for a share of the layers, of those with `more` and with `less`."""
    terms = {
        name: share * value + (1 - share) * getattr(more, name)
        for name, value in vars(less).items()
        if name != "rank"
    }
    return Memory(**terms, rank=less.rank)


def predict(case: Case) -> Prediction:
    """The fastest of the case's runs that fit, with as much recomputation as fits.

    Where the row leaves that open and a policy does not fit, the next one is taken for as many layers as it
    takes, as Megatron-LM's --recompute-num-layers does.
    """
    costs = CostModel(case.cluster, case.stack, case.format)
    capacity, memory = case.cluster.device.memory, Generic(costs)

    def seconds(spec: RunSpec) -> float:
        if case.block_only:
            return costs.blocks(spec).seconds(spec.model.kinds[0]).total
        return step_time(spec, costs).seconds

    by_layout: dict[Layout, list[tuple[RunSpec, Memory]]] = {}
    for spec in case.specs:
        by_layout.setdefault(spec.layout, []).append((spec, memory.peak(spec)))
    found = []
    for policies in by_layout.values():
        fits = (place for place, (_, need) in enumerate(policies) if need.device <= capacity)
        place = next(fits, len(policies) - 1)
        spec, need = policies[place]
        time, (less, more) = seconds(spec), policies[max(0, place - 1)]
        in_part = case.stack.selective != "named"  # a compiled loop over layers recomputes in all of them
        if in_part and more.device > max(need.device, capacity):
            share = min(1.0, (more.device - capacity) / (more.device - need.device))
            time, need = share * time + (1 - share) * seconds(less), _between(more, need, share)
            found.append(Prediction(case, spec, time, need, share))
        else:
            found.append(Prediction(case, spec, time, need))
    fitting = [prediction for prediction in found if prediction.fits]
    best = min(fitting or found, key=lambda prediction: prediction.seconds)
    if not fitting and case.ran and case.row.inferred.get("layout") == DATA_ALONE:
        raise PredictionError(
            f"its layout is not known, and {DATA_ALONE} need {gigabytes(best.memory.device)} of "
            f"{gigabytes(capacity)}; give tp, pp and cp"
        )
    return best


@dataclass(frozen=True)
class ValidatedTable:
    """The rows of a table, and their predictions."""

    table: Path
    read: tuple[Row, ...]
    predictions: tuple[Prediction, ...]
    skipped: tuple[dict[str, Any], ...]
    """Row, source and reason of each row that cannot be predicted."""
    unread: tuple[str, ...] = ()
    """Columns that say nothing here."""


def validate(table: Path = PUBLISHED) -> ValidatedTable:
    """Predict every row of a table.

    Raises `UserError` for a file that is not a table of runs, or has no row that can be predicted.
    """
    rows = read(table)
    predictions: list[Prediction] = []
    skipped: list[dict[str, Any]] = []
    for row in rows:
        try:
            predictions.append(predict(case_of(row, rows)))
        except UserError as reason:
            skipped.append({"row": row.number, "source": row.words["source"], "reason": str(reason)})
    if not predictions:
        reasons = by_reason(skipped)
        listed = "; ".join(
            f"{rows_in_words(numbers)}: {reason}" for reason, numbers in [*reasons.items()][:_REASONS]
        )
        more = f"; and {len(reasons) - _REASONS} further reasons" if len(reasons) > _REASONS else ""
        raise UserError(f"{table}: none of its {len(rows)} rows can be predicted: {listed}{more}")
    unread = tuple(unread_columns(table))
    return ValidatedTable(table, tuple(rows), tuple(predictions), tuple(skipped), unread)


def cells(predictions: Iterable[Prediction]) -> list[ranking.Cell]:
    """The cells of some runs. A layout that was measured several times counts once, with its mean times."""
    by_key: dict[tuple[Any, ...], dict[str, ranking.Times]] = {}
    firsts: dict[tuple[Any, ...], Prediction] = {}
    for prediction in predictions:
        case, row, spec = prediction.case, prediction.case.row, prediction.spec
        if case.seconds is not None and not case.block_only:
            sizes = row.numbers["gpus"], row.numbers["seq_len"], spec.train.batch_tokens
            key = (*(row.words[name] for name in COLUMNS), *sizes, case.format)
            layout = f"{spec.layout!r} {spec.recompute!r}"
            firsts.setdefault(key, prediction)
            times = by_key.setdefault(key, {}).setdefault(layout, [])
            times.append((prediction.seconds, case.seconds))
    return [_cell(firsts[key], layouts) for key, layouts in by_key.items() if len(layouts) > 2]


def _cell(first: Prediction, layouts: dict[str, ranking.Times]) -> ranking.Cell:
    row = first.case.row
    times = [(fmean(a for a, _ in each), fmean(b for _, b in each)) for each in layouts.values()]
    batch = first.spec.train.batch_tokens
    return ranking.Cell(row.words["model"], int(row.numbers["gpus"]), row.words["gpu"], batch, times)


def confusion(predictions: Iterable[Prediction]) -> dict[str, int]:
    """Counts of runs predicted to run or not ('fit', 'oom'), by whether that was 'true' or 'false'."""
    counts = {"true_fit": 0, "false_fit": 0, "true_oom": 0, "false_oom": 0}
    for prediction in predictions:
        if prediction.case.ran is not None:
            word = "fit" if prediction.runs else "oom"
            counts[f"{'true' if prediction.runs == prediction.case.ran else 'false'}_{word}"] += 1
    return counts


def summary(validation: ValidatedTable, rows: Sequence[Row]) -> dict[str, Any]:
    """The figures of a table, or of some of its rows."""
    numbers = {row.number for row in rows}
    predictions = [each for each in validation.predictions if each.case.row.number in numbers]
    timed = [each for each in predictions if each.case.seconds is not None]
    return {
        "rows": len(rows),
        "predicted": len(predictions),
        "skipped": dict(Counter(skip["reason"] for skip in validation.skipped if skip["row"] in numbers)),
        "time": errors(each.time_error_pct for each in predictions),
        "covered": fmean(each.covers for each in timed) if timed else None,
        "memory": errors(each.memory_error_pct for each in predictions),
        **ranking.figures(cells(predictions)),
        "oom": confusion(predictions),
    }


def report(validation: ValidatedTable, by: str = "source") -> dict[str, Any]:
    """The figures of all rows, of those that did not calibrate the constants, by source and by `by`.

    Raises `UserError` for a column that is not in `COLUMNS`.
    """
    if by not in COLUMNS:
        raise UserError(f"by: '{by}' is not a column to report by; give one of {', '.join(COLUMNS)}")
    rows = validation.read
    used = [row.number for row in rows if is_used(row, validation.table)]
    others = [each for each in validation.predictions if each.case.row.number not in used]
    figures = {
        **summary(validation, rows),
        "skipped_rows": list(validation.skipped),
        "unread_columns": list(validation.unread),
        "notes": [
            {"row": each.case.row.number, "source": each.case.row.words["source"], "note": note}
            for each in validation.predictions
            for note in each.case.row.notes
        ],
        "cells": [cell.to_json() for cell in cells(validation.predictions)],
        "calibrated_rows": used,
        "others": {
            "time": errors(each.time_error_pct for each in others),
            "memory": errors(each.memory_error_pct for each in others),
        },
    }
    for column in dict.fromkeys(("source", by)):
        names = dict.fromkeys(row.words[column] for row in rows)
        figures[f"by_{column}"] = {
            name or "(not said)": summary(validation, [row for row in rows if row.words[column] == name])
            for name in names
        }
    return figures
