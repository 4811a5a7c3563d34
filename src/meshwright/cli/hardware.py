"""The verbs profile, which measures this machine, and clusters, which lists known clusters."""

from __future__ import annotations

import sys
from collections import defaultdict
from typing import Any

from meshwright import api
from meshwright.api.options import whole
from meshwright.api.planning import profile_worker
from meshwright.cli import output as show
from meshwright.cli.parser import JSON, Argument, Call, Flag, verb
from meshwright.hardware.cluster import Cluster, ProfiledTimes
from meshwright.hardware.find import catalogue, cluster
from meshwright.hardware.hardware_file import check_writable, to_json
from meshwright.rank.env import nproc_of, worker
from meshwright.report.format import size
from meshwright.units import FORMATS


@verb(
    "profile",
    Flag("nproc", "processes: a number, or 'auto' for GPUs or cores", "N|auto", str, default="auto"),
    api.profile,
    JSON,
)
def profile(call: Call) -> None:
    """Launch the ranks and measure, or measure as one of them."""
    place, seconds, out = worker(), call.flags["seconds"], call.flags["out"]
    check_writable(out)
    if place is not None:
        measured = profile_worker(seconds=seconds, out=out)
        if measured is None:
            return
    else:
        nproc = nproc_of(call.flags["nproc"])
        print(f"measuring with {show.count(nproc, 'rank')} for about {seconds:g} seconds", file=sys.stderr)
        measured = api.profile(nproc=nproc, seconds=seconds, out=out)
    show.result(call, to_json(measured), lambda _: _show_cluster(measured))
    if out is not None and not call.json:
        print(f"written to {out}")


@verb(
    "clusters",
    Argument("NAME", "a cluster of the list, or a hardware file (JSON)", required=False),
    Flag("count", "number of devices; default one node, or the number in the file", "N", whole(1)),
    JSON,
)
def clusters(call: Call) -> None:
    """Print the catalogue, or one cluster of it or of a hardware file in full."""
    if call.words:
        named = cluster(call.words[0], call.flags["count"])
        show.result(call, to_json(named), lambda _: _show_cluster(named))
        return
    known = catalogue().values()
    trees = {"clusters": [to_json(entry) for entry in known]}
    show.result(call, trees, lambda _: show.table([_row(entry) for entry in known]))


def _text(form: str, value: float | None, unit: float = 1.0) -> str | None:
    """Return a figure in `unit`s by a format such as '{:.2f}'; None if it is not known."""
    return None if value is None else form.format(value / unit)


def _row(known: Cluster) -> dict[str, Any]:
    device, node = known.device, known.hierarchy[0]
    beyond = known.hierarchy[1].link.bandwidth if len(known.hierarchy) > 1 else None
    return {
        "cluster": known.name,
        "bf16 TFLOP/s": _text("{:,.4g}", device.peak.get("bf16"), 1e12),
        "fp8": _text("{:,.4g}", device.peak.get("fp8"), 1e12),
        "memory GB": round(device.memory / 1e9),
        "TB/s": _text("{:.2f}", device.bandwidth, 1e12),
        "inside": node.kind,
        "of": node.devices if node.devices < 2**20 else None,
        "GB/s": round(node.link.bandwidth / 1e9),
        "network GB/s": _text("{:.3g}", beyond, 1e9),
        "USD/h": _text("{:.2f}", known.price),
    }


def _show_cluster(shown: Cluster) -> None:
    device, rates = shown.device, shown.device.rates
    usual = next(name for name in ("bf16", *device.peak) if name in device.peak)
    peaks = [f"{name} {device.peak[name] / 1e12:.4g}" for name in FORMATS if name in device.peak]
    facts = {
        "cluster": f"{shown.name}: {show.count(shown.count, 'device')}",
        "device": f"{device.name}, {device.units} units, {size(device.memory)} at {_rate(device.bandwidth)}, "
        f"cache {size(device.cache)}",
        "peaks": ", ".join(peaks) + " TFLOP/s",
        "attained": f"{device.attained(usual):.0%} in products, "
        f"{rates.attention * device.clock(usual):.0%} in attention, "
        f"{rates.memory:.0%} of memory, {rates.link:.0%} of links; {rates.launch * 1e6:.3g} us a launch",
        "price": _text("{:.2f} USD for a device and hour", shown.price),
        "source": shown.source,
    }
    show.pairs(facts)
    print()
    show.table(
        [
            {
                "level": level.name,
                "devices": level.devices,
                "kind": level.kind,
                "latency us": f"{level.link.latency * 1e6:.3g}",
                "bandwidth": _rate(level.link.bandwidth),
                "oversubscription": f"{level.oversubscription:g}",
            }
            for level in shown.levels
        ]
    )
    if shown.measured is not None:
        _show_measured(shown.measured)


def _rate(bandwidth: float | None) -> str:
    return f"{(bandwidth or 0.0) / 1e9:,.4g} GB/s"


def _show_measured(measured: ProfiledTimes) -> None:
    computing = [f"{name} {share:.0%}" for name, share in measured.collective_compute.items()]
    facts = {
        "ranks": f"{measured.ranks} at once on each host",
        "products": f"{len(measured.matmul)} shapes, {len(measured.matmul_alone)} by one rank alone",
        "attention": f"{len(measured.attention)} shapes, forward and backward",
        "collectives": f"{len(measured.collectives)} points",
        "elementwise": _rate(measured.memory_bandwidth) + " on each rank",
        "copy": _rate(measured.copy_bandwidth),
        "optimiser": _rate(measured.optimiser_bandwidth),
        "products_beside_a_collective": _text("{:.2f} times as long", measured.overlap_compute),
        "a_collective_beside_products": _text("{:.2f} times as long", measured.overlap_collective),
        "computing_of_collectives": ", ".join(computing) or None,
        **measured.taken,
    }
    print()
    show.pairs(facts)
    print()
    show.table(_product_rows(measured))
    if measured.collectives:
        print()
        show.table(_collective_rows(measured))


def _product_rows(measured: ProfiledTimes) -> list[dict[str, Any]]:
    """Return rows with the slowest, the median and the fastest product of each format."""
    rows = []
    for name in sorted({point.format for point in measured.matmul}):
        ranked = sorted((2 * p.m * p.n * p.k / p.seconds, p) for p in measured.matmul if p.format == name)
        for place, index in (("slowest", 0), ("median", len(ranked) // 2), ("fastest", -1)):
            rate, point = ranked[index]
            shape = f"({point.m}, {point.k}) x ({point.k}, {point.n})"
            row = {"format": name, "product": place, "shape": shape}
            rows.append({**row, "GFLOP/s a rank": round(rate / 1e9, 1)})
    return rows


def _collective_rows(measured: ProfiledTimes) -> list[dict[str, Any]]:
    """Return a row for each operation, number of ranks and level: its smallest and largest message."""
    groups = defaultdict(list)
    for point in measured.collectives:
        groups[point.operation, point.ranks, point.level].append((point.bytes, point.seconds))
    rows = []
    for (name, ranks, level), points in groups.items():
        (_, least), (largest, most) = min(points), max(points)
        row = {"collective": name, "ranks": ranks, "level": level, "least us": round(least * 1e6, 1)}
        rows.append(
            {**row, "bytes": size(largest), "ms": round(most * 1e3, 2), "rate": _rate(largest / most)}
        )
    return rows
