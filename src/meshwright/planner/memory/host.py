"""Bytes that a run puts into its hosts' memory, and whether there is room for them."""

from __future__ import annotations

from meshwright.hardware.cluster import Cluster
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


def host_room(cluster: Cluster) -> float | None:
    """Bytes of its host's memory that a rank may fill; None where the memory is not known."""
    size = cluster.device.host_memory
    return None if size is None else _FREE * size


def fits_host(spec: RunSpec, cluster: Cluster) -> bool:
    """True if what each rank has in its host's memory is within its share, or none is known."""
    room = host_room(cluster)
    if room is None or not offloads(spec):
        return True
    return host_bytes(spec) <= room


def host_bytes(spec: RunSpec) -> int:
    """Bytes that the rank with the most of them has in its host's memory."""
    short, found = shortened(spec), []
    for rank in range(spec.layout.pp):
        view, size = place_of(spec, rank), 0
        if spec.train.offload == "host":
            size += moment_bytes(view, units(view))
        if spec.train.offload_activations != "none":
            size += host_activations(short, rank)
        found.append(size)
    return max(found)
