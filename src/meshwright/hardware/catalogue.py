"""Clusters known by name: the tables of `data/clusters.toml` as `Cluster`s, each at the size of one node."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import BeforeValidator
from pydantic.dataclasses import dataclass

from meshwright.hardware.cluster import Cluster, Device, DeviceKind, Kind, Level, Link, Network, Rates
from meshwright.hardware.sourced import read_tables
from meshwright.spec.errors import UserError
from meshwright.spec.records import Count, Integer, NotNegative, Positive, Record

_GIB, _MIB, _TERA, _GIGA, _GIGABIT = 2**30, 2**20, 1e12, 1e9, 1e9 / 8
_MOST = 2**20
"""Devices of the outermost level."""

Known = Annotated[Positive | None, BeforeValidator(lambda value: None if value == "unknown" else value)]
"""A figure, or "unknown" where a table would inherit one that does not hold for it."""

T = TypeVar("T")


@dataclass(frozen=True)
class _Node(Record):
    """The innermost group of devices; `bandwidth` is that of one device's links in it, in GB/s."""

    devices: Count
    kind: Kind
    bandwidth: Positive
    name: str = "node"
    host: Count | None = None
    """Devices that one operating system runs, where these are not all of the node."""


@dataclass(frozen=True)
class _NetworkLevel(Record):
    name: str
    latency: NotNegative
    devices: Count = _MOST


@dataclass(frozen=True)
class _NetworkTable(Record):
    kind: Kind
    levels: tuple[_NetworkLevel, ...]


@dataclass(frozen=True)
class _LinkTable(Record):
    latency: NotNegative


@dataclass(frozen=True)
class _ClusterTable(Record):
    """A cluster in the units of datasheets, which the head of the file lists."""

    name: str
    source: str
    device: str
    peak: Mapping[str, Positive]
    memory: Count
    bandwidth: Positive
    cache: Integer
    units: Count
    node: _Node
    rates: str
    network: str
    nics: Count
    nic: Positive
    kind: DeviceKind = "cuda"
    power: Known = None
    host_link: Known = None
    capability: tuple[int, int] | None = None
    host_memory: Known = None
    price: Known = None
    price_source: str = ""
    assumed: str = ""
    count: Count | None = None

    def cluster(self, rates: Rates, link: _LinkTable, network: _NetworkTable) -> Cluster:
        """The cluster at the size of one node, or of `count` devices."""
        peak = {format: rate * _TERA for format, rate in self.peak.items()}
        memory, bandwidth, cache = self.memory * _MIB, self.bandwidth * _GIGA, self.cache * _MIB
        device = Device(
            self.device,
            peak,
            memory,
            bandwidth,
            cache,
            self.units,
            self.source,
            rates,
            self.kind,
            self.power,
            self.host_link and self.host_link * _GIGA,
            self.capability,
            self.host_memory and self.host_memory * _GIB,
        )
        node, nics = self.node, Network(self.nics, self.nic * _GIGABIT)
        levels = [Level(node.name, node.devices, Link(link.latency, node.bandwidth * _GIGA), kind=node.kind)]
        for level in network.levels:
            outside = Link(level.latency, nics.nics * nics.bandwidth / node.devices)
            levels.append(Level(level.name, level.devices, outside, kind=network.kind))
        figures = f"{self.source}; {self.assumed}" if self.assumed else self.source
        source = f"{figures}; price: {self.price_source if self.price else 'none known'}"
        whole = Cluster(
            self.name, device, _MOST, tuple(levels), self.price, source, network=nics, host=node.host
        )
        return whole.resized(self.count or node.devices)


def read_catalogue(tree: Mapping[str, Any], where: str) -> dict[str, Cluster]:
    """The clusters, by name, that the tables of a TOML file such as `data/clusters.toml` describe.

    Raises `UserError`, which starts with `where`, for a table without a source, an unknown key, an invalid
    value, and the name of a table that is not there.
    """
    rates = read_tables(Rates, tree["rates"], f"{where}: rates.")
    links = read_tables(_LinkTable, tree["links"], f"{where}: links.")
    networks = read_tables(_NetworkTable, tree["networks"], f"{where}: networks.")
    price_source = tree["prices"]["source"]
    clusters = read_tables(_ClusterTable, tree["clusters"], f"{where}: clusters.", price_source=price_source)
    return {
        name: table.cluster(
            _part(rates, table.rates, f"{where}: rates").check_shares(),
            _part(links, table.node.kind, f"{where}: links"),
            _part(networks, table.network, f"{where}: networks"),
        )
        for name, table in clusters.items()
    }


def _part(tables: Mapping[str, T], name: str, where: str) -> T:
    if name not in tables:
        raise UserError(f"{where}: there is no table '{name}'; the tables are {', '.join(tables)}")
    return tables[name]


def host(name: str, cores: int, memory: int) -> Cluster:
    """A CPU server with processor `name`, `cores` cores and `memory` bytes.

    Its rates are round figures; `meshwright profile` measures the real ones.
    """
    source = "round figures of no machine in particular: cores with AVX2 at 3 GHz"
    fp32 = 0.1 * cores * _TERA  # 16 multiply-adds per core and cycle
    peak, bandwidth = {"fp64": 0.05 * cores * _TERA, "fp32": fp32, "bf16": fp32}, min(10 * cores, 200) * _GIGA
    rates = Rates(attention=0.3, launch=1e-5)
    device = Device(name, peak, memory, bandwidth, 32 * _MIB, cores, source, rates, kind="cpu")
    within = Level("host", _MOST, Link(30e-6, 2 * _GIGA), kind="memory")
    return Cluster("cpu", device, _MOST, (within,), None, source, sharing=_MOST).resized(cores)


DATA = Path(__file__).parent / "data" / "clusters.toml"
_TREE = tomllib.loads(DATA.read_text(encoding="utf-8"))

CLUSTERS: dict[str, Cluster] = {**read_catalogue(_TREE, DATA.name), "cpu": host("2 cores", 2, 8 * _GIB)}

ALIASES: dict[str, str] = _TREE["aliases"]
"""Other names of clusters."""

CUDA_NAMES: dict[str, str] = _TREE["cuda_names"]
"""Part of the name that a driver gives to a device -> the cluster of such devices; the first match counts."""


def cluster_of_gpu(name: str) -> Cluster | None:
    """The cluster of GPUs that the driver names so, such as 'NVIDIA H100 PCIe'; None for an unknown one."""
    return next((CLUSTERS[key] for part, key in CUDA_NAMES.items() if f" {part} " in f" {name} "), None)
