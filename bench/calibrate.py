"""Fit the planner's numbers on published runs: `python bench/calibrate.py`.

The numbers that `planner/validation/calibration.py` names are moved together, by the steps of a robust
regression of ln(predicted / measured) step time on their logarithms: least absolute errors, by reweighted
least squares. A penalty holds each number near what is assumed of it before any run is seen. Runs of one
model on one device are close to each other, so n of them weigh as n^0.7. It prints what it found; the tables
are edited by hand, rounded.

`--leave-out` starts from the tables as they stand. For each source of runs it takes one such step without
that source, predicts its runs by the result, and writes these seconds to `data/left_out.csv`.
"""

from __future__ import annotations

import argparse
import copy
import math
import tomllib
from collections import Counter
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from meshwright.hardware import catalogue
from meshwright.hardware.sourced import read_tables
from meshwright.planner.cost import software
from meshwright.planner.validation import calibration, left_out
from meshwright.planner.validation.cases import case_of
from meshwright.planner.validation.metrics import Prediction, predict
from meshwright.planner.validation.table import FRONTIER, PUBLISHED, read
from meshwright.spec import UserError

_STEP = 0.06
"""Step of the logarithm of a number for its derivative."""
_PRIOR = 0.35
"""Standard deviation of the logarithm of a number around what is assumed of it."""
_FURTHEST = 0.5
"""Largest step of a logarithm in one round."""
_EXACT = 0.02
"""Errors below this count in squares."""
_NEAREST = 4
"""Runs of one source, model, device and precision that derivatives are taken of."""

Path_ = tuple[str, ...]
Point = dict[Path_, float]
Key = tuple[int, int]
"""Number of the table and of the row."""


class Run(NamedTuple):
    """A predicted run, what it belongs to, and whether it calibrates."""

    prediction: Prediction
    kind: tuple[str, ...]
    """Source, model, device and precision."""
    used: bool

    @property
    def error(self) -> float:
        """ln(predicted / measured) of its seconds."""
        assert self.prediction.case.seconds is not None
        return math.log(self.prediction.seconds / self.prediction.case.seconds)


STACKS = tomllib.loads(Path(software.__file__).with_name("stacks.toml").read_text(encoding="utf-8"))
CLUSTERS = tomllib.loads(catalogue.DATA.read_text(encoding="utf-8"))
TABLES = [(path, read(path)) for path in (PUBLISHED, FRONTIER)]


def assumed() -> Point:
    """Where the fitted numbers stand in the tables of stacks and of clusters, and what is assumed of each."""
    found: Point = {}
    for name, kinds in calibration.OF_STACKS.items():
        number = "stacks", "defaults", "numbers", name
        found |= (
            {(*number, kind): value for kind, value in kinds.items()}
            if isinstance(kinds, Mapping)
            else {number: kinds}
        )
    for table, names in calibration.OF_RATES.items():
        found |= {("clusters", "rates", table, name): value for name, value in names.items()}
    return found


def place(trees: dict[str, Any], path: Path_) -> dict[str, Any]:
    """The table that holds a number."""
    for name in path[:-1]:
        trees = trees[name]
    return trees


def apply(point: Point) -> None:
    """Put numbers in the place of those of the tables."""
    trees = copy.deepcopy({"stacks": STACKS, "clusters": CLUSTERS})
    for path, value in point.items():
        place(trees, path)[path[-1]] = value
    software.STACKS.update(read_tables(software.SoftwareStack, trees["stacks"], "stacks: "))
    catalogue.CLUSTERS.update(catalogue.read_catalogue(trees["clusters"], "clusters"))


def runs(only: Collection[Key] | None = None) -> dict[Key, Run]:
    """All runs with a time, or those of some keys, predicted by the numbers that are in place."""
    found = {}
    for number, (path, rows) in enumerate(TABLES):
        for row in rows:
            if only is not None and (number, row.number) not in only:
                continue
            row.inferred.clear()
            try:
                prediction = predict(case_of(row, rows))
            except UserError:
                continue
            if prediction.case.seconds is not None:
                kind = tuple(row.words[name] for name in ("source", "model", "gpu", "precision"))
                found[number, row.number] = Run(prediction, kind, calibration.is_used(row, path))
    return found


def sample(known: dict[Key, Run]) -> set[Key]:
    """Some runs of each kind, evenly spaced."""
    kinds: dict[tuple[str, ...], list[Key]] = {}
    for key, run in known.items():
        kinds.setdefault(run.kind, []).append(key)
    return {
        each[round(i * (len(each) - 1) / (_NEAREST - 1))] for each in kinds.values() for i in range(_NEAREST)
    }


def derivatives(point: Point, known: dict[Key, Run]) -> dict[Key, np.ndarray]:
    """Derivative of each sampled run's error by the logarithm of each number."""
    keys = sample(known)
    columns = []
    for path in point:
        apply({**point, path: point[path] * math.exp(_STEP)})
        columns.append({key: run.error for key, run in runs(keys).items()})
    apply(point)
    return {
        key: np.array([(column[key] - known[key].error) / _STEP for column in columns])
        for key in sorted(keys)
    }


