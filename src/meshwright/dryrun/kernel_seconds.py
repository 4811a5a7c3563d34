"""Seconds of the events of a trace on a cluster, by the planner's rates of its devices and links."""

from __future__ import annotations

from meshwright.dryrun.events import Event
from meshwright.hardware.cluster import Cluster
from meshwright.planner.cost.collectives import CollectiveCosts
from meshwright.planner.cost.kernels import START, KernelCosts
from meshwright.planner.cost.software import MESHWRIGHT, Attention
from meshwright.planner.group_shapes import GroupShape

CALLS = {"view": 2e-6, "collective": 25e-6, "stream": 5e-6, "wait": 5e-6, "graph": 10e-6, "none": 0.0}
"""Seconds of the host's calls that launch no kernel. Source: assumed."""
_BUS = 25e9
"""Bytes per second to the host's memory and back where the cluster has none. Source: assumed (PCIe 4)."""
_TO_NEXT = ("send", "receive", "shift")
_REDUCED = ("all_reduce", "amax", "scalars")


class EventSeconds:
    """Seconds of events on the device, and of their calls on the host, of a cluster."""

    def __init__(self, cluster: Cluster, flash: Attention = "flash2") -> None:
        """`flash` is the release of FlashAttention that operators of that name call."""
        device = cluster.device
        self._kernels, self._flash = KernelCosts(device, measured=cluster.measured), flash
        self._links = CollectiveCosts(cluster, MESHWRIGHT.flat_rings)
        self._bus = device.host_link or _BUS

    def host(self, event: Event) -> float:
        """Seconds of the host's call: an operator's are those of the planner."""
        launch = MESHWRIGHT.numbers.launch
        calls = CALLS | {"operator": MESHWRIGHT.launch, "compiled": launch["compiled"]}
        return calls[event.host]

    def device(self, event: Event) -> float:
        """Seconds on the event's stream."""
        if event.kind == "collective":
            return self._collective(event)
        return START + self._kernel(event)

    def _kernel(self, event: Event) -> float:
        if event.direction in ("host to device", "device to host"):
            return event.bytes / self._bus
        work = event.work
        if work is None:
            return self._kernels.moved(event.bytes)
        if work.product is not None:
            p = work.product
            return self._kernels.matmul(work.format, p.m, p.n, p.k, p.batch)
        kernel = self._flash if work.kernel == "flash" else work.kernel
        shape = work.length, work.backward, kernel, work.channels
        seconds = self._kernels.attention(work.format, work.flops, *shape)
        return max(seconds, self._kernels.moved(event.bytes))

    def _collective(self, event: Event) -> float:
        group, n = GroupShape(event.ranks, event.stride), event.ranks
        if event.name in _TO_NEXT:
            size = event.bytes or sum(each.end - each.start for each in event.writes)
            return self._links.to_next("shift" if event.name == "shift" else "send", size, group)
        size = event.bytes * n / max(1, n - 1)  # what one rank sends -> the whole tensor
        if event.name in _REDUCED:
            return self._links.collective("all_reduce", size / 2, group)
        return self._links.collective(event.name, size, group)
