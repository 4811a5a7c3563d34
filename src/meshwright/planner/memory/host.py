"""Bytes that a run puts into its hosts' memory, and whether there is room for them.

The ranks of a host share its memory: what they have there together is bounded, not each one's part.
"""

from __future__ import annotations

from dataclasses import replace
from math import lcm

from meshwright.hardware.cluster import Cluster
from meshwright.planner.group_shapes import axes
from meshwright.planner.memory.exact import shortened
from meshwright.planner.memory.in_flight import host_activations
from meshwright.planner.memory.states import moment_bytes, units
from meshwright.planner.rank_view import place_of
from meshwright.spec import RunSpec

_FREE = 0.9
"""Share of a host's memory that a run may fill. Source: assumed; the rest is the system's, the data loader's
and the interpreters'."""


def offloads(spec: RunSpec) -> bool:
    """True if a run has moments or activations in its hosts' memory."""
    return spec.train.offload == "host" or spec.train.offload_activations != "none"


def host_ranks(cluster: Cluster) -> int:
    """Ranks of one host, which share its memory."""
    return min(cluster.host or cluster.node, cluster.count)


def host_room(cluster: Cluster) -> float | None:
    """Bytes of a host's memory that its ranks may fill together; None where the memory is not known."""
    size = cluster.device.host_memory
    return None if size is None else _FREE * host_ranks(cluster) * size


def with_host_room(cluster: Cluster, size: float | None) -> Cluster:
    """The cluster whose ranks may fill `size` bytes of each host's memory together, or any number of them."""
    each = None if size is None else size / (_FREE * host_ranks(cluster))
    return replace(cluster, device=replace(cluster.device, host_memory=each))


def fits_host(spec: RunSpec, cluster: Cluster) -> bool:
    """True if what the ranks of each host have in its memory is within its room, or none is known."""
    room = host_room(cluster)
    if room is None or not offloads(spec):
        return True
    return host_bytes(spec, host_ranks(cluster)) <= room


def host_bytes(spec: RunSpec, ranks: int) -> int:
    """Bytes that the ranks of the host with the most of them have in its memory together, `ranks` of each."""
    short, found = shortened(spec), []
    for rank in range(spec.layout.pp):
        view, size = place_of(spec, rank), 0
        if spec.train.offload == "host":
            size += moment_bytes(view, units(view))
        if spec.train.offload_activations != "none":
            size += host_activations(short, rank)
        found.append(size)
    if (pipeline := axes(spec.layout).pipeline).stride % ranks == 0:  # all ranks of a host are of one stage
        return ranks * max(found)
    turn = lcm(pipeline.stride * pipeline.ranks, ranks)
    stages = [found[rank // pipeline.stride % pipeline.ranks] for rank in range(turn)]
    return max(sum(stages[first : first + ranks]) for first in range(0, turn, ranks))
