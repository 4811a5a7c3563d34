"""The verbs profile, which measures this machine, and clusters, which lists known clusters."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from meshwright.cli import output as show
from meshwright.cli.parser import JSON, Argument, Call, Flag, Verb, file_name, number, whole
from meshwright.hardware.cluster import Cluster, Measured
from meshwright.hardware.find import catalogue, cluster
from meshwright.hardware.hardware_file import check_writable, to_json
from meshwright.launch.env import nproc_of, worker
from meshwright.report.format import size
from meshwright.units import FORMATS

LEAST_SECONDS = 1.0


def profile(call: Call) -> int:
    """Launch the ranks and measure, or measure as one of them."""
    from meshwright import api

    place, seconds = worker(), call.flags["seconds"]
    out = Path(call.flags["out"]) if call.flags["out"] else None
    check_writable(out)
    if place is not None:
        measured = api.profile_worker(seconds=seconds, out=out)
        if measured is None or place.launched:
            return 0
    else:
        nproc = nproc_of(call.flags["nproc"])
        print(f"measuring with {show.count(nproc, 'rank')} for about {seconds:g} seconds", file=sys.stderr)
        measured = api.profile(nproc=nproc, seconds=seconds, out=out)
    if call.flags["json"]:
        show.as_json(to_json(measured))
        return 0
    _show_cluster(measured)
    if out is not None:
        print(f"written to {out}")
    return 0


def clusters(call: Call) -> int:
    """Print the catalogue, or one cluster of it or of a hardware file in full."""
    if call.words:
        named = cluster(call.words[0], call.flags["count"])
        show.as_json(to_json(named)) if call.flags["json"] else _show_cluster(named)
        return 0
    known = catalogue()
    if call.flags["json"]:
        show.as_json({"clusters": [to_json(entry) for entry in known.values()]})
    else:
        show.table([_row(entry) for entry in known.values()])
    return 0


def _row(known: Cluster) -> dict[str, Any]:
    device, node = known.device, known.hierarchy[0]
    beyond = known.hierarchy[1].link.bandwidth if len(known.hierarchy) > 1 else None
    return {
        "cluster": known.name,
        "bf16 TFLOP/s": _tera(device.peak.get("bf16")),
        "fp8": _tera(device.peak.get("fp8")),
        "memory GB": round(device.memory / 1e9),
        "TB/s": f"{device.bandwidth / 1e12:.2f}",
        "inside": node.kind,
        "of": node.devices if node.devices < 2**20 else "-",
        "GB/s": round(node.link.bandwidth / 1e9),
        "network GB/s": "-" if beyond is None else f"{beyond / 1e9:.3g}",
        "USD/h": "-" if known.price is None else f"{known.price:.2f}",
    }


def _tera(rate: float | None) -> str:
    return "-" if rate is None else f"{rate / 1e12:,.4g}"


def _show_cluster(shown: Cluster) -> None:
    device, rates = shown.device, shown.device.rates
    facts = {
        "cluster": f"{shown.name}: {show.count(shown.count, 'device')}",
        "device": f"{device.name}, {device.units} units, {size(device.memory)} at {_rate(device.bandwidth)}, "
        f"cache {size(device.cache)}",
        "peaks": ", ".join(
            f"{name} {device.peak[name] / 1e12:.4g}" for name in FORMATS if name in device.peak
        )
        + " TFLOP/s",
        "attained": f"{rates.matmul:.0%} in products, {rates.attention:.0%} in attention, "
        f"{rates.memory:.0%} of memory, {rates.link:.0%} of links; {rates.launch * 1e6:.3g} us a launch",
        "price": None if shown.price is None else f"{shown.price:.2f} USD for a device and hour",
        "source": shown.source,
    }
    show.pairs(facts)
    print()
    show.table([_level_row(level) for level in shown.levels])
    if shown.measured is not None:
        print()
        _show_measured(shown.measured)


def _level_row(level: Any) -> dict[str, Any]:
    return {
        "level": level.name,
        "devices": level.devices,
        "kind": level.kind,
        "latency us": f"{level.link.latency * 1e6:.3g}",
        "bandwidth": _rate(level.link.bandwidth),
        "oversubscription": f"{level.oversubscription:g}",
    }


def _rate(bandwidth: float) -> str:
    return f"{bandwidth / 1e9:,.4g} GB/s"


def _show_measured(measured: Measured) -> None:
    show.pairs(
        {
            "ranks": f"{measured.ranks} at once on each host",
            "products": f"{len(measured.matmul)} shapes, {len(measured.matmul_alone)} by one rank alone",
            "attention": f"{len(measured.attention)} shapes, forward and backward",
            "collectives": f"{len(measured.collectives)} points",
            "elementwise": _rate(measured.memory_bandwidth or 0.0) + " on each rank",
            "copy": _rate(measured.copy_bandwidth or 0.0),
            "optimiser": _rate(measured.optimiser_bandwidth or 0.0),
            "products_beside_a_collective": _times(measured.overlap_compute),
            "a_collective_beside_products": _times(measured.overlap_collective),
            "computing_of_collectives": ", ".join(
                f"{name} {share:.0%}" for name, share in measured.collective_compute.items()
            )
            or None,
            **measured.taken,
        }
    )
    print()
    show.table(_product_rows(measured))
    if measured.collectives:
        print()
        show.table(_collective_rows(measured))


def _times(slower: float | None) -> str | None:
    return None if slower is None else f"{slower:.2f} times as long"


def _product_rows(measured: Measured) -> list[dict[str, Any]]:
    """Return rows with the slowest, the median and the fastest product of each format."""
    rows = []
    for name in sorted({point.format for point in measured.matmul}):
        ranked = sorted((2 * p.m * p.n * p.k / p.seconds, p) for p in measured.matmul if p.format == name)
        for said, at in (("slowest", 0), ("median", len(ranked) // 2), ("fastest", -1)):
            rate, point = ranked[at]
            shape = f"({point.m}, {point.k}) x ({point.k}, {point.n})"
            rows.append(
                {"format": name, "product": said, "shape": shape, "GFLOP/s a rank": round(rate / 1e9, 1)}
            )
    return rows


def _collective_rows(measured: Measured) -> list[dict[str, Any]]:
    """Return a row for each operation, number of ranks and level: its smallest and largest message."""
    rows = []
    for name, ranks, level in dict.fromkeys((p.operation, p.ranks, p.level) for p in measured.collectives):
        points = sorted(
            (p.bytes, p.seconds)
            for p in measured.collectives
            if (p.operation, p.ranks, p.level) == (name, ranks, level)
        )
        (_, least), (largest, most) = points[0], points[-1]
        rows.append(
            {
                "collective": name,
                "ranks": ranks,
                "level": level,
                "least us": round(least * 1e6, 1),
                "bytes": size(largest),
                "ms": round(most * 1e3, 2),
                "rate": _rate(largest / most),
            }
        )
    return rows


VERBS = (
    Verb(
        "profile",
        "measure this machine: products, attention, memory, collectives; write a hardware file",
        profile,
        (),
        (
            Flag("out", "hardware file to write", "FILE.json", file_name(".json")),
            Flag("nproc", "processes: a number, or 'auto' for GPUs or cores", "N|auto", str, default="auto"),
            Flag("seconds", "about how long to measure", "S", number(LEAST_SECONDS, 3600), default=120.0),
            JSON,
        ),
    ),
    Verb(
        "clusters",
        "list the known clusters, or show one of them or a hardware file in full",
        clusters,
        (Argument("NAME", "a cluster of the list, or a hardware file (JSON)", required=False),),
        (
            Flag("count", "number of devices; default one node, or the number in the file", "N", whole(1)),
            JSON,
        ),
    ),
)
