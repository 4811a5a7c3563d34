"""A quick profile of this machine on two real processes: what it measures is whole, and can be so."""

from __future__ import annotations

from math import prod
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from meshwright import api
from meshwright.comm.mesh import Mesh
from meshwright.hardware.cluster import Cluster, Collective
from meshwright.hardware.find import cluster
from meshwright.hardware.measurements import attention_seconds, collective_seconds, matmul_seconds
from meshwright.profile import clock, links
from meshwright.profile.clock import Clock
from meshwright.profile.compute import attention_shapes, product_shapes
from meshwright.profile.links import collective_times, never_less, placements
from meshwright.spec import Layout, UserError
from ranks import Ranks


@pytest.fixture(scope="module")
def profiled(tmp_path_factory: pytest.TempPathFactory) -> Cluster:
    file = tmp_path_factory.mktemp("profile") / "hardware.json"
    found = api.profile(nproc=2, seconds=1, out=file)
    assert cluster(str(file)) == found
    return found


def test_two_ranks_of_a_host_are_a_cluster(profiled: Cluster) -> None:
    assert profiled.count == profiled.sharing == 2 and [each.name for each in profiled.levels] == ["host"]
    assert profiled.levels[0].kind == "memory"
    device, measured = profiled.device, profiled.measured
    assert device.kind == "cpu" and device.peak.keys() == {"fp32", "bf16"}
    assert all(1e9 < rate < 1e15 for rate in device.peak.values())
    assert 1e8 < device.bandwidth < 1e13 and device.memory > 2**28
    assert measured is not None and measured.ranks == 2
    assert measured.taken.keys() >= {"date", "torch", "processor", "cores"}
    assert 0 < device.rates.matmul <= 1 and 0 < device.rates.attention <= 1
    assert measured.launch is not None and 1e-8 < measured.launch < 1e-2
    assert measured.overlap_compute is not None and measured.overlap_compute >= 1


def test_every_kind_of_thing_is_measured(profiled: Cluster) -> None:
    measured = profiled.measured
    assert measured is not None
    for points in (measured.matmul, measured.matmul_alone, measured.attention):
        assert {point.format for point in points} == {"fp32", "bf16"}
    assert {(p.operation, p.ranks, p.level) for p in measured.collectives} == {
        (name, 2, "host")
        for name in ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "shift", "send")
    }
    # No product is faster than the peak, which both ranks share.
    for point in measured.matmul:
        assert 2 * prod(point[1:4]) / point.seconds <= profiled.device.peak[point.format] / 2 * 1.0001


def test_collectives_tell_what_they_compute(profiled: Cluster) -> None:
    measured = profiled.measured
    assert measured is not None
    assert measured.collective_compute.keys() == {point.operation for point in measured.collectives}
    assert all(0 < share <= 1 for share in measured.collective_compute.values())


@pytest.mark.parametrize("cuda", [False, True])
def test_a_machine_that_seems_slow_is_measured_over_a_range_too(cuda: bool) -> None:
    """The probe of a busy machine allows hardly any shape."""
    work = [prod(shape) for shape in product_shapes(1.0, cuda)]
    assert max(work) > 100 * min(work)
    assert len({shape[-1] for shape in attention_shapes(1.0, cuda)}) > 1
    assert len(product_shapes(1e13, cuda)) > len(work)


class Processor:
    """Stands for the module `time`: calls take its time, and the time of others passes meanwhile."""

    def __init__(self) -> None:
        self.own = self.others = 0.0

    def compute(self) -> None:
        self.own += 0.001

    def wait(self) -> None:
        self.others += 0.02

    def process_time(self) -> float:
        return self.own

    def perf_counter(self) -> float:
        return self.own + self.others


@pytest.fixture
def processor(monkeypatch: pytest.MonkeyPatch) -> Processor:
    found = Processor()
    monkeypatch.setattr(clock, "time", found)
    return found


def test_what_others_take_of_a_shared_core_does_not_count(processor: Processor) -> None:
    own, shared = (Clock(torch.device("cpu"), share) for share in (1.0, 2.0))
    assert own.during(processor.wait, 0.05) == pytest.approx(0.02)
    assert shared.during(processor.wait, 0.05) == shared.alone().during(processor.wait, 0.05) == 0


def test_a_shared_core_counts_once_for_each_rank(processor: Processor) -> None:
    shared = Clock(torch.device("cpu"), 2.0)
    assert shared.during(processor.compute, 0.2) == pytest.approx(0.002)
    assert shared.alone().during(processor.compute, 0.2) == pytest.approx(0.001)


