"""Measure the machine that the ranks of the world run on, and make a cluster of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby, pairwise
from pathlib import Path
from socket import gethostname
from statistics import fmean
from typing import TypeVar

import torch
import torch.distributed as dist

from meshwright.comm.collectives import sum_scalars
from meshwright.comm.control import Connections, Control, new_scope
from meshwright.comm.mesh import Axis
from meshwright.comm.process_groups import TIMEOUT
from meshwright.hardware.cluster import (
    AttentionTime,
    Cluster,
    Collective,
    Kind,
    Level,
    Link,
    Matmul,
    ProfiledTimes,
)
from meshwright.host import cores, host_id
from meshwright.kernels.half_precision_products import products_in_fp32
from meshwright.parallel.precision import DTYPES
from meshwright.profile import compute, links, machine
from meshwright.profile.clock import Clock
from meshwright.spec.errors import UserError

# Of all seconds: products, products alone, attention, collectives, overlap; the rest is quick.
_PRODUCTS, _ALONE, _ATTENTION, _LINKS, _OVERLAP = 0.25, 0.12, 0.13, 0.42, 0.03
_QUICK = 0.02
PASSES = 2
"""Over everything that has shapes: other work comes in bursts."""

_PCIE = 64e9
"""Bytes per second of PCIe 5.0: faster links between GPUs of a host are taken for NVLink."""

Average = Callable[[Iterable[float]], float]
Point = TypeVar("Point", Matmul, AttentionTime, Collective)


@dataclass(frozen=True)
class _World:
    """This rank among all."""

    clock: Clock
    ranks: Control
    hosts: int
    local: int
    axis: Axis
    places: list[links.Placement]

    def meet(self) -> None:
        """Wait for all ranks."""
        sum_scalars([0.0], self.axis)


def profile(device: torch.device, seconds: float) -> Cluster | None:
    """Measure for some `seconds`. Every rank of the default group calls this; the first gets the cluster.

    Products, attention and memory are timed on all ranks at once and averaged over them; of collectives the
    slowest rank counts. Raises `UserError` when hosts do not have equal numbers of ranks, in order.
    """
    world = _world(device)
    matmul, attention, alone = _computed(world, seconds)
    rates = compute.memory_rates(world.clock, seconds * _QUICK, world.meet)
    world.meet()
    rates.append(compute.launch_time(world.clock))
    elementwise, copy, optimiser, launch = links.mean(rates, world.axis)
    share = seconds * _LINKS / PASSES
    cpu_shares: dict[str, float] = {}
    turn = partial(links.collective_times, world.places, world.axis, world.clock, share, cpu_shares)
    passes = [list(turn()) for _ in range(PASSES)]
    # Of differences of times none is right by being the least.
    collectives = _merge(world, passes, fmean if world.clock.crowded else min, max)
    by_place = groupby(collectives, key=lambda point: (point.operation, point.ranks, point.level))
    collectives = tuple(point for _, points in by_place for point in links.never_less(list(points)))
    ranks, taken = world.local, machine.taken(device)
    measured = ProfiledTimes(
        matmul, attention, collectives, alone, elementwise, copy, optimiser, launch, ranks=ranks, taken=taken
    )
    if world.places:
        slower = links.overlap(world.places[-1].axis, world.clock, seconds * _OVERLAP)
        compute_by, collective_by = links.mean(slower, world.axis)
        measured = replace(measured, overlap_compute=compute_by, overlap_collective=collective_by)
        if not world.clock.cuda:
            shares = dict(zip(cpu_shares, links.mean(list(cpu_shares.values()), world.axis), strict=True))
            measured = replace(measured, collective_compute=shares)
    return _cluster(world, measured) if world.ranks.rank == 0 else None


def _world(device: torch.device) -> _World:
    ranks = Connections().control("profile", dist.get_world_size(), new_scope(), TIMEOUT)
    hosts = ranks.broadcast(ranks.gather(host_id()))
    sizes = set(Counter(hosts).values())
    changes = 1 + sum(before != after for before, after in pairwise(hosts))
    if len(sizes) > 1 or changes != len(set(hosts)):
        raise UserError(
            f"hosts: they run {', '.join(str(n) for n in Counter(hosts).values())} ranks, or not in order; "
            f"start equally many on each, host by host, as torchrun does"
        )
    local = sizes.pop()
    clock = Clock(device, local / cores() if device.type == "cpu" else 1.0)
    axis, places = links.placements(len(set(hosts)), local, device)
    return _World(clock, ranks, len(set(hosts)), local, axis, places)


def _computed(
    world: _World, seconds: float
) -> tuple[tuple[Matmul, ...], tuple[AttentionTime, ...], tuple[Matmul, ...]]:
    """Products with all ranks at work, attention likewise, and products of one rank of each host."""
    clock, cuda, formats = world.clock, world.clock.cuda, compute.FORMATS
    with torch.no_grad():
        rates = links.mean([compute.probe(clock, name) for name in formats], world.axis)
    share = seconds / len(formats) / PASSES
    matmul: list[list[Matmul]] = [[] for _ in range(PASSES)]
    attention: list[list[AttentionTime]] = [[] for _ in range(PASSES)]
    alone: list[list[Matmul]] = [[] for _ in range(PASSES)]
    for turn in range(PASSES):
        for name, rate in zip(formats, rates, strict=True):
            shapes = compute.product_shapes(rate * share * _PRODUCTS, cuda)
            sizes = compute.attention_shapes(rate * share * _ATTENTION, cuda)
            with products_in_fp32(clock.device, DTYPES[name]):
                with torch.no_grad():
                    matmul[turn] += compute.products(clock, name, shapes, share * _PRODUCTS, world.meet)
                    if not cuda:  # a GPU does not wait for its neighbours
                        alone[turn] += _alone(world, name, shapes[::2], share * _ALONE)
                attention[turn] += compute.attentions(clock, name, sizes, share * _ATTENTION, world.meet)
    return (
        _merge(world, matmul, min, fmean),
        _merge(world, attention, min, fmean),
        _merge(world, alone, min, fmean),
    )


def _alone(world: _World, name: str, shapes: list[tuple[int, int, int]], seconds: float) -> Iterable[Matmul]:
    """Products on the first rank of each host, while the others wait."""
    if world.local == 1:
        return
    world.meet()
    if world.ranks.rank % world.local == 0:
        yield from compute.products(world.clock.alone(), name, shapes, seconds, lambda: None)
    world.meet()


def _merge(world: _World, passes: list[list[Point]], by_pass: Average, by_rank: Average) -> tuple[Point, ...]:
    """The points of all ranks that have any, their times combined, on the first rank; () on the others."""
    points = _combine(passes, by_pass)
    rows = [[type(points[0])(*point) for point in row] for row in world.ranks.gather(points) if row]
    return tuple(_combine(rows, by_rank))


def _combine(rows: list[list[Point]], by: Average) -> list[Point]:
    """Points of the same shapes, their times combined."""
    combined: list[Point] = []
    for points in zip(*rows, strict=True):
        kind = type(points[0])
        times = 2 if kind is AttentionTime else 1
        seconds = zip(*(point[-times:] for point in points), strict=True)
        combined.append(kind(*points[0][:-times], *map(by, seconds)))
    return combined


def _cluster(world: _World, measured: ProfiledTimes) -> Cluster:
    cuda, total = world.clock.cuda, world.hosts * world.local
    inside = _link(measured, "host")
    kind: Kind = "nvlink" if inside.bandwidth > _PCIE else "pcie"
    levels = [Level("host", world.local, inside, kind=kind if cuda else "memory")]
    if world.hosts > 1:
        infiniband = cuda and any(Path("/sys/class/infiniband").glob("*"))
        kind = "infiniband" if infiniband else "ethernet"
        levels.append(Level("network", total, _link(measured, "network"), kind=kind))
    return Cluster(
        gethostname(),
        machine.device_of(world.clock.device, measured),
        total,
        tuple(levels),
        None,
        f"meshwright profile, {measured.taken['date']}, {world.hosts} x {world.local} processes",
        measured,
        sharing=1 if cuda else world.local,
    )


def _link(measured: ProfiledTimes, level: str) -> Link:
    """By messages from a rank to a neighbour; within a lone process, by its memory."""
    sends = [point for point in measured.collectives if (point.operation, point.level) == ("send", level)]
    if not sends:
        return Link(measured.launch or 0.0, (measured.copy_bandwidth or 0.0) / 2)
    return Link(min(point.seconds for point in sends), max(point.bytes / point.seconds for point in sends))
