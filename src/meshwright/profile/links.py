"""Collectives between ranks over sizes and placements, and what they and products cost each other.

All groups of one shape run at once, as they do in training, so what they share, they share here too.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from meshwright.comm import collectives
from meshwright.comm.mesh import Axis
from meshwright.comm.process_groups import Groups
from meshwright.comm.traffic_counter import TrafficCounter
from meshwright.hardware.cluster import Collective
from meshwright.profile.clock import Clock, repeats_within, time_shares

_SIZES = tuple(2**power for power in (10, 13, 16, 18, 20, 22, 24))
_ROWS, _CHANNELS, _ROUNDS = 256, 512, 3
"""Number of products between two collectives, and of timed rows, of which the fastest counts."""
_LEAST = 1e-5
"""Seconds of a collective at least."""
_SIZES_CUDA = (*_SIZES, 2**26, 2**28)


@dataclass(frozen=True)
class Placement:
    """This rank's group of one shape: `ranks` of them, whose smallest common level is `level`."""

    ranks: int
    level: str
    axis: Axis


def placements(hosts: int, local: int, device: torch.device) -> tuple[Axis, list[Placement]]:
    """(all ranks, groups of 2, 4, 8, ... and all ranks of a host, one rank of each host, and all ranks).

    Ranks are numbered host by host. Every rank of the world calls this.
    """
    groups, wire = Groups(device.type), TrafficCounter()
    grid = torch.arange(hosts * local).view(hosts, local)

    def axis(rows: Tensor, dim: int) -> Axis:
        along = groups.along(rows, dim)
        assert along is not None  # rows hold every rank
        row, group = along
        memory = groups.shared_memory(group)
        return Axis("profile", len(row), row.index(dist.get_rank()), group, device, wire, memory)

    world = axis(grid.view(1, -1), 1)
    within = {2**power for power in range(1, local.bit_length()) if local % 2**power == 0} | {local} - {1}
    places = [Placement(n, "host", axis(grid.view(-1, n), 1)) for n in sorted(within)]
    if hosts > 1:
        places.append(Placement(hosts, "network", axis(grid, 0)))
        if local > 1:
            places.append(Placement(hosts * local, "network", world))
    return world, places


def collective_times(
    places: list[Placement], world: Axis, clock: Clock, seconds: float, cpu_shares: dict[str, float]
) -> Iterator[Collective]:
    """Times of every operation at every place and size, equal on all ranks; `seconds` for all of them.

    `cpu_shares` receives the share of its time, 0 to 1, that each operation occupies the rank's processor, at
    the largest size of its last place.
    """
    cases = [
        (place, name, size)
        for place in places
        for name in _OPERATIONS
        if name != "send" or place.axis is not world  # neighbours are on one host: no network in between
        for size in (_SIZES_CUDA if clock.cuda else _SIZES)
    ]
    for (place, name, size), share in zip(cases, time_shares(seconds, len(cases)), strict=True):
        elements = max(1, size // 4 // place.axis.size) * place.axis.size
        call = _call(name, place.axis, elements, clock.device)
        clock.once(call)  # the first is not counted
        collectives.sum_scalars([0.0], world)
        duration, share = mean([clock.once(call), share], world)
        if clock.crowded:
            taken, computed = _between_products(call, world, clock, share)
        else:
            repeats, before = repeats_within(share, duration), time.process_time()
            taken = clock.times(call, repeats)
            computed = (time.process_time() - before) * clock.share / repeats
        cpu_shares[name] = min(1.0, max(1e-3, computed / taken))
        messages = 2 if name == "send" else 1
        yield Collective(name, place.ranks, place.level, 4 * elements, taken / messages)


def _between_products(
    call: Callable[[], object], world: Axis, clock: Clock, seconds: float
) -> tuple[float, float]:
    """Seconds that a collective adds to a product before it on ranks that share cores, and those of its
    processors' time, for all ranks of a core.

    So it is in a step: who waits leaves its core to ranks that compute, comes back to their caches, and finds
    others late. What processors do for it is added at least.
    """
    x, weight = torch.ones(_ROWS, _CHANNELS), torch.ones(_CHANNELS, _CHANNELS)

    def row(count: int, then: Callable[[], object]) -> tuple[float, float]:
        def calls() -> None:
            for _ in range(count):
                F.linear(x, weight)
                then()
            collectives.sum_scalars([0.0], world)

        collectives.sum_scalars([0.0], world)
        before = time.process_time()
        taken = clock.once(calls)
        return taken / count, (time.process_time() - before) * clock.share / count

    (duration,) = mean([row(2, call)[0] + row(2, lambda: None)[0]], world)
    count = repeats_within(seconds / _ROUNDS, duration, least=1)
    rounds = [(*row(count, call), *row(count, lambda: None)) for _ in range(_ROUNDS)]
    taken, computed, bare_taken, bare_computed = map(min, zip(*rounds, strict=True))
    taken, computed = mean([taken - bare_taken, computed - bare_computed], world)
    computed = max(computed, _LEAST)
    return max(taken, computed), computed


def never_less(points: list[Collective]) -> list[Collective]:
    """Times of an operation at one place by ascending size, so that more bytes never take less.

    Neighbours that are the other way round have their mean: pooled adjacent violators (Ayer et al. 1955).
    """
    pools: list[list[float]] = []
    for point in points:
        pools.append([point.seconds])
        while len(pools) > 1 and fmean(pools[-2]) > fmean(pools[-1]):
            last = pools.pop()
            pools[-1] += last
    times = [fmean(pool) for pool in pools for _ in pool]
    return [point._replace(seconds=seconds) for point, seconds in zip(points, times, strict=True)]


def mean(values: Sequence[float], world: Axis) -> list[float]:
    """The means of numbers over all ranks."""
    return [total / world.size for total in collectives.sum_scalars(values, world)]


_OPERATIONS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "shift", "send")