def test_more_work_takes_longer(profiled: Cluster) -> None:
    measured = profiled.measured
    assert measured is not None
    for name in ("fp32", "bf16"):
        ranked = sorted((p for p in measured.matmul if p.format == name), key=lambda p: prod(p[1:4]))
        least, most = ranked[0], ranked[-1]
        assert prod(most[1:4]) > 50 * prod(least[1:4]) and most.seconds > least.seconds
    sends = sorted((p.bytes, p.seconds) for p in measured.collectives if p.operation == "all_gather")
    assert sends[-1][0] > 1000 * sends[0][0] and sends[-1][1] > 2 * sends[0][1]


def test_the_planner_reads_the_tables(profiled: Cluster) -> None:
    measured = profiled.measured
    assert measured is not None
    small, large = (matmul_seconds(measured, "fp32", m, 256, 256) for m in (64, 65536))
    assert small is not None and large is not None and 0 < small < large
    short, long = (attention_seconds(measured, "bf16", 1, 8, 8, 64, t) for t in (128, 8192))
    assert short is not None and long is not None and 0 < short[0] < long[0] and short[1] < long[1]
    assert (collective_seconds(measured, "all_reduce", 2, "host", 2**26) or 0) > 1e-4


def groups_of(_mesh: Mesh, hosts: int, local: int) -> list[tuple[int, str, list[int]]]:
    _, places = placements(hosts, local, torch.device("cpu"))
    return [(each.ranks, each.level, dist.get_process_group_ranks(each.axis.group)) for each in places]


def test_groups_stay_on_a_host_or_cross_all(ranks: Ranks) -> None:
    found = ranks.run(Layout(dp=8), groups_of, 2, 4)
    for rank, places in enumerate(found):
        assert [place[:2] for place in places] == [(2, "host"), (4, "host"), (2, "network"), (8, "network")]
        assert all(rank in members and len(members) == size for size, _, members in places)
        pair, host, across, whole = (members for _, _, members in places)
        assert {each // 4 for each in (*pair, *host)} == {rank // 4}
        assert across == [rank % 4, rank % 4 + 4] and whole == list(range(8))


def times_of(_mesh: Mesh) -> tuple[list[Collective], dict[str, float]]:
    """Times of three sizes within hosts of two ranks, as where both share a core, wherever this runs."""
    world, places = placements(4, 2, torch.device("cpu"))
    shares, within = dict[str, float](), [each for each in places if each.level == "host"]
    with patch.object(links, "_SIZES", links._SIZES[::3]):
        found = list(collective_times(within, world, Clock(torch.device("cpu"), 2.0), 1.0, shares))
    return found, shares


def test_collectives_are_timed_between_products_where_ranks_share_cores(ranks: Ranks) -> None:
    for found, shares in ranks.run(Layout(dp=8), times_of):
        assert {point.ranks for point in found} == {2} and len(found) == 6 * 3
        assert all(0 < point.seconds < 10 for point in found)
        assert len(shares) == 6 and all(0 < share <= 1 for share in shares.values())
        large = {(p.operation, p.ranks): p.seconds for p in found if p.bytes > 2**23}
        small = {(p.operation, p.ranks): p.seconds for p in found if p.bytes < 2**13}
        assert sum(large.values()) > 2 * sum(small.values())  # 16 MiB take longer than 1 KiB


def test_more_bytes_never_take_less() -> None:
    times = [3.0, 1.0, 2.0, 5.0, 4.0, 9.0]
    points = [Collective("send", 2, "host", 2**n, seconds) for n, seconds in enumerate(times)]
    smooth = [point.seconds for point in never_less(points)]
    assert smooth == [2.0, 2.0, 2.0, 4.5, 4.5, 9.0]


def test_one_process_alone_is_profiled_too() -> None:
    found = api.profile(nproc=1, seconds=1)
    assert found.count == 1 and found.measured is not None
    assert found.measured.matmul and not found.measured.collectives and not found.measured.matmul_alone
    assert found.level_of([0]).link.bandwidth > 1e6


def test_a_file_that_cannot_be_written_is_refused_before_anything_runs(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"--out: .*no/hw\.json cannot be written"):
        api.profile(nproc=2, out=tmp_path / "no" / "hw.json")
    with pytest.raises(UserError, match="is a folder"):
        api.profile(nproc=2, out=tmp_path)
