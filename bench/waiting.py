"""Stages that wait instead of computing, so that they take as long on a busy machine as on an idle one.

What a stage sends on is the time at which it was done, so a link can be made slow where it ends: the stage
that takes the message does not begin before that time plus the link's latency. The rank has nothing else to
do until then, as if the message were still on its way.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.comm.mesh import Mesh
from meshwright.parallel.deferred_wgrad import WeightGradStore
from meshwright.parallel.pipeline_parallel import Pipeline
from meshwright.schedule import Action, Kind, Schedule, StageCost, StageLink, make

Links = Callable[[int, int], StageLink]
"""A function of (from rank, to rank), as `simulate` takes it; only the latencies count here."""


def no_delay(_source: int, _target: int) -> StageLink:
    """Links that take no time."""
    return StageLink()


class _Waits(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, sent: Tensor, stage: WaitingStage, microbatch: int) -> Tensor:
        ctx.stage, ctx.microbatch = stage, microbatch
        return stage.act(Kind.F, microbatch, sent)

    @staticmethod
    def backward(ctx: Any, sent: Tensor) -> tuple[Tensor, None, None]:
        stage, microbatch = ctx.stage, ctx.microbatch
        if not stage.later.open:
            return stage.act(Kind.B, microbatch, sent), None, None
        done = stage.act(Kind.I, microbatch, sent)

        def compute() -> list[Tensor]:
            stage.act(Kind.W, microbatch)
            return [torch.ones(1)]

        stage.later.put([stage.parameter], compute)
        return done, None, None


class WaitingStage:
    """Stage `index` of a schedule; `log` gets each action that it has done."""

    def __init__(
        self,
        schedule: Schedule,
        index: int,
        cost: StageCost,
        links: Links,
        later: WeightGradStore,
        log: list[Action],
    ) -> None:
        self.index, self.later, self.log = index, later, log
        self.seconds = {
            Kind.F: cost.forward,
            Kind.I: cost.input,
            Kind.W: cost.weight,
            Kind.B: cost.input + cost.weight,
        }
        self.parameter = nn.Parameter(torch.zeros(1))
        self.first = self.empty(0).requires_grad_()
        before, after = (_latency(schedule, near, index, links) for near in (index - 1, index + 1))
        self.latency = {Kind.F: before, Kind.I: after, Kind.W: 0.0, Kind.B: after}

    def act(self, kind: Kind, microbatch: int, sent: Tensor | None = None) -> Tensor:
        """Wait for the link and for the action; the time at which both are over."""
        latency = self.latency[kind]
        if sent is not None and latency:
            time.sleep(max(0.0, float(sent) + latency - time.monotonic()))
        time.sleep(self.seconds[kind])
        self.log.append(Action(kind, self.index, microbatch))
        return torch.full((1,), time.monotonic(), dtype=torch.float64)

    def __call__(self, microbatch: int, x: Tensor | None, /) -> Tensor:
        found: Tensor = _Waits.apply(self.first if x is None else x, self, microbatch)
        return found

    def empty(self, _microbatch: int) -> Tensor:
        return torch.zeros(1, dtype=torch.float64)


def _latency(schedule: Schedule, source: int, target: int, links: Links) -> float:
    """Seconds from stage to stage; 0 where there is no such stage, and on one rank."""
    if not 0 <= source < schedule.stages or schedule.rank_of[source] == schedule.rank_of[target]:
        return 0.0
    return links(schedule.rank_of[source], schedule.rank_of[target]).latency


@dataclass(frozen=True)
class Waited:
    """A run of waiting stages, as one rank saw it."""

    seconds: float
    """Seconds of all ranks, from barrier to barrier."""
    peak: int
    """Most activations of this rank."""
    log: tuple[Action, ...]
    taken: int
    """Put-off gradients that came."""


def run_waiting(mesh: Mesh, name: str, microbatches: int, cost: StageCost, links: Links = no_delay) -> Waited:
    """Run the schedule `name` once, each of the mesh's stages costing `cost`."""

    def scheduled(count: int) -> Schedule:
        return make(name, mesh.pipeline.size, mesh.layout.chunks, count)

    schedule = scheduled(microbatches)
    later, log, taken = WeightGradStore(), list[Action](), list[Tensor]()
    stages = {
        index: WaitingStage(schedule, index, cost, links, later, log)
        for index in schedule.stages_of(mesh.pipeline.rank)
    }
    pipeline = Pipeline(
        stages, mesh, scheduled, later, lambda _last: None, lambda _parameter, grad: taken.append(grad)
    )
    mesh.control.barrier()
    begun = time.perf_counter()
    pipeline.run(range(microbatches), lambda x: x.sum())
    mesh.control.barrier()
    return Waited(time.perf_counter() - begun, pipeline.peak, tuple(log), len(taken))