def _call(name: str, axis: Axis, elements: int, device: torch.device) -> Callable[[], object]:
    """A call of an operation whose whole tensor has `elements` elements of fp32."""
    whole = torch.zeros(elements, device=device)  # sums of sums stay 0
    part, sent = (torch.ones(count, device=device) for count in (elements // axis.size, elements))
    calls: dict[str, Callable[[], object]] = {
        "all_gather": lambda: collectives.start_all_gather(whole, part, axis).wait(),
        "reduce_scatter": lambda: collectives.start_reduce_scatter(part, whole, axis).wait(),
        "all_reduce": lambda: collectives.start_all_reduce(whole, axis).wait(),
        "all_to_all": lambda: collectives.start_all_to_all(whole, sent, axis).wait(),
        "shift": lambda: collectives.start_shift(whole, sent, axis).wait(),
        "send": lambda: _there_and_back(sent, axis),
    }
    return calls[name]


def _there_and_back(tensor: Tensor, axis: Axis) -> None:
    """Send from a rank to its neighbour and back: two messages. An odd last rank has no neighbour."""
    peer = axis.rank ^ 1
    if peer < axis.size:
        moves = [collectives.start_send, collectives.start_receive]
        for move in moves if axis.rank < peer else moves[::-1]:
            move(tensor, peer, axis).wait()


def overlap(axis: Axis, clock: Clock, seconds: float) -> tuple[float, float]:
    """How many times as long products take beside a large all-reduce, and it beside them; at least 1.

    The all-reduce is started, and products are computed until it has ended.
    """
    # Products short beside the all-reduce, and long beside a look at whether that has ended.
    rows, elements, dtype = (2048, 2**26, torch.bfloat16) if clock.cuda else (256, 2**22, torch.float32)
    x, weight = (torch.ones(rows, rows, dtype=dtype, device=clock.device) for _ in range(2))
    message = torch.zeros(elements, device=clock.device)

    def product() -> object:
        return F.linear(x, weight)

    def reduce() -> object:
        return collectives.start_all_reduce(message, axis).wait()

    clock.once(reduce)
    (duration,) = mean([2 * clock.once(reduce)], axis)
    repeats = repeats_within(seconds / 2, duration)
    alone, quiet = clock.times(product, repeats), clock.times(reduce, repeats)
    products: list[float] = []
    reduces: list[float] = []
    for _ in range(repeats):
        collectives.sum_scalars([0.0], axis)
        start = time.perf_counter()
        pending = collectives.start_all_reduce(message, axis)
        while not pending.is_completed():
            products.append(clock.once(product))
        reduces.append(time.perf_counter() - start)
        pending.wait()
    beside = clock.typical(products) if products else alone
    return max(1.0, beside / alone), max(1.0, clock.typical(reduces) / quiet)
