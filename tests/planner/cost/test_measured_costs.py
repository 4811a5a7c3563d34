"""Costs from what was measured, and of ranks that share a host's cores."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from math import prod
from typing import Any

import pytest

from meshwright.hardware.cluster import (
    AttentionTime,
    Cluster,
    Collective,
    Device,
    Level,
    Link,
    Matmul,
    ProfiledTimes,
)
from meshwright.hardware.find import cluster
from meshwright.planner.cost.collectives import CollectiveCosts
from meshwright.planner.cost.kernels import KernelCosts
from meshwright.planner.cost.model import CostModel
from meshwright.planner.cost.shared_cores import SharedCores, makespan, shared_cores
from meshwright.planner.cost.software import MESHWRIGHT, MESHWRIGHT_ON_CPU
from meshwright.planner.cost.step import step_time
from meshwright.planner.group_shapes import GroupShape
from meshwright.schedule import StageCost, schedule_of, simulate
from meshwright.spec import Layout, RunSpec

RATE, ATTENTION, MEMORY, GBIT = 50e9, 10e9, 5e9, 125e6
OPERATIONS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "shift", "send")


def profiled(hosts: int = 1, local: int = 4, cores: int = 2, alone: float = 2.0) -> Cluster:
    """The measurements of a machine whose products run at RATE, and whose hosts are joined by 1 Gb/s."""
    shapes = list(product((64, 512, 2048), (64, 512, 2048), (64, 512)))
    products = tuple(Matmul("fp32", m, n, k, 2 * m * n * k / RATE) for m, n, k in shapes)
    attention = tuple(
        AttentionTime("fp32", batch, 8, 4, 64, length, flops / ATTENTION, 2.5 * flops / ATTENTION)
        for batch, length in product((1, 8), (64, 512))
        for flops in [2 * batch * 8 * length**2 * 64]
    )
    measured = ProfiledTimes(
        products,
        attention,
        tuple(_collectives(hosts, local)),
        tuple(each._replace(seconds=each.seconds / alone) for each in products),
        memory_bandwidth=MEMORY,
        copy_bandwidth=MEMORY,
        optimiser_bandwidth=MEMORY,
        launch=5e-6,
        overlap_compute=2.0,
        overlap_collective=2.0,
        ranks=local,
    )
    device = Device("processor", {"fp32": RATE * local}, 2**35, MEMORY * local, 2**25, cores, "", kind="cpu")
    levels = [Level("host", local, Link(1e-4, 1e9), kind="memory")]
    if hosts > 1:
        levels.append(Level("network", hosts * local, Link(3e-4, GBIT), kind="ethernet"))
    return Cluster("here", device, hosts * local, tuple(levels), None, "", measured, sharing=local)


def _collectives(hosts: int, local: int) -> list[Collective]:
    places = [(n, "host", 1e9, 1e-4) for n in (2, 4) if n <= local]
    if hosts > 1:
        places += [(n, "network", GBIT / local, 1e-3) for n in (hosts, hosts * local)]
    return [
        Collective(name, ranks, level, size, latency + size / rate)
        for name, (ranks, level, rate, latency), size in product(OPERATIONS, places, (2**10, 2**17, 2**24))
    ]


def run(layout: dict[str, Any], **train: int) -> RunSpec:
    return RunSpec.model_validate(
        {
            "model": {"preset": "small"},
            "data": {"seq_len": 128},
            "train": {"batch_tokens": 8 * 128, **train},
            "layout": layout,
        }
    )


def seconds(on: Cluster, layout: dict[str, Any]) -> float:
    return step_time(run(layout), CostModel(on)).seconds


def test_measured_products_and_messages_are_taken_where_they_are() -> None:
    found = profiled()
    kernels = KernelCosts(found.device, measured=found.measured)
    assert kernels.matmul("fp32", 512, 512, 512) == pytest.approx(2 * 512**3 / RATE)
    assert kernels.matmul("fp32", 512, 512, 512, batch=3) == pytest.approx(6 * 512**3 / RATE)
    assert kernels.moved(MEMORY) == pytest.approx(1.0)
    links = CollectiveCosts(found)
    for name in OPERATIONS[:5]:
        assert links.collective(name, 2**24, GroupShape(4, 1)) == pytest.approx(1e-4 + 2**24 / 1e9)
    assert links.to_next("send", 2**17, GroupShape(2, 1)) == pytest.approx(1e-4 + 2**17 / 1e9)


def test_what_was_not_measured_is_computed() -> None:
    found = profiled()
    bare, known = KernelCosts(found.device), KernelCosts(found.device, measured=found.measured)
    assert known.matmul("bf16", 512, 512, 512) == bare.matmul("bf16", 512, 512, 512)
    assert found.measured is not None
    without = replace(found, measured=replace(found.measured, collectives=()))
    assert CollectiveCosts(without).collective("all_reduce", 2**20, GroupShape(4, 1)) == CollectiveCosts(
        replace(found, measured=None)
    ).collective("all_reduce", 2**20, GroupShape(4, 1))


def test_a_stack_is_that_of_the_device() -> None:
    assert CostModel(profiled()).stack is MESHWRIGHT_ON_CPU
    assert CostModel(cluster("h100")).stack is MESHWRIGHT


@pytest.mark.parametrize(
    "layout", [{"dp": 4}, {"tp": 4}, {"pp": 4}, {"tp": 2, "pp": 2}, {"cp": 4, "zero": 3}]
)
def test_parts_add_up_on_a_measured_machine(layout: dict[str, Any]) -> None:
    found = step_time(run(layout), CostModel(profiled()))
    assert sum(found.parts.values()) == pytest.approx(found.seconds)
    assert min(found.parts.values()) >= 0


def test_slower_measurements_make_slower_steps() -> None:
    here, layout = profiled(), {"dp": 2, "tp": 2, "zero": 1}
    assert here.measured is not None
    slow = tuple(each._replace(seconds=3 * each.seconds) for each in here.measured.collectives)
    other = replace(here, measured=replace(here.measured, collectives=slow))
    messages = sum(
        step_time(run(layout), CostModel(here)).parts[axis] for axis in ("tensor axis", "data axis")
    )
    assert seconds(other, layout) > seconds(here, layout) + messages


@pytest.mark.parametrize(("ranks", "cores"), [(4, 2), (4, 1), (2, 2), (8, 2), (2, 4)])
def test_fewer_ranks_are_each_faster_and_together_no_faster_than_the_cores(ranks: int, cores: int) -> None:
    shared = SharedCores(ranks, cores, alone=ranks / min(cores, ranks))
    speeds = [shared.speed(active) for active in range(1, ranks + 1)]
    assert speeds == sorted(speeds, reverse=True)
    assert speeds[-1] == 1.0
    for active, speed in enumerate(speeds, start=1):
        assert speed * active <= ranks * (1 + 1e-9)


def test_what_a_rank_gains_alone_is_measured() -> None:
    assert shared_cores(cluster("h100")) is None
    assert shared_cores(profiled(alone=1.5)) == SharedCores(4, 2, 1.5)
    assert shared_cores(replace(profiled(), measured=None)) == SharedCores(4, 2, 2.0)


@pytest.mark.parametrize("name", ["1f1b", "gpipe", "zb-h1", "interleaved", "zb-v", "dualpipe-v"])
@pytest.mark.parametrize("cores", [1, 2, 3])
def test_shared_cores_are_between_their_bounds(name: str, cores: int) -> None:
    schedule = schedule_of(Layout.model_validate({"pp": 4, "schedule": name}), 8)
    costs = [StageCost(1.0 + 0.1 * i, 1.2, 0.8) for i in range(schedule.stages)]
    finals = [0.5] * 4
    shared = SharedCores(4, cores, alone=4 / cores)
    found = makespan(schedule, costs, finals, shared)
    crowded = simulate(schedule, costs, final=finals).makespan  # as if all always computed
    quick = [StageCost(*(value * cores / 4 for value in (c.forward, c.input, c.weight))) for c in costs]
    alone = simulate(schedule, quick, final=[each * cores / 4 for each in finals]).makespan
    work = sum(finals) + 8 * sum(c.forward + c.input + c.weight for c in costs)
    assert max(alone, work / 4) <= found + 1e-9
    assert found <= crowded + 1e-9


def test_one_core_wastes_nothing() -> None:
    schedule = schedule_of(Layout.model_validate({"pp": 4}), 2)
    costs, finals = [StageCost(1.0, 1.0, 1.0)] * 4, [0.5] * 4
    found = makespan(schedule, costs, finals, SharedCores(4, 1, 4.0))
    assert found == pytest.approx((2 * 4 * 3.0 + 4 * 0.5) / 4)


def test_stages_on_hosts_of_their_own_do_not_share() -> None:
    schedule = schedule_of(Layout.model_validate({"pp": 2}), 4)
    costs, finals = [StageCost(1.0, 1.0, 1.0)] * 2, [0.5, 0.25]
    found = makespan(schedule, costs, finals, SharedCores(2, 1, 2.0, stride=2))
    assert found == pytest.approx(simulate(schedule, costs, final=finals).makespan)


def test_a_bubble_costs_less_where_cores_are_shared() -> None:
    """With one microbatch only one stage computes at a time, and has all cores that stages share."""
    one = {"pp": 4, "micro_batch": 8}
    shared, apart = profiled(), replace(profiled(), sharing=1)
    assert seconds(shared, one) < 0.7 * seconds(apart, one)
    assert seconds(shared, {"dp": 4}) == pytest.approx(seconds(apart, {"dp": 4}))


def test_a_slow_link_keeps_tensor_ranks_inside_a_host() -> None:
    """The best of all layouts has no tensor ranks on two hosts, whatever schedule or stage it has."""
    two, best = CostModel(profiled(hosts=2, local=2, cores=1)), {}
    for sizes in product((1, 2, 4), repeat=4):
        shape = dict(zip(("dp", "cp", "tp", "pp"), sizes, strict=True))
        if prod(sizes) != 4:
            continue
        for sharded, zero, schedule in product((True, False), (0, 1, 3), ("1f1b", "zb-h1")):
            spec = run({**shape, "sequence_parallel": sharded, "zero": zero, "schedule": schedule})
            found = step_time(spec, two).seconds
            best[shape["tp"]] = min(found, best.get(shape["tp"], found))
    assert min(best, key=lambda tp: best[tp]) <= 2
    assert best[4] > 1.5 * min(best.values())
    one = profiled()
    assert seconds(one, {"tp": 4}) < 1.3 * seconds(one, {"tp": 2, "pp": 2})  # on one host they are alike


def test_what_hides_beside_compute_is_less_where_it_slows_down() -> None:
    here, layout = profiled(), {"dp": 4, "zero": 1}
    assert here.measured is not None
    free = replace(
        here,
        measured=replace(
            here.measured, overlap_collective=1.0, collective_compute=dict.fromkeys(OPERATIONS, 0.1)
        ),
    )
    slow = replace(free, measured=replace(free.measured, overlap_collective=8.0))
    busy = replace(free, measured=replace(free.measured, collective_compute={}))
    assert seconds(free, layout) < seconds(slow, layout)
    assert seconds(free, layout) < seconds(busy, layout)
