"""A step on a faked GPU in seconds: where the time of its compute stream goes, beside the planner's estimate.

The seconds of kernels and collectives are the planner's own of the cluster; what starts when, and what waits
for what, follows from the trace.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from heapq import nlargest
from typing import Any

from meshwright.dryrun.clocks import (
    HOST,
    MESSAGES,
    OTHER_RANKS,
    OTHER_STREAMS,
    WAITS,
    Mail,
    StepClocks,
    follow,
)
from meshwright.dryrun.events import Event
from meshwright.dryrun.fake_world import DOCUMENTS
from meshwright.dryrun.kernel_seconds import EventSeconds
from meshwright.fake_cuda.library import NAMES
from meshwright.fake_cuda.runtime import DEFAULT_STREAM, Capability
from meshwright.hardware.attention_backend import planned_backends
from meshwright.hardware.cluster import Cluster
from meshwright.planner.cost.breakdown import Seconds
from meshwright.planner.cost.software import KERNELS
from meshwright.planner.plan import Plan, estimate
from meshwright.spec import RunSpec

KINDS = ("products", "attention", "loss", "elementwise", "copies", "copies over the bus", "optimiser")
"""Kinds of work on a stream that computes."""
CALLS_OF_HOST = "calls of the host"
AFTER = ("reduce", "optimiser")
"""Phases of a step after its last backward."""
LONGEST = 10
"""Longest waits that are listed."""
APART = 0.1
"""Relative difference of two terms from which on they are marked."""
LEAST = 1e-4
"""Least share of the step of a term that is compared."""
TIMED_ASSUMPTIONS = (
    "kernels and messages last as the planner's rates of the cluster say, whatever runs beside them",
    "the host takes the planner's time for an operator, 25 us for a collective, 2 us for a view, 5 us for "
    "a call of a stream and 10 us for a graph",
    "all ranks that share a stage run the same step at the same time",
)


def capability_of(cluster: Cluster) -> Capability:
    """The compute capability that is faked for the devices of a cluster: the newest not above theirs."""
    own = cluster.device.capability or min(NAMES)
    return max(each for each in NAMES if each <= max(own, min(NAMES)))


def kind_of(event: Event) -> str:
    """The kind of a kernel or copy, of `KINDS`."""
    if event.work is not None:
        return "attention" if event.work.product is None else "products"
    if event.direction in ("host to device", "device to host"):
        return "copies over the bus"
    if event.phase in AFTER:
        return "optimiser"
    if event.module == "head":
        return "loss"
    return "copies" if event.direction else "elementwise"


def place_of_event(event: Event) -> str:
    """Phase and module in which an event was issued; what follows the last backward is of no module."""
    module = "" if event.phase in AFTER else event.module
    return " in ".join(part for part in (event.phase, module) if part)


@dataclass(frozen=True)
class RankTimeline:
    """The clocks of one rank, followed to the end of the step of all ranks."""

    rank: int
    pipeline_rank: int
    stages: int
    """Ranks of the pipeline."""
    clocks: StepClocks
    step_seconds: float

    def to_json(self, plan: Plan) -> dict[str, Any]:
        """Plain values, with those that the planner estimates."""
        clocks, seconds = self.clocks, self.step_seconds
        main = clocks.streams[DEFAULT_STREAM]
        times, counts = _times(clocks, DEFAULT_STREAM)
        waits = [idle for idle in main.idle if idle.event is not None]
        return {
            "cluster": plan.cluster.name,
            "device": plan.cluster.device.name,
            "step_seconds": seconds,
            "tokens_per_second_per_gpu": plan.spec.train.batch_tokens / seconds / plan.cluster.count,
            "mfu": plan.mfu * plan.seconds / seconds,
            "causal_mfu": plan.causal_mfu * plan.seconds / seconds,
            "compute_stream": [
                {"kind": kind, "waiting": kind in WAITS, "count": counts[kind], "seconds": times[kind]}
                for kind in (*KINDS, *WAITS)
            ],
            "host_bound_seconds": times[HOST],
            "host": {"issuing": sum(end - start for start, end, _ in clocks.host.spans),
                     "waiting": sum(idle.end - idle.start for idle in clocks.host.idle)},
            "exposed": _exposed(clocks),
            "longest_waits": [
                {
                    "what": f"{idle.event.axis} {idle.event.name}".strip(),
                    "place": place_of_event(idle.event),
                    "at": idle.start,
                    "seconds": idle.end - idle.start,
                }
                for idle in nlargest(LONGEST, waits, key=lambda idle: idle.end - idle.start)
                if idle.event is not None
            ],
            "streams": [
                {"stream": number, "name": self.name_of(number), "busy": _busy(clocks, number)}
                for number in sorted(clocks.streams)
            ],
            "planner": self._beside(plan, times),
        }  # fmt: skip

    def name_of(self, stream: int) -> str:
        """A stream's purpose: "compute", "stream 3", or the axis and number of a process group."""
        if stream in self.clocks.collectives:
            event = self.clocks.streams[stream].spans[0].event
            return f"{event.axis}, group {event.group}"
        return "compute" if stream == DEFAULT_STREAM else f"stream {stream}"

    def rows(self, prefix: str = "") -> list[tuple[str, list[tuple[float, float, str, str]]]]:
        """(name, spans) of each clock, the host's first; a span has its start, end, kind and name."""
        found = [(f"{prefix}host", _calls(self.clocks))]
        for number in sorted(self.clocks.streams, key=lambda number: number in self.clocks.collectives):
            spans = [
                (start, end, *self._told(event)) for start, end, event in self.clocks.streams[number].spans
            ]
            if spans:
                found.append((f"{prefix}{self.name_of(number)}", spans))
        return found

    def _told(self, event: Event) -> tuple[str, str]:
        kind = MESSAGES if event.kind == "collective" else kind_of(event)
        name = f"{event.axis} {event.name}" if event.axis else event.name.partition("::")[2]
        return kind, f"{name} ({place_of_event(event)})"

    def _beside(self, plan: Plan, times: Mapping[str, float]) -> dict[str, Any]:
        """The planner's estimate of the step, term by term beside the clocks'."""
        rank = self.pipeline_rank
        theirs = planned_terms(plan, rank)
        exposed = {row["axis"]: 0.0 for row in _exposed(self.clocks)}
        for row in _exposed(self.clocks):
            exposed[row["axis"]] += row["seconds"]
        stages = ("pipeline", "world", "ends") if self.stages > 1 else ()  # waits for ranks of other stages
        pipeline = sum(exposed.pop(axis, 0.0) for axis in stages)
        ours = {
            "products": times["products"],
            "attention": times["attention"],
            "memory-bound": sum(times[kind] for kind in ("loss", "elementwise", "copies")),
            "optimiser": times["optimiser"],
            "messages exposed": sum(exposed.values()),
            "host": times[HOST],
            "offload": times["copies over the bus"] + times[OTHER_STREAMS],
            "slowed by messages": 0.0,
            "fixed": 0.0,
            "pipeline": pipeline + times[OTHER_RANKS],
        }
        return {
            "step_seconds": plan.seconds,
            "tokens_per_second_per_gpu": plan.tokens_per_second / plan.cluster.count,
            "mfu": plan.mfu,
            "causal_mfu": plan.causal_mfu,
            "ratio": self.step_seconds / plan.seconds,
            "terms": [_term(name, ours[name], theirs[name], self.step_seconds) for name in ours],
        }


