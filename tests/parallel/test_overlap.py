"""Gathers and reductions run during computation: a trace of starts, waits and products of a faked step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any
from unittest.mock import patch

import pytest
import torch

from meshwright.comm import mesh as meshes
from meshwright.comm.mesh import Axis
from meshwright.comm.traffic_counter import Pending, TrafficCounter
from meshwright.dryrun.memory_tracker import FakeMemory
from meshwright.dryrun.rank_step import rehearse
from meshwright.parallel.gradient_reduction import GradientReduction, _finish_first
from meshwright.spec import RunSpec
from small import spec_of

COMPUTE = ("mm", "addmm", "bmm", "embedding", "linalg_vector_norm", "_grouped_mm")
STATES = ("shard", "expert_data", "replicate")


@dataclass
class Collective:
    """One collective of a trace; `between` counts what was computed from its start to its wait."""

    axis: str
    operation: str
    started: int
    between: int | None = None


@dataclass
class Trace(TrafficCounter):
    """A wire that notes when collectives are started and waited for."""

    computed: int = 0
    listed: list[Collective] = field(default_factory=list)

    def start(self, axis: Axis, operation: str, *facts: Any) -> Pending:
        noted = Collective(axis.name, operation, self.computed)
        self.listed.append(noted)
        return _Noted(super().start(axis, operation, *facts), noted, self)

    def of(self, *operations: str) -> list[Collective]:
        """Collectives that move parameters and gradients."""
        return [each for each in self.listed if each.axis in STATES and each.operation in operations]


@dataclass
class _Noted:
    work: Pending
    noted: Collective
    trace: Trace

    def wait(self) -> object:
        if self.noted.between is None:
            self.noted.between = self.trace.computed - self.noted.started
        return self.work.wait()

    def is_completed(self) -> bool:
        return self.work.is_completed()


@contextmanager
def traced() -> Iterator[Trace]:
    trace = Trace()
    honest = FakeMemory._count_operator

    def count(memory: FakeMemory, func: Any, args: Any, kwargs: Any) -> None:
        honest(memory, func, args, kwargs)
        name = func.name().removeprefix("aten::").partition(".")[0]
        trace.computed += func.namespace == "meshwright" or name.startswith(COMPUTE)

    with (
        patch.object(meshes, "TrafficCounter", lambda _heartbeat: trace),
        patch.object(FakeMemory, "_count_operator", count),
    ):
        yield trace


def trace_of(spec: RunSpec) -> Trace:
    """The trace of one step, of rank 0; the set-up's messages are not among it."""
    with traced() as trace:
        rehearse(spec, 0, torch.device("cpu"))
    return trace


BASE: dict[str, object] = {
    "model.layers": 4, "model.hidden": 64, "model.ffn": 64, "model.tied": "false", "data.corpus": "synthetic",
    "data.seq_len": 32, "layout.micro_batch": 1, "train.batch_tokens": 32 * 8 * 3, "layout.dp": 8,
}  # fmt: skip
MOE = {"model.moe.experts": 8, "model.moe.top_k": 2, "model.moe.ffn": 32, "layout.ep": 2}
HYBRID = {"layout.dp": 4, "layout.replicate": 2}
LAYOUTS: dict[str, dict[str, object]] = {
    "zero 1": {"layout.zero": 1},
    "zero 2": {"layout.zero": 2},
    "zero 3": {"layout.zero": 3},
    "zero 3, tied": {"layout.zero": 3, "model.tied": "true"},
    "zero 3, full recomputation": {"layout.zero": 3, "recompute.policy": "full"},
    "replicas alone": {"layout.zero": 0},
    "hybrid": {"layout.zero": 3, **HYBRID},
    "hybrid, zero 1": {"layout.zero": 1, **HYBRID},
    "experts": {"layout.zero": 3, **MOE},
    "experts, dense layers": {"layout.zero": 2, "model.moe.every": 2, **MOE},
    "hybrid experts": {"layout.zero": 3, **HYBRID, **MOE},
    "hybrid experts, tensor": {"layout.zero": 2, **HYBRID, **MOE, "layout.dp": 2, "layout.tp": 2},
    "pipeline": {"layout.zero": 2, "layout.pp": 2, "layout.dp": 4},
    "zero bubble": {"layout.zero": 1, "layout.pp": 2, "layout.dp": 4, "layout.schedule": "zb-h1"},
}


FULL = (
    *("zero 2", "zero 3, tied", "replicas alone", "hybrid, zero 1", "experts", "hybrid experts"),
    "experts, dense layers",
)
"""Those whose choices others make too."""


def names(chosen: Iterable[str]) -> list[Any]:
    """Names of layouts as parameters, with the marker `full` for those of `FULL`."""
    return [pytest.param(name, marks=pytest.mark.full if name in FULL else ()) for name in chosen]


@cache
def trace_of_layout(name: str) -> Trace:
    return trace_of(spec_of(BASE | LAYOUTS[name]))


@pytest.mark.parametrize("name", names(LAYOUTS))
def test_between_start_and_wait_of_every_reduction_lies_compute(name: str) -> None:
    reductions = trace_of_layout(name).of("reduce_scatter", "all_reduce")
    assert len(reductions) >= 3
    exposed = [each for each in reductions if not each.between]
    assert not exposed


@pytest.mark.parametrize("name", names(name for name in LAYOUTS if name != "replicas alone"))
def test_only_the_first_gather_of_a_step_is_waited_for_at_once(name: str) -> None:
    spec = spec_of(BASE | LAYOUTS[name])
    gathers = trace_of_layout(name).of("all_gather")
    assert len(gathers) >= (1 if spec.layout.pp > 1 else spec.model.layers)
    exposed = [place for place, each in enumerate(gathers) if not each.between]
    assert exposed in ([], [0])


def test_the_trace_shows_reductions_that_are_waited_for_at_once() -> None:
    """The instrument is red where reductions have a queue of length 0."""
    honest = GradientReduction.start

    def waits(reduction: GradientReduction, unit: Any, last: bool) -> None:
        honest(reduction, unit, last)
        for queue in (reduction._reducing, reduction._replicating):
            while queue:
                _finish_first(queue)

    with patch.object(GradientReduction, "start", waits):
        reductions = trace_of(spec_of(BASE | LAYOUTS["hybrid"])).of("reduce_scatter", "all_reduce")
    assert all(not each.between for each in reductions)
