"""Why a layout: where its time and its memory go, what crosses which link, and why not its neighbours."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from meshwright.planner.cost.kernels import peak
from meshwright.planner.cost.model import CostModel
from meshwright.planner.cost.step import StepTime, step_time
from meshwright.planner.cost.uncertainty import fits_probability, interval, room, spread
from meshwright.planner.explain.link_load import AxisLoad, communication
from meshwright.planner.explain.neighbours import TERMS, Neighbour
from meshwright.planner.explain.reasons import reasons
from meshwright.planner.explain.sensitivity import Assumption
from meshwright.planner.memory.exact import needs
from meshwright.planner.memory.generic import Memory
from meshwright.spec import RunSpec, UserError


@dataclass(frozen=True)
class Explanation:
    """What is known of a layout on a cluster, in seconds and bytes."""

    spec: RunSpec
    on: CostModel
    time: StepTime
    interval: tuple[float, float]
    """In which a step is in 9 of 10 cases."""
    memories: tuple[Memory, ...]
    """Of each pipeline rank."""
    capacity: float
    """Bytes that a rank may fill."""
    fits_probability: float
    axes: tuple[AxisLoad, ...]
    """Of the busiest pipeline rank."""
    neighbours: tuple[Neighbour, ...]
    assumptions: tuple[Assumption, ...]
    candidates: tuple[str, ...]
    """Words for what `assumptions` compares with: the neighbours, then the other plans that were given."""

    @property
    def fullest(self) -> Memory:
        return max(self.memories, key=lambda each: each.allocated)

    @property
    def fits(self) -> bool:
        return self.fullest.device <= self.capacity

    @property
    def mfu(self) -> float:
        """Model FLOPs of a second over the devices' peak, for the format that computes."""
        spec, cluster = self.spec, self.on.cluster
        flops = spec.model.flops_per_token(spec.data.seq_len) * spec.train.batch_tokens
        devices = cluster.count / (cluster.sharing if cluster.device.kind == "cpu" else 1)
        rate = peak(cluster.device, self.on.format or spec.precision.compute) * devices
        return flops / self.time.seconds / rate

    @property
    def mean_parts(self) -> dict[str, float]:
        """Seconds of the step by what they go to, as the mean of the pipeline's ranks."""
        every = [self.time.parts_of(rank) for rank in range(len(self.time.ranks))]
        return {name: sum(parts[name] for parts in every) / len(every) for name in every[0]}

    def to_json(self) -> dict[str, Any]:
        """Plain values, for `meshwright explain --json`."""
        ranks = range(len(self.time.ranks))
        return {
            "cluster": self.on.cluster.name,
            "device": self.on.cluster.device.name,
            "devices": self.on.cluster.count,
            "stack": self.on.stack.name,
            "layout": self.spec.layout.model_dump(mode="json"),
            "recompute": self.spec.recompute.model_dump(mode="json"),
            "micro_batch": self.spec.micro_batch,
            "microbatches": self.spec.microbatches,
            "step_seconds": self.time.seconds,
            "interval": list(self.interval),
            "tokens_per_second": self.spec.train.batch_tokens / self.time.seconds,
            "mfu": self.mfu,
            "busiest_rank": self.time.rank,
            "time": [self.time.parts_of(rank) for rank in ranks],
            "mean_time": self.mean_parts,
            "memory": [memory_json(each) for each in self.memories],
            "capacity": self.capacity,
            "fits": self.fits,
            "fits_probability": self.fits_probability,
            "communication": [each.to_json() for each in self.axes],
            "neighbours": [each.to_json() for each in self.neighbours],
            "assumptions": [each.to_json(self.candidates) for each in self.assumptions],
        }


def memory_json(found: Memory) -> dict[str, float]:
    """The terms of a rank's memory, and their sums."""
    sums = {name: getattr(found, name) for name in ("allocated", "reserved", "device")}
    return {**{name: getattr(found, name) for name in TERMS}, **sums}


def explain(
    spec: RunSpec, on: CostModel, others: Sequence[RunSpec] = (), capacity: float | None = None
) -> Explanation:
    """Explain a run's layout on a cluster with as many devices as it has ranks.

    `others` are layouts of the same run that it is compared with beside its neighbours; those of another
    number of ranks or another batch are left out. `capacity` is how many bytes of a rank may be filled, by
    default all of a device's. Raises `UserError` where ranks and devices differ in number.
    """
    check_ranks(spec, on)
    space = room(on.cluster) if capacity is None else capacity
    timed = step_time(spec, on)
    why = reasons(spec, on, space, {describe(each): each for each in others if _comparable(each, spec)})
    held = tuple(needs(spec, on))
    largest = max(each.device for each in held)
    wider = spread(on.cluster, on.stack)
    return Explanation(
        spec=spec,
        on=on,
        time=timed,
        interval=interval(timed.seconds, wider),
        memories=held,
        capacity=space,
        fits_probability=fits_probability(largest, room(on.cluster), wider),
        axes=communication(spec, on, timed),
        neighbours=why.neighbours,
        assumptions=why.assumptions,
        candidates=why.candidates,
    )


def check_ranks(spec: RunSpec, on: CostModel) -> None:
    """Raise `UserError` unless a layout has as many ranks as its cluster has devices."""
    ranks, devices = spec.layout.world_size, on.cluster.count
    if ranks != devices:
        raise UserError(
            f"layout: {spec.layout.describe()} is {ranks:,} ranks, but {on.cluster.name} has {devices:,} "
            f"devices; give a cluster of {ranks:,}"
        )


def describe(spec: RunSpec) -> str:
    """A plan in one line: its layout, microbatch and recompute policy."""
    return f"{spec.layout.describe()}, micro_batch={spec.micro_batch}, recompute={spec.recompute.policy}"


def _comparable(one: RunSpec, other: RunSpec) -> bool:
    same = (each.layout.world_size for each in (one, other))
    ranks, wanted = same
    batch = (one.train.batch_tokens, one.data.seq_len) == (other.train.batch_tokens, other.data.seq_len)
    alike = (one.layout, one.recompute) == (other.layout, other.recompute)
    return ranks == wanted and batch and not alike
