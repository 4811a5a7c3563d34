"""Why a layout: where its time and its memory go, what crosses which link, and why not its neighbours."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from meshwright.planner.cost.model import CostModel
from meshwright.planner.cost.step import StepTime
from meshwright.planner.cost.uncertainty import room
from meshwright.planner.explain.candidate import Candidate
from meshwright.planner.explain.link_load import AxisLoad, communication
from meshwright.planner.explain.neighbours import Neighbour
from meshwright.planner.explain.reasons import reasons
from meshwright.planner.explain.sensitivity import Assumption
from meshwright.planner.memory.generic import Memory
from meshwright.spec import RunSpec


@dataclass(frozen=True)
class Explanation:
    """A layout on a cluster, explained in seconds and bytes."""

    layout: Candidate
    capacity: float
    """Bytes that a rank may fill."""
    axes: tuple[AxisLoad, ...]
    """Messages of the busiest pipeline rank."""
    neighbours: tuple[Neighbour, ...]
    assumptions: tuple[Assumption, ...]
    candidates: tuple[str, ...]
    """Words for the layouts that `assumptions` compares: the neighbours, then the other plans given."""

    @property
    def spec(self) -> RunSpec:
        """The run."""
        return self.layout.spec

    @property
    def on(self) -> CostModel:
        """The costs of the cluster."""
        return self.layout.costs

    @property
    def time(self) -> StepTime:
        """The step."""
        return self.layout.step

    @property
    def interval(self) -> tuple[float, float]:
        """Seconds between which a step is in 9 of 10 cases."""
        return self.layout.interval

    @property
    def memories(self) -> tuple[Memory, ...]:
        """Bytes of each pipeline rank."""
        return self.layout.memories

    @property
    def fullest(self) -> Memory:
        """Bytes of the fullest rank."""
        return self.layout.memory

    @property
    def fits(self) -> bool:
        """True if the fullest rank fits."""
        return self.layout.fits(self.capacity)

    @property
    def fits_probability(self) -> float:
        """Probability that the fullest rank fits its device."""
        return self.layout.fits_probability

    @property
    def mfu(self) -> float:
        """Model FLOPs of a second over the devices' peak for the format that computes."""
        return self.layout.mfu

    @property
    def mean_parts(self) -> dict[str, float]:
        """Seconds of the step by cause, as the mean of the pipeline's ranks."""
        every = [self.time.parts_of(rank) for rank in range(len(self.time.ranks))]
        return {name: sum(parts[name] for parts in every) / len(every) for name in every[0]}

    def to_json(self) -> dict[str, Any]:
        """Plain values, for `meshwright explain --json`."""
        cluster = self.on.cluster
        return {
            "cluster": cluster.name,
            "device": cluster.device.name,
            "devices": cluster.count,
            "stack": self.on.stack.name,
            "layout": self.spec.layout.model_dump(mode="json"),
            "recompute": self.spec.recompute.model_dump(mode="json"),
            "micro_batch": self.spec.micro_batch,
            "microbatches": self.spec.microbatches,
            "step_seconds": self.time.seconds,
            "interval": list(self.interval),
            "tokens_per_second": self.layout.tokens_per_second,
            "mfu": self.mfu,
            "busiest_rank": self.time.rank,
            "time": [self.time.parts_of(rank) for rank in range(len(self.time.ranks))],
            "mean_time": self.mean_parts,
            "memory": [each.to_json() for each in self.memories],
            "capacity": self.capacity,
            "fits": self.fits,
            "fits_probability": self.fits_probability,
            "communication": [each.to_json() for each in self.axes],
            "neighbours": [each.to_json() for each in self.neighbours],
            "assumptions": [each.to_json(self.candidates) for each in self.assumptions],
        }


def explain(
    spec: RunSpec, costs: CostModel, others: Sequence[RunSpec] = (), capacity: float | None = None
) -> Explanation:
    """Explain a run's layout on a cluster with as many devices as it has ranks.

    `others` are layouts of the same run that it is compared with besides its neighbours; those with another
    number of ranks or another batch are left out. `capacity` is how many bytes of a rank may be filled, by
    default all of a device's. Raises `UserError` where ranks and devices differ in number.
    """
    layout = Candidate(spec, costs)
    space = room(costs.cluster) if capacity is None else capacity
    compared = {describe(each): each for each in others if _comparable(each, spec)}
    why = reasons(spec, costs, space, compared)
    return Explanation(
        layout=layout,
        capacity=space,
        axes=communication(spec, costs, layout.step),
        neighbours=why.neighbours,
        assumptions=why.assumptions,
        candidates=why.candidates,
    )


def describe(spec: RunSpec) -> str:
    """A plan in one line: its layout, microbatch and recompute policy."""
    return f"{spec.layout.describe()}, micro_batch={spec.micro_batch}, recompute={spec.recompute.policy}"


def _comparable(one: RunSpec, other: RunSpec) -> bool:
    """True for different layouts of one batch on the same number of ranks."""
    same = [(each.layout.world_size, each.train.batch_tokens, each.data.seq_len) for each in (one, other)]
    return same[0] == same[1] and (one.layout, one.recompute) != (other.layout, other.recompute)
