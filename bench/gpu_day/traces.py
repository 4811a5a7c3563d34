"""The steps of the day as a dry run has them: counts, bytes, FLOPs and seconds of each operator.

    python -m gpu_day.traces [--out bench/gpu_day/traces.json]

A GPU is faked for torch's build for CPUs only, so the traces are recorded there and kept in `traces.json`,
where a machine with GPUs finds them. How many blocks of a model fit is known only there, so that a trace is
in two parts, what a block adds and what comes with none: steps of one and of two blocks tell them apart.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from gpu_day.results import Row, Task, Work

FILE = Path(__file__).with_name("traces.json")
CLUSTERS = ("h100-sxm", "h200", "b200")
"""Clusters whose rates give the seconds."""
FIELDS = ("count", "bytes", "flops", *(f"seconds on {name}" for name in CLUSTERS))
CAPABILITY = (9, 0)
"""That of the device that is faked."""
FEWER, MORE = 1, 2
"""Blocks of the two steps."""
WARM_UP = 1
"""Steps before that which is recorded: in fp8 the scales of the first are not known."""
COMPUTES = ("bf16", "fp8", "fp8-rowwise")
CASES = [(model, compute, gpus) for gpus in (1, 8) for compute in COMPUTES for model in ("1b", "8b")]

Counts = dict[str, list[float]]
"""Operator -> its `FIELDS` in a step."""


def key_of(model: str, compute: str, gpus: int) -> str:
    """The name of a case."""
    return f"{model} {compute}, {gpus} GPU{'s' if gpus > 1 else ''}"


# What is kept -------------------------------------------------------------------------------------------


@cache
def kept() -> dict[str, Any]:
    """The content of the file."""
    found: dict[str, Any] = json.loads(FILE.read_text(encoding="utf-8"))
    return found


def operators(model: str, compute: str, gpus: int) -> frozenset[str]:
    """The operators of a case; of a number of GPUs without one those of one GPU."""
    cases = kept()["cases"]
    return frozenset(cases.get(key_of(model, compute, gpus)) or cases[key_of(model, compute, 1)])


def expected(model: str, compute: str, gpus: int, layers: int, cluster: str) -> dict[str, Row] | None:
    """Operator -> count, bytes, FLOPs and seconds in a step; None for a case that is not kept."""
    case = kept()["cases"].get(key_of(model, compute, gpus))
    if case is None:
        return None
    found = {}
    for name, parts in case.items():
        row = dict(zip(FIELDS, (a + layers * b for a, b in zip(*parts, strict=True)), strict=True))
        found[name] = {key: row[key] for key in ("count", "bytes", "flops")}
        found[name]["seconds"] = row[f"seconds on {cluster}"]
    return found


def nearest(cluster: str | None, capability: tuple[int, int]) -> str:
    """The cluster of the traces for a GPU: its own, or one of the same generation, or the first."""
    if cluster in CLUSTERS:
        return str(cluster)
    return "b200" if capability[0] >= 10 else CLUSTERS[0]


# Recording, in a process with a faked GPU ---------------------------------------------------------------


def record(cases: list[tuple[str, str, int]], show: bool = False) -> dict[str, Any]:
    """The content of the file for some cases, recorded anew."""
    import torch

    found: dict[str, Any] = {}
    for case in cases:
        found[key_of(*case)] = _case(*case)
        if show:
            print(key_of(*case), file=sys.stderr, flush=True)
    return {"torch": torch.__version__, "fields": list(FIELDS), "cases": found}


def _case(model: str, compute: str, gpus: int) -> dict[str, list[list[float]]]:
    """Operator -> its `FIELDS` in a step without blocks, and in a block."""
    few, many = (_step(model, compute, gpus, layers) for layers in (FEWER, MORE))
    found = {}
    zeros = [0.0] * len(FIELDS)
    for name in sorted({*few, *many}):
        a, b = few.get(name, zeros), many.get(name, zeros)
        block = [(y - x) / (MORE - FEWER) for x, y in zip(a, b, strict=True)]
        none = [x - FEWER * y for x, y in zip(a, block, strict=True)]
        found[name] = [[float(f"{x:.10g}") for x in part] for part in (none, block)]
    return found


def _step(model: str, compute: str, gpus: int, layers: int) -> Counts:
    """The operators of a step after those that warm up."""
    import torch

    from gpu_day import steps
    from gpu_day.profiles import LAUNCHED, operator_of
    from meshwright.dryrun.kernel_seconds import EventSeconds
    from meshwright.fake_cuda.runtime import set_capability
    from meshwright.hardware.find import cluster

    set_capability(CAPABILITY)
    work = Work(Task("traces", "steps", {}, "fake", gpus, 3600.0, ""), writes=False)
    spec = steps.spec_of(model, compute, gpus, layers)
    with steps.stepper(work, spec, torch.device("cuda", 0)) as (take, faked):
        for _ in range(WARM_UP):
            take()
        assert faked is not None
        faked.trace.events.clear()
        take()
        events = [each for each in faked.trace.events if each.kind in LAUNCHED]
    seconds = [EventSeconds(cluster(name, gpus)) for name in CLUSTERS]
    found = defaultdict[str, list[float]](lambda: [0.0] * len(FIELDS))
    for each in events:
        own = (1, each.bytes, each.flops, *(rates.device(each) for rates in seconds))
        row = found[operator_of(each)]
        row[:] = [x + y for x, y in zip(row, own, strict=True)]
    return dict(found)


def main() -> None:
    """Record all cases anew, and write the file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=FILE, help="the file to write; default %(default)s")
    options = parser.parse_args()
    from gpu_day import traces  # by this name the process finds its functions
    from meshwright.fake_cuda.process import FakeCudaProcess

    with FakeCudaProcess() as process:
        found = process.call(traces.record, CASES, show=True)
    options.out.write_text(to_text(found), encoding="utf-8")


def to_text(found: Mapping[str, Any]) -> str:
    """The file: a line for each operator of each case."""
    return json.dumps(found, separators=(",", ":")).replace(']],"', ']],\n"').replace(':{"', ':{\n"') + "\n"


if __name__ == "__main__":
    main()