def planned_terms(plan: Plan, rank: int) -> dict[str, float]:
    """The planner's seconds of a pipeline rank by the terms that clocks have; their sum is the step's."""
    parts, work = plan.time.parts_of(rank), plan.time.ranks[rank].work
    whole = Seconds()
    for each in work:
        whole = whole.plus(each)
    return {
        "products": whole.matmul,
        "attention": whole.attention,
        "memory-bound": whole.moved + sum(plan.time.ranks[rank].data.copies.values()),
        "optimiser": parts["optimiser"],
        "messages exposed": whole.tensor
        + whole.context
        + whole.expert
        + parts["data axis"]
        + parts["exchange"],
        "host": whole.host,
        "offload": whole.offload,
        "slowed by messages": parts["slowed by messages"],
        "fixed": parts["fixed"],
        "pipeline": parts["pipeline axis"] + parts["bubble"] + parts["forwards ahead"],
    }


def _term(name: str, clock: float, planner: float, step: float) -> dict[str, Any]:
    """A term of both, marked where they are apart; a planner's term below a ten-thousandth of a step is 0."""
    planner = planner if planner > LEAST * step else 0.0
    ratio, most = clock / planner if planner else None, max(clock, planner)
    apart = most > LEAST * step and abs(clock - planner) > APART * most
    return {"term": name, "seconds": clock, "planner_seconds": planner, "ratio": ratio, "apart": apart}