def weights(known: dict[Key, Run], keys: list[Key]) -> np.ndarray:
    """Weight of each run: n of one model and device weigh as n^0.7."""
    counts = Counter(known[key].kind[:3] for key in keys)
    return np.array([counts[known[key].kind[:3]] ** -0.3 for key in keys])


def step(point: Point, known: dict[Key, Run], slopes: dict[Key, np.ndarray], without: str = "") -> np.ndarray:
    """Step of the logarithms of the numbers that the calibrating runs, without a source, ask for.

    A number of which they say nothing goes to what is assumed of it.
    """
    prior = assumed()
    away = np.array([math.log(value / prior[path]) for path, value in point.items()])
    keys = [key for key in slopes if known[key].used and known[key].kind[0] != without]
    error, matrix = np.array([known[key].error for key in keys]), np.array([slopes[key] for key in keys])
    own, found = weights(known, keys), np.zeros(matrix.shape[1])
    for _ in range(40):
        weight = own / np.maximum(np.abs(error + matrix @ found), _EXACT)
        normal = (matrix * weight[:, None]).T @ matrix + np.eye(len(found)) / _PRIOR**2
        found = np.linalg.solve(normal, -(matrix * weight[:, None]).T @ error - away / _PRIOR**2)
        found = np.clip(found, -_FURTHEST, _FURTHEST)
    return found


def moved(point: Point, by: np.ndarray) -> Point:
    """Numbers after a step; shares stay below 1."""
    after = {path: point[path] * math.exp(each) for path, each in zip(point, by, strict=True)}
    shares = {path for path in after if path[-1] in calibration.SHARES or path[-2] in calibration.SHARES}
    return {path: min(value, 1.0) if path in shares else value for path, value in after.items()}


def loss(known: dict[Key, Run]) -> float:
    """Weighted mean of the absolute errors of the calibrating runs."""
    keys = [key for key, run in known.items() if run.used]
    return float(np.average([abs(known[key].error) for key in keys], weights=weights(known, keys)))


def told(name: str, known: dict[Key, Run]) -> None:
    """Print the errors of all runs, of those of each table, and of those that did not calibrate."""
    parts = {"all": list(known), "published": [key for key in known if key[0] == 0]}
    parts["frontier"] = [key for key in known if key[0] == 1]
    parts["others"] = [key for key in known if not known[key].used]
    words = []
    for part, keys in parts.items():
        sizes = [100 * abs(math.expm1(known[key].error)) for key in keys]
        words.append(f"{part} {np.mean(sizes):.2f}% mean, {np.median(sizes):.2f}% median of {len(keys)}")
    print(f"{name}: " + "; ".join(words), flush=True)


def fit(point: Point, rounds: int) -> Point:
    """Move the numbers to where the calibrating runs are predicted best."""
    apply(point)
    known = runs()
    told("at the start", known)
    for _ in range(rounds):
        by = step(point, known, derivatives(point, known))
        best = None
        for part in (1.0, 0.5, 0.25):
            tried = moved(point, part * by)
            apply(tried)
            found = runs()
            if best is None or loss(found) < loss(best[1]):
                best = tried, found
        assert best is not None
        if loss(best[1]) >= loss(known):
            break
        point, known = best
        told("after a round", known)
        for path, value in point.items():
            print(f"{'.'.join(path):44s} {value:10.4g}", flush=True)
    return point


def leave_out(point: Point) -> None:
    """Predict each source without itself, and write the seconds."""
    apply(point)
    known = runs()
    told("with all", known)
    slopes, without = derivatives(point, known), dict[Key, Run]()
    for source in dict.fromkeys(run.kind[0] for run in known.values()):
        apply(moved(point, step(point, known, slopes, source)))
        without.update(runs({key for key, run in known.items() if run.kind[0] == source}))
    told("without its source", without)
    found = []
    for (table, row), run in known.items():
        now, case = run.prediction, run.prediction.case
        assert case.seconds is not None
        seconds = case.seconds, now.seconds, without[table, row].prediction.seconds
        name, inferred = TABLES[table][0].stem, len(case.inferred)
        found.append(left_out.LeftOut(name, row, run.kind[0], now.regime, inferred, *seconds))
    left_out.write(found)


def main() -> None:
    """Fit the numbers, or predict each source without itself."""
    given = argparse.ArgumentParser(description=__doc__)
    given.add_argument("--rounds", type=int, default=3, help="steps of the fit at most")
    given.add_argument("--leave-out", action="store_true", help="predict each source without itself")
    flags = given.parse_args()
    trees = {"stacks": STACKS, "clusters": CLUSTERS}
    start = {path: place(trees, path)[path[-1]] for path in assumed()}
    if flags.leave_out:
        leave_out(start)
        return
    fit(start, flags.rounds)


if __name__ == "__main__":
    main()
