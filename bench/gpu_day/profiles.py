"""The kernels of profiled steps, by the operators of PyTorch that launched them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from typing import Any, NamedTuple

from gpu_day.results import Row

MESSAGES = "messages"
"""Stands for the kernels of NCCL."""
UNKNOWN = "without an operator"
LAUNCHED = ("kernel", "copy", "collective")
"""Kinds of a trace's events that the device runs."""


class KernelCall(NamedTuple):
    """A kernel, the operator that launched it, and a number that calls of one operator have in common."""

    operator: str
    call: int
    kernel: str
    seconds: float


def kernel_calls(events: Iterable[Any], known: Collection[str]) -> list[KernelCall]:
    """The kernels of `torch.profiler`'s events, each with the outermost operator around it that is `known`.

    An operator that launches no kernel itself may call others that do: a trace on fake tensors sees the
    outermost of those below autograd, so `known` are the names that it has. Where none is, it is the
    innermost. Kernels without any, such as those of a CUDA graph, are told by themselves.
    """
    found, launched = list[KernelCall](), defaultdict[tuple[str, float], int](int)
    on_device = []
    for event in events:
        if "CUDA" in str(event.device_type):
            if not getattr(event, "is_user_annotation", False):
                on_device.append(event)
            continue
        if not event.kernels:
            continue
        operator = _operator(event, known)
        for kernel in event.kernels:
            launched[kernel.name, kernel.duration] += 1
            name = MESSAGES if kernel.name.startswith("nccl") else operator.name
            found.append(KernelCall(name, id(operator), kernel.name, kernel.duration / 1e6))
    for event in on_device:
        seconds = event.time_range.end - event.time_range.start
        if launched[event.name, seconds] > 0:
            launched[event.name, seconds] -= 1
        else:
            name = MESSAGES if event.name.startswith("nccl") else UNKNOWN
            found.append(KernelCall(name, id(event), event.name, seconds / 1e6))
    return found


def _operator(event: Any, known: Collection[str]) -> Any:
    """The outermost event around one, itself included, whose name is known; else itself."""
    best, at = None, event
    while at is not None:
        if at.name in known:
            best = at
        at = at.cpu_parent
    return best or event


def calls_of_trace(events: Iterable[Any]) -> list[KernelCall]:
    """The kernels, copies and messages of a faked device's trace, with the seconds of an H100's rates."""
    from meshwright.dryrun.kernel_seconds import EventSeconds
    from meshwright.hardware.find import cluster

    seconds = EventSeconds(cluster("h100", 1))
    return [
        KernelCall(operator_of(each), number, each.name, seconds.device(each))
        for number, each in enumerate(events)
        if each.kind in LAUNCHED
    ]


def operator_of(event: Any) -> str:
    """The operator of a trace's event, as the profiler names it: without its overload."""
    return MESSAGES if event.kind == "collective" else event.name.partition(".")[0]


def longest(calls: Sequence[KernelCall], number: int) -> list[Row]:
    """The kernels that take most seconds over all recorded steps, each with its operator."""
    found = defaultdict[tuple[str, str], list[float]](list)
    for call in calls:
        found[call.kernel, call.operator].append(call.seconds)
    rows = [
        {"kernel": kernel[:160], "operator": operator, "count": len(times), "seconds": round(sum(times), 6)}
        for (kernel, operator), times in found.items()
    ]
    return sorted(rows, key=lambda row: -float(str(row["seconds"])))[:number]


def operators(calls: Sequence[KernelCall], steps: int) -> dict[str, Row]:
    """Calls, kernels and device seconds of each operator in a step: the mean of the recorded ones."""
    grouped = defaultdict[str, list[KernelCall]](list)
    for call in calls:
        grouped[call.operator].append(call)
    return {
        name: {
            "count": round(len({call.call for call in own}) / steps, 2),
            "kernels": round(len(own) / steps, 2),
            "seconds": round(sum(call.seconds for call in own) / steps, 9),
        }
        for name, own in sorted(grouped.items())
    }
