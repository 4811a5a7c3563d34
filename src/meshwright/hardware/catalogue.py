"""Clusters that are known by name, with figures of datasheets: dense peaks, GiB of memory, GB/s.

What no datasheet says is a round assumption, named here once. Latencies: 3 us through NVLink's switches, 5 us
over PCIe, and of a network 8 us within a leaf and 3 us more through a spine. A leaf switch, or a set of
rails, joins 256 devices, 8 racks of 72, and the spine carries all that they can send (oversubscription 1).
Blackwell's multiprocessors and cache are those that CUDA reports. Prices are typical on-demand list prices of
clouds in 2025, rounded; None where there was no public one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from meshwright.hardware.cluster import Cluster, Device, Kind, Level, Link, Network, Rates
from meshwright.hardware.peak_rates import rates_of

_GB, _MB, _T, _G = 2**30, 2**20, 1e12, 1e9
_GIGABIT = 1e9 / 8
_LEAF, _MOST = 256, 2**20
_LATENCY: dict[str, float] = {"nvlink": 3e-6, "infinity": 3e-6, "pcie": 5e-6}
_AT_LEAF, _AT_SPINE = 8e-6, 11e-6


def _peaks(bf16: float, **others: float) -> Mapping[str, float]:
    """TFLOP/s to FLOP/s; fp16 is as fast as bf16 on all of these."""
    return {name: rate * _T for name, rate in {"bf16": bf16, "fp16": bf16, **others}.items()}


def _node(
    name: str,
    device: Device,
    gbytes: float,
    nics: int,
    gigabits: float,
    price: float | None,
    kind: Kind = "nvlink",
    per_node: int = 8,
    leaf: int = _LEAF,
    node: str = "node",
    network: Kind = "infiniband",
    source: str = "",
) -> Cluster:
    """Nodes of `per_node` devices that send `gbytes` GB/s each, and `nics` NICs of `gigabits` Gbit/s."""
    out = nics * gigabits * _GIGABIT / per_node
    inside = Level(node, per_node, Link(_LATENCY[kind], gbytes * _G), kind=kind)
    outside = (
        Level("leaf", leaf, Link(_AT_LEAF, out), kind=network),
        Level("spine", _MOST, Link(_AT_SPINE, out), kind=network),
    )
    paid = "typical list price of clouds, 2025, rounded" if price else "none known"
    source = f"{source or device.source}; price: {paid}"
    device = replace(device, rates=rates_of(device.name))
    made = Cluster(
        name, device, _MOST, (inside, *outside), price, source, network=Network(nics, gigabits * _GIGABIT)
    )
    return made.resized(per_node)


def _a100(name: str, memory: int, gbytes: float, power: float) -> Device:
    return Device(
        name,
        _peaks(312, fp64=19.5, fp32=19.5, tf32=156),
        memory * _GB,
        gbytes * _G,
        40 * _MB,
        108,
        "NVIDIA A100 Tensor Core GPU datasheet, 2021",
        power=power,
    )


_HOPPER = _peaks(989.4, fp64=66.9, fp32=66.9, tf32=494.7, fp8=1978.9)


def _hopper(
    name: str,
    memory: int,
    gbytes: float,
    source: str,
    peak: Mapping[str, float] = _HOPPER,
    power: float = 700,
) -> Device:
    units = 132 if peak["bf16"] > 900e12 else 114
    return Device(name, peak, memory * _GB, gbytes * _G, 50 * _MB, units, source, power=power)


def _blackwell(
    name: str, peak: Mapping[str, float], memory: int, units: int, power: float, source: str
) -> Device:
    return Device(name, peak, memory * _GB, 8000 * _G, 126 * _MB, units, source, power=power)


_H100_SHEET = "NVIDIA H100 Tensor Core GPU datasheet, 2023, and architecture whitepaper, 2022"
_B200 = _peaks(2250, fp64=37, fp32=75, tf32=1125, fp8=4500, fp4=9000)
_B300 = _peaks(2250, fp64=1.25, fp32=75, tf32=1125, fp8=4500, fp4=13125)
_GB200 = _peaks(2500, fp64=40, fp32=80, tf32=1250, fp8=5000, fp4=10000)
_GB300 = _peaks(2500, fp64=1.4, fp32=80, tf32=1250, fp8=5000, fp4=15000)


def _hoppers() -> tuple[Cluster, ...]:
    """Nodes of 8 behind NVLink, up to 2024, and superchips."""
    little = {**_HOPPER, "fp64": 1 * _T}
    h800 = (
        "H100 datasheet, 2023, with NVLink of 400 GB/s both ways and little fp64, as widely reported; 2 USD "
        "an hour as in DeepSeek-AI 2024 (V3, table 1)"
    )
    hbm2e = (
        "torchtitan's benchmarks of December 2024 (96 GB HBM2e, 2.4 TB/s, limited to 500 W); peaks of the "
        "H100 SXM at 700 W, which that limit keeps it from"
    )
    h200 = _hopper("H200 SXM 141 GB", 141, 4800, "NVIDIA H200 Tensor Core GPU datasheet, 2024")
    gh200 = _hopper("GH200 96 GB", 96, 4000, "NVIDIA GH200 Grace Hopper Superchip datasheet, 2023")
    return (
        _node("a100-40-sxm", _a100("A100 SXM 40 GB", 40, 1555, 400), 300, 8, 200, 1.3),
        _node("a100-80-sxm", _a100("A100 SXM 80 GB", 80, 2039, 400), 300, 8, 200, 1.8),
        _node("h100-sxm", _hopper("H100 SXM 80 GB", 80, 3350, _H100_SHEET), 450, 8, 400, 3.0),
        _node("h100-96", _hopper("H100 SXM 96 GB HBM2e", 96, 2400, hbm2e, power=500), 450, 8, 400, None),
        _node("h800", _hopper("H800 SXM 80 GB", 80, 3350, h800, little), 200, 8, 400, 2.0),
        _node("h200", h200, 450, 8, 400, 3.5),
        _node("gh200", gh200, 450, 1, 400, 1.5, per_node=1, node="module"),
    )


def _blackwells() -> tuple[Cluster, ...]:
    """Nodes of 8 and racks of 72 behind NVLink."""
    dense = "(dense: half of what is said with sparsity)"
    apart = "(dense: half of what is said with sparsity, but fp4)"
    sheets = (
        f"NVIDIA DGX B200 datasheet, 2024 {dense}",
        f"NVIDIA HGX B300 specifications, 2025 {apart}",
        f"NVIDIA GB200 NVL72 datasheet, 2024 {dense}",
        f"NVIDIA GB300 NVL72 datasheet, 2025 {apart}",
    )
    b200 = _blackwell("B200 180 GB", _B200, 180, 148, 1000, sheets[0])
    b300 = _blackwell("B300 288 GB", _B300, 288, 148, 1100, sheets[1])
    gb200 = _blackwell("GB200 186 GB", _GB200, 186, 148, 1200, sheets[2])
    gb300 = _blackwell("GB300 279 GB", _GB300, 279, 148, 1400, sheets[3])
    return (
        _node("b200", b200, 900, 8, 400, 5.0),
        _node("b300", b300, 900, 8, 800, None),
        _node("gb200-nvl72", gb200, 900, 72, 400, 10.5, per_node=72, leaf=576, node="rack"),
        _node("gb300-nvl72", gb300, 900, 72, 800, None, per_node=72, leaf=576, node="rack"),
    )


def _instincts() -> tuple[Cluster, ...]:
    """Nodes of 8, each joined to each of the other 7."""
    mi300x = Device(
        "MI300X",
        _peaks(1307.4, fp64=163.4, fp32=163.4, tf32=653.7, fp8=2614.9),
        192 * _GB,
        5300 * _G,
        256 * _MB,
        304,
        "AMD Instinct MI300X accelerator datasheet, 2023",
        kind="rocm",
        power=750,
    )
    return (_node("mi300x", mi300x, 448, 8, 400, 2.5, kind="infinity"),)


def _cards() -> tuple[Cluster, ...]:
    """Cards on PCIe: 32 GB/s one way in its 4th generation, 64 in its 5th; NICs are assumed."""
    pcie = _peaks(756, fp64=51.2, fp32=51.2, tf32=378, fp8=1513)
    h100 = _hopper("H100 PCIe 80 GB", 80, 2000, _H100_SHEET, pcie, power=350)
    l4 = Device(
        "L4 24 GB",
        _peaks(121, fp64=0.47, fp32=30.3, tf32=60.5, fp8=242),
        24 * _GB,
        300 * _G,
        48 * _MB,
        58,
        "NVIDIA L4 Tensor Core GPU datasheet, 2023 (dense figures: half of those with sparsity)",
        power=72,
    )
    rtx3090 = Device(
        "RTX 3090 24 GB",
        _peaks(71.2, fp64=0.56, fp32=35.6, tf32=35.6),
        24 * _GB,
        936 * _G,
        6 * _MB,
        82,
        "NVIDIA Ampere GA102 GPU architecture whitepaper, 2021 (sums in fp32)",
        power=350,
    )
    rtx4090 = Device(
        "RTX 4090 24 GB",
        _peaks(165.2, fp64=1.29, fp32=82.6, tf32=82.6, fp8=330.3),
        24 * _GB,
        1008 * _G,
        72 * _MB,
        128,
        "NVIDIA Ada GPU architecture whitepaper, 2023 (sums in fp32)",
        power=450,
    )
    rows: tuple[tuple[str, Device, float, int, float, float], ...] = (
        ("a100-40-pcie", _a100("A100 PCIe 40 GB", 40, 1555, 250), 32, 2, 200, 1.3),
        ("a100-80-pcie", _a100("A100 PCIe 80 GB", 80, 1935, 300), 32, 2, 200, 1.6),
        ("h100-pcie", h100, 64, 4, 200, 2.4),
        ("l4", l4, 32, 1, 100, 0.7),
        ("rtx-3090", rtx3090, 32, 1, 100, 0.3),
        ("rtx-4090", rtx4090, 32, 1, 100, 0.5),
    )
    return tuple(
        _node(
            *row,
            kind="pcie",
            network="ethernet",
            source=f"{row[1].source}; 8 cards a server, its NICs assumed",
        )
        for row in rows
    )


def _tpus() -> tuple[Cluster, ...]:
    """Pods of chips in a torus of 3 dims; `bandwidth` is that of all six links of a chip together."""
    jouppi, cloud = "Jouppi et al. 2023 (ISCA), table 4", "Google Cloud documentation: TPU v5p, 2025"
    rows = (
        ("tpu-v4", 275, 32 * _GB, 1228, 128 * _MB, 4096, 300, 3.22, 192.0, jouppi),
        ("tpu-v5p", 459, 95 * 2**30, 2765, 0, 8960, 600, 4.2, None, cloud),
    )
    made = []
    for name, rate, memory, gbytes, cache, pod, links, price, power, source in rows:
        peak = {"bf16": rate * _T}
        device = Device(name, peak, memory, gbytes * _G, cache, 2, source, kind="tpu", power=power)
        # 50 Gbit/s a chip between pods (the same documentation).
        between = Level("datacentre", _MOST, Link(50e-6, 50 * _GIGABIT), kind="ethernet")
        levels = (Level("pod", pod, Link(1e-6, links * _G), kind="ici"), between)
        told = f"{source}; price: Google Cloud's list price, 2025"
        network = Network(pod, 50 * _GIGABIT)
        made.append(Cluster(name, device, _MOST, levels, price, told, network=network).resized(4))
    return tuple(made)


def host(name: str, cores: int, memory: int) -> Cluster:
    """A server of `cores`, each of which does 16 multiply-adds in fp32 a cycle: `profile` knows better."""
    source = "round figures of no machine in particular: cores with AVX2 at 3 GHz"
    device = Device(
        name,
        {"fp64": 0.05 * cores * _T, "fp32": 0.1 * cores * _T, "bf16": 0.1 * cores * _T},
        memory,
        min(10 * cores, 200) * _G,
        32 * _MB,
        cores,
        source,
        Rates(attention=0.3, launch=1e-5),
        kind="cpu",
    )
    within = Level("host", _MOST, Link(30e-6, 2 * _G), kind="memory")
    return Cluster("cpu", device, _MOST, (within,), None, source, sharing=_MOST).resized(cores)


_ALL = (*_hoppers(), *_blackwells(), *_instincts(), *_cards(), *_tpus(), host("2 cores", 2, 8 * _GB))

CLUSTERS: dict[str, Cluster] = {cluster.name: cluster for cluster in _ALL}

ALIASES: dict[str, str] = {
    "a100": "a100-80-sxm",
    "dgx-a100": "a100-80-sxm",
    "a100-40": "a100-40-sxm",
    "a100-80": "a100-80-sxm",
    "a100-sxm": "a100-80-sxm",
    "a100-pcie": "a100-80-pcie",
    "h100": "h100-sxm",
    "dgx-h100": "h100-sxm",
    "dgx-h200": "h200",
    "dgx-b200": "b200",
    "dgx-b300": "b300",
    "gb200": "gb200-nvl72",
    "gb300": "gb300-nvl72",
    "3090": "rtx-3090",
    "4090": "rtx-4090",
    "localhost": "cpu",
}
"""Other names of the same."""

CUDA_NAMES: dict[str, str] = {
    "A100-SXM4-40GB": "a100-40-sxm",
    "A100-SXM4-80GB": "a100-80-sxm",
    "A100-PCIE-40GB": "a100-40-pcie",
    "A100 80GB PCIe": "a100-80-pcie",
    "H100 80GB HBM3": "h100-sxm",
    "H100 PCIe": "h100-pcie",
    "H800": "h800",
    "GH200": "gh200",
    "H200": "h200",
    "GB300": "gb300-nvl72",
    "GB200": "gb200-nvl72",
    "B300": "b300",
    "B200": "b200",
    "MI300X": "mi300x",
    "NVIDIA L4": "l4",
    "RTX 3090": "rtx-3090",
    "RTX 4090": "rtx-4090",
}
"""What a driver's name of a device contains -> the cluster of such devices; the first that fits."""
