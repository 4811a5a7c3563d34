"""Collectives between ranks over sizes and placements, and what they and products cost each other.

All groups of one shape run at once, as they do in training, so what they share, they share here too.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from statistics import fmean

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from meshwright.hardware.cluster import Collective
from meshwright.parallel.collectives import (
    start_all_gather,
    start_all_reduce,
    start_all_to_all,
    start_receive,
    start_reduce_scatter,
    start_send,
    start_shift,
    sum_scalars,
)
from meshwright.parallel.mesh import Axis, Pending, TrafficCounter
from meshwright.parallel.process_groups import Groups
from meshwright.profile.clock import MOST, Budget, Clock, how_many

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
        found = groups.along(rows, dim)
        assert found is not None  # rows hold every rank
        row, group = found
        return Axis("profile", len(row), row.index(dist.get_rank()), group, device, wire)

    world = axis(grid.view(1, -1), 1)
    within = {2**power for power in range(1, local.bit_length()) if local % 2**power == 0} | {local} - {1}
    found = [Placement(n, "host", axis(grid.view(-1, n), 1)) for n in sorted(within)]
    if hosts > 1:
        found.append(Placement(hosts, "network", axis(grid, 0)))
        if local > 1:
            found.append(Placement(hosts * local, "network", world))
    return world, found


@dataclass
class Spent:
    """CPU share used by each collective at its largest measured size, 0 to 1."""

    shares: dict[str, float] = field(default_factory=dict)

    def note(self, name: str, computed: float, seconds: float) -> None:
        """Remember the last of an operation's sizes and places."""
        self.shares[name] = min(1.0, max(1e-3, computed / seconds))


def collectives(
    places: list[Placement], world: Axis, clock: Clock, seconds: float, spent: Spent
) -> Iterator[Collective]:
    """Times of every operation at every place and size, alike on all ranks; `seconds` for all of them."""
    sizes = _SIZES_CUDA if clock.cuda else _SIZES
    todo = [(place, name) for place in places for name in _OPERATIONS if _is_of_level(place, name, world)]
    budget = Budget(seconds, len(todo) * len(sizes))
    for place, name in todo:
        for size in sizes:
            call, whole, times = _OPERATIONS[name](place.axis, size, clock.device)
            clock.once(call)  # the first is not counted
            _agreed(0.0, world)
            each, share = _agreed(clock.once(call), world), _agreed(budget.share(), world)
            if clock.crowded:
                taken, computed = _between_products(call, world, clock, share)
            else:
                repeats, before = how_many(share, each), time.process_time()
                taken = clock.times(call, repeats)
                computed = (time.process_time() - before) * clock.share / repeats
            spent.note(name, computed, taken)
            yield Collective(name, place.ranks, place.level, whole, taken / times)


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
            sum_scalars([0.0], world)

        sum_scalars([0.0], world)
        before = time.process_time()
        taken = clock.once(calls)
        return taken / count, (time.process_time() - before) * clock.share / count

    each = _agreed(row(2, call)[0] + row(2, lambda: None)[0], world)
    count = max(1, min(MOST, int(seconds / _ROUNDS / max(each, 1e-9))))
    rounds = [(row(count, call), row(count, lambda: None)) for _ in range(_ROUNDS)]
    with_it, without = zip(*rounds, strict=True)
    taken, computed = (
        _agreed(min(each[kind] for each in with_it) - min(each[kind] for each in without), world)
        for kind in (0, 1)
    )
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


def _is_of_level(place: Placement, name: str, world: Axis) -> bool:
    """True if the group crosses the level; consecutive ranks are on one host."""
    return name != "send" or place.axis is not world


def _agreed(seconds: float, world: Axis) -> float:
    """The mean over all ranks: one number for all."""
    return sum_scalars([seconds], world)[0] / world.size


Made = tuple[Callable[[], object], int, int]
"""A call, the bytes of its whole tensor, and how many messages one after the other it is."""


def _elements(axis: Axis, size: int) -> int:
    """Elements of fp32, a multiple of the number of ranks."""
    return max(1, size // 4 // axis.size) * axis.size


def _all_gather(axis: Axis, size: int, device: torch.device) -> Made:
    whole = torch.ones(_elements(axis, size), device=device)
    part = torch.ones(whole.numel() // axis.size, device=device)
    return lambda: start_all_gather(whole, part, axis).wait(), 4 * whole.numel(), 1


def _reduce_scatter(axis: Axis, size: int, device: torch.device) -> Made:
    whole = torch.zeros(_elements(axis, size), device=device)
    part = torch.zeros(whole.numel() // axis.size, device=device)
    return lambda: start_reduce_scatter(part, whole, axis).wait(), 4 * whole.numel(), 1


def _all_reduce(axis: Axis, size: int, device: torch.device) -> Made:
    whole = torch.zeros(_elements(axis, size), device=device)  # sums of sums stay 0
    return lambda: start_all_reduce(whole, axis).wait(), 4 * whole.numel(), 1


def _all_to_all(axis: Axis, size: int, device: torch.device) -> Made:
    sent = torch.ones(_elements(axis, size), device=device)
    received = torch.empty_like(sent)
    return lambda: start_all_to_all(received, sent, axis).wait(), 4 * sent.numel(), 1


def _shift(axis: Axis, size: int, device: torch.device) -> Made:
    sent = torch.ones(_elements(axis, size), device=device)
    received = torch.empty_like(sent)
    return lambda: start_shift(received, sent, axis).wait(), 4 * sent.numel(), 1


def _send(axis: Axis, size: int, device: torch.device) -> Made:
    """From a rank to its neighbour and back: two messages. An odd last rank looks on."""
    tensor = torch.ones(_elements(axis, size), device=device)
    peer = axis.rank ^ 1

    def there_and_back() -> None:
        if peer >= axis.size:
            return
        moves: list[Callable[[Tensor, int, Axis], Pending]] = [start_send, start_receive]
        for move in moves if axis.rank < peer else reversed(moves):
            move(tensor, peer, axis).wait()

    return there_and_back, 4 * tensor.numel(), 2


_OPERATIONS: dict[str, Callable[[Axis, int, torch.device], Made]] = {
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_reduce": _all_reduce,
    "all_to_all": _all_to_all,
    "shift": _shift,
    "send": _send,
}


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
        return start_all_reduce(message, axis).wait()

    clock.once(reduce)
    repeats = how_many(seconds / 2, _agreed(2 * clock.once(reduce), axis))
    alone, quiet = clock.times(product, repeats), clock.times(reduce, repeats)
    products: list[float] = []
    reduces: list[float] = []
    for _ in range(repeats):
        sum_scalars([0.0], axis)
        start = time.perf_counter()
        pending = start_all_reduce(message, axis)
        while not pending.is_completed():
            products.append(clock.once(product))
        reduces.append(time.perf_counter() - start)
        pending.wait()
    beside = clock.typical(products) if products else alone
    return max(1.0, beside / alone), max(1.0, clock.typical(reduces) / quiet)
