"""One step of a run's pipeline on an idealised machine, simulated action by action.

The step is that of one replica: F, I and W of every microbatch, and the messages between stages. A rank of
it is tp x cp devices, which share a stage's FLOPs; bytes are those of one device. Traffic of the other axes
and the optimiser's step are left out.

A block of M FLOPs in weights and A in attention's two products, forward, takes M + A for F, M + 2 A for I
and M for W, since attention has no weights (Qi et al. 2023, table 1); recomputation is added to I. The head's
loss computes its gradients in the forward, as the program does (`model/chunked_cross_entropy.py`): three
times its forward for F. Norms, the embedding and other operators without a matrix product are free.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from meshwright.planner.activations import activations
from meshwright.planner.rank_view import recomputed, training_of, widths
from meshwright.schedule import ScheduleError, Simulation, StageCost, StageLink, schedule_of, simulate
from meshwright.schedule.bubble_formulas import idle
from meshwright.spec import RunSpec
from meshwright.spec.stages import Stage, stages
from meshwright.spec.training_flops import adapter_flops, head_has_gradient, head_is_trained, trained_share


@dataclass(frozen=True)
class Machine:
    """The machine of a step; the defaults are round figures."""

    flops: float = 400e12
    """FLOP/s that one device attains."""
    latency: float = 5e-6
    """Seconds of a message between stages."""
    bandwidth: float = 50e9
    """Bytes per second of a link between devices of neighbouring stages, one way."""

    def __post_init__(self) -> None:
        if not 0 < self.flops < math.inf:
            raise ScheduleError(f"flops is {self.flops}; it should be above 0 FLOP/s, and finite")


def message_bytes(spec: RunSpec) -> int:
    """Bytes of one microbatch's activations, or of their gradients, from one stage to the next."""
    layout = spec.layout
    shared = layout.tp if layout.sequence_parallel else 1
    tokens = spec.micro_batch * spec.data.seq_len // layout.cp // shared
    return tokens * spec.model.hidden * widths(spec).compute


def _block_flops(spec: RunSpec, layers: Sequence[int]) -> tuple[int, int]:
    """Forward FLOPs of blocks on one token: of their weights, and of attention."""
    model = spec.model
    kinds = [model.kind_of(layer) for layer in layers]
    weights = sum(map(model.block_weight_flops, kinds))
    added = sum(adapter_flops(spec, layer) for layer in layers)
    attention = sum(model.block_flops(spec.data.seq_len, kind) for kind in kinds) - weights
    return weights + added + sum(map(model.join_flops, layers)), attention


def _counted(spec: RunSpec, stage: Stage, flops: float) -> StageCost:
    """Seconds of one microbatch in a stage, whose tensor and context ranks share its FLOPs evenly."""
    model, layout = spec.model, spec.layout
    back = [layer for layer in stage.layers if training_of(spec, layer).feed_forward]
    matmul, attention = _block_flops(spec, stage.layers)
    matmul_back, attention_back = _block_flops(spec, back)
    again = recomputed(spec, "matmul") * matmul_back + recomputed(spec, "attention") * attention_back
    heads = model.head_flops * (1 + len(stage.beyond)) if stage.head else 0
    head = heads * (1 + head_has_gradient(spec) + head_is_trained(spec))
    weights = sum(trained_share(spec, layer) * _block_flops(spec, [layer])[0] for layer in back)
    rate = flops * layout.tp * layout.cp / (spec.micro_batch * spec.data.seq_len)  # tokens' FLOPs a second
    return StageCost(
        forward=(matmul + attention + head) / rate,
        input=(matmul_back + 2 * attention_back + again) / rate,
        weight=weights / rate,
    )


@dataclass(frozen=True)
class PipelineStep:
    """A simulated step with its stages and their costs."""

    simulation: Simulation
    stages: tuple[Stage, ...]
    costs: tuple[StageCost, ...]

    @property
    def closed_form_bubble(self) -> float | None:
        """The bubble by the schedule's formula for the mean rank, with links that cost nothing, or None."""
        made = self.simulation.schedule
        forward, input, weight = (
            sum(getattr(cost, name) for cost in self.costs) / made.ranks
            for name in ("forward", "input", "weight")
        )
        lost = idle(made.name, made.ranks, made.virtual, made.microbatches, forward, input, weight)
        return None if lost is None else lost / (lost + made.microbatches * (forward + input + weight))

    @property
    def bubble_by_cause(self) -> dict[str, float]:
        """The bubble in three parts, which add up to it.

        They are that of the `schedule`, with equal stages and links that cost nothing, and what `stages` that
        differ, and then `links`, add to it, or take away.
        """
        schedule, stages = self.simulation.schedule, len(self.costs)
        mean = StageCost(
            *(
                sum(getattr(cost, name) for cost in self.costs) / stages
                for name in ("forward", "input", "weight")
            )
        )
        equal = simulate(schedule, [mean] * stages).bubble
        free = simulate(schedule, [replace(cost, output=0.0) for cost in self.costs]).bubble
        return {"schedule": equal, "stages": free - equal, "links": self.simulation.bubble - free}

    def to_json(self) -> dict[str, Any]:
        """The figures, without the times of single actions; lists are by rank."""
        timed, made = self.simulation, self.simulation.schedule
        blocks = [
            sum(len(self.stages[index].blocks) for index in made.stages_of(rank))
            for rank in range(made.ranks)
        ]
        return {
            "schedule": made.name,
            "ranks": made.ranks,
            "virtual": made.virtual,
            "microbatches": made.microbatches,
            "step_seconds": timed.makespan,
            "bubble": timed.bubble,
            "bubbles": list(timed.bubbles),
            "bubble_by_cause": self.bubble_by_cause,
            "bubble_without_sync": timed.bubble_without_sync,
            "closed_form_bubble": self.closed_form_bubble,
            "peak_activations": [held / made.virtual for held in timed.peak],
            "peak_activation_bytes": [round(held) for held in timed.peak_bytes],
            "blocks": blocks,
            "message_bytes": round(self.costs[0].output),
        }


def step(spec: RunSpec, machine: Machine, durations: StageCost | None = None) -> PipelineStep:
    """Simulate a step of the run's pipeline; with `durations`, only the links of `machine` count.

    `durations` are the seconds of one microbatch in every stage. A run without a pipeline is one rank with
    one stage, whatever its schedule. Raises `ScheduleError` for an impossible machine.
    """
    schedule, kept = schedule_of(spec.layout, spec.microbatches), activations(spec)
    cut, output = stages(spec.model, spec.layout, spec.data.seq_len), float(message_bytes(spec))
    costs = []
    for stage in cut:
        cost = durations or _counted(spec, stage, machine.flops)
        costs.append(replace(cost, activations=float(kept.of(stage)), output=output))
    timed = simulate(schedule, costs, StageLink(machine.latency, machine.bandwidth))
    return PipelineStep(timed, cut, tuple(costs))
