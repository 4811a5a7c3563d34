"""Calibrate the planner's constants on a tenth of the published runs: `python bench/calibrate.py`.

One set of constants a GPU type and one a software stack (`hardware/data/clusters.toml`,
`planner/cost/stacks.toml`), moved one at a time to where the mean absolute logarithm of predicted over
measured step time, over the rows that `planner/validation/calibration.py` names, is least; each is held near
where it starts by a small penalty, so that rows that say nothing about it leave it where it was. Prints what
it found; nothing is written.
"""

from __future__ import annotations

import argparse
import math
import time
from dataclasses import replace

from meshwright.planner.validation import calibration
from meshwright.planner.validation.cases import Case, case_of
from meshwright.planner.validation.metrics import predict
from meshwright.planner.validation.table import PUBLISHED, PredictionError, read

_PRIOR = 0.02
"""Loss of moving a constant by a factor of e; a factor of 1.2 costs 0.0007, which a row must be worth."""

Point = dict[tuple[str, str], float]
"""(stack's name or device's, field) -> value."""


def main() -> None:
    given = argparse.ArgumentParser(description=__doc__)
    given.add_argument("--seconds", type=float, default=300.0, help="time to search")
    seconds = given.parse_args().seconds
    table = read(PUBLISHED)
    cases = [case_of(row, table) for row in table if calibration.is_used(row.number)]
    cases = [case for case in cases if case.seconds is not None]
    point = start(cases)
    first, best, began, step = dict(point), loss(cases, point, point), time.time(), 0.16
    print(f"{len(cases)} rows, {len(point)} constants, {best:.4f} at the start")
    while step > 0.01 and time.time() < began + seconds:
        moved = False
        for key in point:
            for factor in (1 + step, 1 / (1 + step)):
                tried = {**point, key: point[key] * factor}
                if not inside(key[1], tried[key]):
                    continue
                found = loss(cases, tried, first)
                if found < best - 1e-6:
                    best, point, moved = found, tried, True
                    break
        print(f"{best:.4f} after steps of {step:.3f}", flush=True)
        step = step if moved else step / 2
    for (owner, name), value in point.items():
        print(f"{owner:24s} {name:24s} {first[owner, name]:10.4g} -> {value:10.4g}")


def inside(name: str, value: float) -> bool:
    """True if a constant may have the value: shares are at most 1."""
    return value <= 1.0 or name in calibration.UNBOUNDED


def start(cases: list[Case]) -> Point:
    """The constants as they stand, of the stacks and devices that the rows have."""
    found: Point = {}
    for case in cases:
        for name in calibration.OF_STACKS:
            if value := getattr(case.stack, name):
                found[case.stack.name, name] = value
        for name in calibration.OF_DEVICES:
            found[case.cluster.device.name, name] = getattr(case.cluster.device.rates, name)
    return found


def changed(case: Case, point: Point) -> Case:
    """The case under other constants."""
    device = case.cluster.device
    rates = {name: value for (owner, name), value in point.items() if owner == device.name}
    of_stack = {name: value for (owner, name), value in point.items() if owner == case.stack.name}
    device = replace(device, rates=replace(device.rates, **rates))
    cluster = replace(case.cluster, device=device)
    return replace(case, cluster=cluster, stack=replace(case.stack, **of_stack))


def loss(cases: list[Case], point: Point, first: Point) -> float:
    """Mean absolute logarithm of predicted over measured, and a penalty for leaving the start."""
    total = 0.0
    for case in cases:
        assert case.seconds is not None
        try:
            total += abs(math.log(predict(changed(case, point)).seconds / case.seconds))
        except PredictionError:
            continue
    away = sum(math.log(point[key] / first[key]) ** 2 for key in point)
    return total / len(cases) + _PRIOR * away


if __name__ == "__main__":
    main()
