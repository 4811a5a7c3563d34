"""A layout on a cluster, costed lazily: plans, neighbours, sensitivity and explanations all share it."""

from __future__ import annotations

from functools import cached_property
from typing import Any

from meshwright.hardware.attention_backend import AttentionBackends, planned_backends
from meshwright.planner.cost.exchange import ExchangeFigures, exchange_json, refuse_other_stacks
from meshwright.planner.cost.expert_balance import VIOLATIONS, busiest
from meshwright.planner.cost.kernels import peak
from meshwright.planner.cost.model import CostModel
from meshwright.planner.cost.offload import check_activation_offload, check_offload
from meshwright.planner.cost.precision import check_computes, precision
from meshwright.planner.cost.stages import PlacedStages, placed_stages
from meshwright.planner.cost.step import ScheduleTimes, StepTime
from meshwright.planner.cost.uncertainty import fits_probability, interval, regime, room, spread
from meshwright.planner.memory.exact import memory_model, shortened
from meshwright.planner.memory.generic import Memory
from meshwright.planner.memory.in_flight import expert_activations, host_activations
from meshwright.planner.memory.states import moment_bytes, units
from meshwright.planner.programs.table import PROGRAMS
from meshwright.planner.rank_view import place_of
from meshwright.planner.traffic.messages import traffic
from meshwright.spec import RunSpec, UserError
from meshwright.spec.training_flops import flops_per_token

TIE = 1e-3
"""Layouts whose steps differ by a smaller share are equally fast."""


TIMED = {
    "A100 SXM 80 GB": (
        "deepspeed-zero3",
        "megatron-2021",
        "megatron-deepspeed",
        "megatron-lm",
        "megatron-zero-bubble",
    ),
    "B200 180 GB": ("nemo",),
    "B300 288 GB": ("nemo", "nemo-graphs"),
    "GB200 186 GB": ("megatron-fsdp", "nemo", "nemo-graphs"),
    "GB300 279 GB": ("megatron-fsdp", "nemo", "nemo-graphs"),
    "H100 SXM 80 GB": ("llm-foundry", "megatron-core", "megatron-fsdp", "nanotron", "nemo"),
    "H100 SXM 96 GB HBM2e": ("fsdp", "fsdp-compiled", "fsdp-compiled-loss"),
}
"""Device -> the software stacks whose published runs on it are timed (`meshwright validate`)."""