def _times(clocks: StepClocks, number: int) -> tuple[defaultdict[str, float], Counter[str]]:
    """Seconds and number of what a stream computes, and of what it waits for."""
    stream, seconds, counts = clocks.streams[number], defaultdict[str, float](float), Counter[str]()
    for start, end, event in stream.spans:
        seconds[kind_of(event)] += end - start
        counts[kind_of(event)] += 1
    for idle in stream.idle:
        seconds[idle.reason] += idle.end - idle.start
        counts[idle.reason] += 1
    return seconds, counts


def _exposed(clocks: StepClocks) -> list[dict[str, Any]]:
    """Time in which the compute stream waits for messages, by axis, process group and operation."""
    found: dict[tuple[str, str, str], list[float]] = {}
    for idle in clocks.streams[DEFAULT_STREAM].idle:
        if idle.reason == MESSAGES and idle.event is not None:
            key = idle.event.axis, idle.event.group, idle.event.name
            found.setdefault(key, []).append(idle.end - idle.start)
    rows = [
        {"axis": axis, "group": group, "operation": name, "waits": len(times), "seconds": sum(times)}
        for (axis, group, name), times in found.items()
    ]
    return sorted(rows, key=lambda row: -float(str(row["seconds"])))


def _calls(clocks: StepClocks) -> list[tuple[float, float, str, str]]:
    """Calls of the host, those in a row from one place as one span."""
    found: list[tuple[float, float, str, str]] = []
    for start, end, event in clocks.host.spans:
        name = place_of_event(event) or "start"
        if found and found[-1][3] == name and found[-1][1] == start:
            found[-1] = (found[-1][0], end, CALLS_OF_HOST, name)
        else:
            found.append((start, end, CALLS_OF_HOST, name))
    return found


def _busy(clocks: StepClocks, number: int) -> float:
    return sum(end - start for start, end, _ in clocks.streams[number].spans)


def timelines(
    spec: RunSpec, cluster: Cluster, traces: Sequence[tuple[int, int, Sequence[Event]]]
) -> tuple[list[RankTimeline], Plan]:
    """The clocks of a rank of each pipeline stage, (rank, pipeline rank, events), and the planner's plan."""
    seconds = EventSeconds(cluster, KERNELS[planned_backends(spec, cluster.device).flash])
    mail = Mail({"world": len(traces), "ends": min(2, len(traces))})
    ranks = [StepClocks(events, seconds.device, seconds.host, mail) for _, _, events in traces]
    follow(ranks)
    step = max(each.seconds for each in ranks)
    made = [
        RankTimeline(rank, place, len(ranks), clocks, step)
        for (rank, place, _), clocks in zip(traces, ranks, strict=True)
    ]
    return made, estimate(spec, cluster, documents=DOCUMENTS)