class Candidate:
    """A run's layout and its costs; `times` is shared by layouts that are compared.

    Raises `UserError` unless the layout has as many ranks as the cluster has devices.
    """

    def __init__(self, spec: RunSpec, costs: CostModel, times: ScheduleTimes | None = None) -> None:
        ranks, devices = spec.layout.world_size, costs.cluster.count
        if ranks != devices:
            raise UserError(
                f"layout: {spec.layout.describe()} is {ranks:,} rank{'s' * (ranks > 1)}, but "
                f"{costs.cluster.name} has {devices:,} device{'s' * (devices > 1)}; give a cluster of "
                f"{ranks:,}"
            )
        check_computes(costs.format or spec.precision.compute, costs.cluster.device)
        check_offload(spec, costs.cluster)
        check_activation_offload(spec, costs.cluster, costs.stack)
        refuse_other_stacks(spec, costs.stack)
        self.spec, self.costs, self.cluster = spec, costs, costs.cluster
        self.times = times if times is not None else ScheduleTimes()

    @cached_property
    def _placed(self) -> PlacedStages:
        return placed_stages(self.spec)

    @cached_property
    def time(self) -> StepTime:
        """The step, timed."""
        return self.time_on(self.costs)

    def time_on(self, costs: CostModel) -> StepTime:
        """The step with other costs."""
        return StepTime(self.spec, costs, self.times, self._placed)

    @cached_property
    def memories(self) -> tuple[Memory, ...]:
        """Bytes of each pipeline rank."""
        return tuple(memory_model(self.costs).ranks(self.spec))

    @property
    def bound(self) -> float:
        """Seconds of a step at least."""
        return self.time.bound

    @property
    def seconds(self) -> float:
        """Seconds of a step."""
        return self.time.seconds

    @property
    def interval(self) -> tuple[float, float]:
        """Seconds between which a step is in 9 of 10 cases."""
        return interval(
            self.seconds, regime(self.cluster, self.spec.model), spread(self.cluster, self.costs.stack)
        )

    @property
    def parts(self) -> dict[str, float]:
        """Seconds of the busiest pipeline rank by cause."""
        return self.time.parts

    @property
    def tokens_per_second(self) -> float:
        """Tokens that the cluster trains on in a second."""
        return self.spec.train.batch_tokens / self.seconds

    @property
    def mfu(self) -> float:
        """Model FLOPs of a second over the devices' peak for the format of matrix products."""
        spec, cluster = self.spec, self.cluster
        flops = flops_per_token(spec) * spec.train.batch_tokens
        devices = cluster.count / (cluster.sharing if cluster.device.kind == "cpu" else 1)
        format = precision(self.costs.format or spec.precision.compute).products
        rate = peak(cluster.device, format) * devices
        return flops / self.seconds / rate

    @property
    def causal_mfu(self) -> float:
        """The MFU with what a causal mask leaves of attention's FLOPs: half of them without a window."""
        return self.mfu * flops_per_token(self.spec, causal=True) / flops_per_token(self.spec)

    @property
    def attention(self) -> AttentionBackends | None:
        """The kernels of attention that the seconds are of; None for other programs, which have one."""
        return planned_backends(self.spec, self.cluster.device) if self.costs.stack.ours else None

    @cached_property
    def memory(self) -> Memory:
        """Bytes of the fullest rank."""
        return max(self.memories, key=lambda memory: memory.allocated)

    @property
    def room(self) -> float:
        """Memory of one rank's device in bytes."""
        return room(self.cluster)

    @property
    def fits_probability(self) -> float:
        """Probability that the fullest rank fits its device."""
        wider = spread(self.cluster, self.costs.stack)
        return fits_probability(self.memory.device, self.room, wider)

    @cached_property
    def uneven(self) -> dict[str, list[float]] | None:
        """Rows of the busiest expert rank over the mean, and then seconds of a step and bytes of the fullest
        rank: each in the best routing published and in usual one. None without expert ranks; all other
        bytes are of even routing, and seconds of equally popular experts.
        """
        spec, costs, moe = self.spec, self.costs, self.spec.model.moe
        if moe is None or spec.layout.ep == 1:
            return None
        rows = [busiest(spec, each) for each in VIOLATIONS]
        steps = (CostModel(costs.cluster, costs.stack, costs.format, each) for each in VIOLATIONS)
        bounded = spec.layout.bounds_dispatch  # then rows are as many whatever the routing
        of_experts = 0 if bounded else expert_activations(shortened(spec), self.memory.rank)
        return {
            "rows": rows,
            "step_seconds": [self.time_on(each).seconds for each in steps],
            "memory": [self.memory.device + (more - 1) * of_experts for more in rows],
        }

    @property
    def offloaded(self) -> dict[str, float] | None:
        """Bytes of moments outside the device, of the fullest rank and of a node of such ranks; seconds of
        the busiest rank's optimiser, and with moments on the device. None where they are there."""
        spec = self.spec
        if spec.train.offload == "none":
            return None
        view = place_of(spec, self.memory.rank)
        size = moment_bytes(view, units(view))
        here = spec.model_copy(update={"train": spec.train.model_copy(update={"offload": "none"})})
        before = StepTime(here, self.costs, self.times, self._placed).parts_of(self.time.rank)
        return {
            "bytes": size,
            "node_bytes": size * min(self.cluster.node, self.cluster.count),
            "seconds": self.parts["optimiser"],
            "seconds_on_device": before["optimiser"],
        }

    @property
    def offloaded_activations(self) -> dict[str, float] | None:
        """Bytes of activations in the host's memory, of the fullest rank and of a node of such ranks; seconds
        in which the busiest rank waits for their copies. None where they stay on the device."""
        spec = self.spec
        if spec.train.offload_activations == "none":
            return None
        size = host_activations(shortened(spec), self.memory.rank)
        return {
            "bytes": size,
            "node_bytes": size * min(self.cluster.node, self.cluster.count),
            "seconds": self.parts["activation offload"],
        }

    @cached_property
    def exchange(self) -> ExchangeFigures | None:
        """Time and bytes of exchanges of parameters; None where all ranks step together."""
        if self.spec.step_groups == 1:
            return None
        together = StepTime(self.spec.together(), self.costs, self.times, self._placed)
        return ExchangeFigures(
            self.spec, self.costs, self.time.exchange, self.seconds, traffic(self.spec, self.time.rank),
            together.seconds,
        )  # fmt: skip

    @property
    def never_measured(self) -> list[str]:
        """Clauses about what the seconds rest on that no run has measured."""
        device, stack, profiled = self.cluster.device, self.costs.stack, self.cluster.measured is not None
        found = []
        if stack.ours and device.kind != "cpu":
            found.append("this program has never been timed on GPUs")
        elif not stack.ours and stack.name not in TIMED.get(device.name, ()):
            found.append(f"no published run of {stack.name} is on {device.name}")
        if device.kind == "cpu" and not profiled:
            found.append(f"the rates of {device.name} are round figures (meshwright profile measures them)")
        elif device.name not in TIMED and not profiled:
            found.append(f"the rates of {device.name} are assumed (no published run is on it)")
        if "assumed" in self.cluster.source:
            found.append("the network of its servers is assumed")
        if (parts := self.spec.layout.expert_parts) > 1:
            found.append(f"what layout.expert_parts = {parts} hides is not modelled: seconds are those of 1")
        return found

    def fits(self, capacity: float) -> bool:
        """True if the fullest rank needs at most `capacity` bytes."""
        return self.memory.device <= capacity

    def beats(self, other: Candidate) -> bool:
        """True if it is faster, and not by a tie."""
        limit = other.seconds * (1 - TIE)
        return self.bound < limit and self.seconds < limit

    @property
    def sharding(self) -> str:
        """How another program calls the ZeRO stage; an empty text for this one, or where none is shared."""
        return PROGRAMS[self.costs.stack.name].sharding_of(self.spec)

    def figures(self) -> dict[str, Any]:
        """The layout, its times and the probability that it fits, as plain values."""
        return {
            "layout": self.spec.layout.model_dump(mode="json"),
            "recompute": self.spec.recompute.model_dump(mode="json"),
            "step_seconds": self.seconds,
            "interval": list(self.interval),
            "tokens_per_second": self.tokens_per_second,
            "mfu": self.mfu,
            "causal_mfu": self.causal_mfu,
            "attention": self.attention and self.attention.to_json(),
            "compiled": self.spec.train.compile,
            "sharding": self.sharding or None,
            "planning_only": self.cluster.device.planning_only or None,
            "fits_probability": self.fits_probability,
            "uneven_routing": self.uneven,
            "offloaded": self.offloaded,
            "offloaded_activations": self.offloaded_activations,
            **exchange_json(self.exchange),
        }
