"""What a plan runs on: devices, the links between them, and what was measured of both.

A cluster is `count` equal devices in groups that nest: a node of 8 behind one switch, a leaf of some nodes,
all. Each level has the link by which a device reaches those that are in no smaller group with it.
Peaks are those of datasheets, dense (no structured sparsity); `Rates` says what share of them is attained;
and where `meshwright profile` has measured a machine, its times stand in `Measured`.

On a machine without accelerators `Device` is the whole host, and `Cluster.sharing` ranks share what it has.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, NamedTuple

from meshwright.hardware.tree import read_tree
from meshwright.spec.errors import UserError, did_you_mean

FORMATS = ("fp64", "fp32", "tf32", "bf16", "fp16", "fp8", "fp4")
"""Number formats that a device may have a peak for."""

Kind = Literal["nvlink", "infinity", "pcie", "infiniband", "ethernet", "ici", "memory"]
"""What a link is made of; 'memory' is that of one host, whose processes share it."""

NETWORKS = ("infiniband", "ethernet")
"""Links that leave a node."""


@dataclass(frozen=True)
class Link:
    """How one device reaches another."""

    latency: float
    """Seconds of an empty message."""
    bandwidth: float
    """Bytes a second that one device can send, one way."""

    def __post_init__(self) -> None:
        if not 0 <= self.latency < float("inf"):
            raise UserError(f"latency: {self.latency} seconds cannot be; give 0 or more")
        _above_zero("bandwidth", self.bandwidth)


@dataclass(frozen=True)
class Level:
    """Groups of `devices` neighbours each; those of a smaller level nest in them."""

    name: str
    devices: int
    link: Link
    oversubscription: float = 1.0
    """By how much the devices of a group together can send more than its switches carry between them: when
    all do, each gets `link.bandwidth` / `oversubscription`."""
    kind: Kind = "infiniband"

    def __post_init__(self) -> None:
        if self.devices < 1:
            raise UserError(f"levels: '{self.name}' has {self.devices} devices; a level has 1 or more")
        if not 1 <= self.oversubscription < float("inf"):
            raise UserError(
                f"levels: '{self.name}' has an oversubscription of {self.oversubscription}; it is 1 where "
                f"all devices can send at once, and more where they share"
            )

    @property
    def loaded(self) -> float:
        """Bytes a second that one device sends, one way, while all of the group do."""
        return self.link.bandwidth / self.oversubscription


@dataclass(frozen=True)
class Rates:
    """What a device attains of its peaks in large operations, as shares, and what a small one costs."""

    matmul: float = 0.8
    """Of the peak FLOP/s of its format, in large matrix products."""
    fp8: float = 0.85
    """Of that again, in fp8."""
    attention: float = 0.5
    """Of the peak, in fused attention's forward over long sequences."""
    attention_backward: float = 0.4
    """The same in its backward."""
    attention_ported: float = 1.0
    """Of those two again, in kernels that were written for the generation before."""
    memory: float = 0.85
    """Of the memory's bytes a second, in elementwise operators."""
    launch: float = 4e-6
    """Seconds that an operator takes at least."""
    link: float = 0.8
    """Of the innermost link's bytes a second, in large collectives."""
    network: float = 0.8
    """Of the other levels' bytes a second."""


@dataclass(frozen=True)
class Device:
    """One chip, as its datasheet has it."""

    name: str
    peak: Mapping[str, float]
    """Dense FLOP/s by format; a format that the chip has no units for is absent."""
    memory: int
    """Bytes."""
    bandwidth: float
    """Bytes a second of that memory, reads and writes together."""
    cache: int
    """Bytes of the last level of cache."""
    units: int
    """Streaming multiprocessors, compute units or cores."""
    source: str
    rates: Rates = field(default_factory=Rates)
    kind: Literal["cuda", "rocm", "tpu", "cpu"] = "cuda"
    power: float | None = None
    """Watts at most, where the source says."""

    def __post_init__(self) -> None:
        if not self.peak:
            raise UserError(
                f"device.peak: is empty; give the dense FLOP/s of a format or more, of {', '.join(FORMATS)}"
            )
        for name, rate in self.peak.items():
            if name not in FORMATS:
                raise UserError(
                    f"device.peak: '{name}' is not one of {', '.join(FORMATS)}{did_you_mean(name, FORMATS)}"
                )
            _above_zero(f"device.peak.{name}", rate)
        for name in ("memory", "bandwidth", "units"):
            _above_zero(f"device.{name}", getattr(self, name))


class Matmul(NamedTuple):
    """(m, k) times (k, n) took so long."""

    format: str
    m: int
    n: int
    k: int
    seconds: float


class Attention(NamedTuple):
    """Causal attention of `sequences` sequences took so long, forward, and its backward alone."""

    format: str
    sequences: int
    heads: int
    kv_heads: int
    head_dim: int
    length: int
    forward: float
    backward: float


class Collective(NamedTuple):
    """An operation over `ranks` ranks whose smallest common level is `level`. `bytes` are those of the whole
    tensor: gathered, before it is scattered, reduced, or what a rank deals out; of the message for a send."""

    operation: str
    ranks: int
    level: str
    bytes: int
    seconds: float


@dataclass(frozen=True)
class Measured:
    """Times that `meshwright profile` took, by a host's clock or by CUDA's events."""

    matmul: tuple[Matmul, ...] = ()
    """While all `ranks` of a host compute, as in training."""
    attention: tuple[Attention, ...] = ()
    """The same, by the model's own attention."""
    collectives: tuple[Collective, ...] = ()
    """Where ranks share cores, what one adds to products before it, as in training."""
    matmul_alone: tuple[Matmul, ...] = ()
    """While one process of each host computes, with its share of the threads, and the others wait."""
    memory_bandwidth: float | None = None
    """Bytes a second that one rank's elementwise operators read and write, while all do."""
    copy_bandwidth: float | None = None
    """The same for a copy."""
    optimiser_bandwidth: float | None = None
    """Bytes a second that fused AdamW reads and writes: 28 a parameter in fp32, with its gradient."""
    launch: float | None = None
    """Seconds of an operator on a handful of numbers."""
    overlap_compute: float | None = None
    """How many times as long products take while an all-reduce is under way, at least 1."""
    overlap_collective: float | None = None
    """How many times as long an all-reduce takes while products are computed, at least 1."""
    collective_compute: Mapping[str, float] = field(default_factory=dict)
    """Share of a large collective's time in which it takes the rank's processor, by operation: what it costs
    compute that runs beside it. On GPUs it is not known."""
    ranks: int = 1
    """Processes that ran at once on each host."""
    taken: Mapping[str, str] = field(default_factory=dict)
    """Date, versions, and the machine in words."""


@dataclass(frozen=True)
class Network:
    """What leaves a node."""

    nics: int
    """Of one node."""
    bandwidth: float
    """Bytes a second of one, one way."""


@dataclass(frozen=True)
class Cluster:
    """`count` equal devices, and the levels of groups that they stand in, innermost first."""

    name: str
    device: Device
    count: int
    levels: tuple[Level, ...]
    """The last one holds all devices."""
    price: float | None
    """USD for a device and hour."""
    source: str
    measured: Measured | None = None
    sharing: int = 1
    """Ranks that share one host's cores and memory, on machines without accelerators; each gets its share."""
    network: Network | None = None
    beyond: tuple[Level, ...] = ()
    """Levels that a larger cluster of this kind has, from the full size of the last of `levels` on."""

    def __post_init__(self) -> None:
        for name in ("count", "sharing"):
            if getattr(self, name) < 1:
                raise UserError(f"{name}: {getattr(self, name)} is not a number of devices; give 1 or more")
        if self.price is not None and not 0 <= self.price < float("inf"):
            raise UserError(f"price: {self.price} USD for a device and hour cannot be; give 0 or more")
        if not self.levels or self.levels[-1].devices != self.count:
            raise UserError(f"levels: the last one must hold all {self.count} devices")
        _nest(self.hierarchy)
        if len(self.levels) > 1 and self.levels[-2].devices >= self.count:
            raise UserError(f"levels: '{self.levels[-1].name}' is not larger than the level before it")

    @property
    def hierarchy(self) -> tuple[Level, ...]:
        """All levels that a cluster of this kind has, at their full size."""
        if not self.beyond:
            return self.levels
        outermost = replace(self.levels[-1], devices=self.beyond[0].devices)
        return (*self.levels[:-1], outermost, *self.beyond[1:])

    def level_of(self, ranks: Iterable[int]) -> Level:
        """The innermost level that has a group with all of `ranks`, which count from 0."""
        found = set(ranks)
        if not found or min(found) < 0 or max(found) >= self.count:
            raise ValueError(f"ranks {sorted(found)} are not within {self.count} devices")
        return next(each for each in self.levels if len({rank // each.devices for rank in found}) == 1)

    def resized(self, count: int) -> Cluster:
        """The same kind of cluster with `count` devices. Raises `UserError` below 1."""
        if count < 1:
            raise UserError(f"count: {count} is not a number of devices; give 1 or more")
        full = self.hierarchy
        inner = tuple(level for level in full[:-1] if level.devices < count)
        beyond = full[len(inner) :]
        levels = (*inner, replace(beyond[0], devices=count))
        sharing = levels[0].devices if self.device.kind == "cpu" else self.sharing
        return replace(self, count=count, levels=levels, beyond=beyond, sharing=sharing)


def _above_zero(name: str, value: float) -> None:
    if not 0 < value < float("inf"):
        raise UserError(f"{name}: {value} cannot be; give a number above 0")


def _check_shares(rates: Rates) -> None:
    """Refuse rates of a file that are no shares. A plan's sensitivities may go beyond."""
    for name, share in asdict(rates).items():
        if name == "launch":
            if not 0 <= share < float("inf"):
                raise UserError(f"device.rates.launch: {share} seconds cannot be; give 0 or more")
        elif not 0 < share <= 1:
            raise UserError(
                f"device.rates.{name}: {share} is no share of what the device can do; give a number above 0 "
                "and up to 1"
            )


def _nest(levels: tuple[Level, ...]) -> None:
    names = [level.name for level in levels]
    if len(set(names)) < len(names):
        raise UserError(f"levels: two of {', '.join(names)} have the same name")
    for inner, outer in pairwise(levels[:-1]):
        if outer.devices % inner.devices or outer.devices == inner.devices:
            raise UserError(
                f"levels: groups of {inner.devices} ('{inner.name}') do not nest in groups of "
                f"{outer.devices} ('{outer.name}'); give a multiple"
            )


def to_json(cluster: Cluster) -> dict[str, Any]:
    """A tree of plain values, from which `from_json` makes an equal cluster."""
    tree = asdict(cluster)
    if cluster.measured is None:
        del tree["measured"]
    return tree


def from_json(tree: Any, source: str = "") -> Cluster:
    """The cluster of such a tree. Raises `UserError`, with `source` in front, which names the file."""
    try:
        found: Cluster = read_tree(Cluster, tree, "")
        _check_shares(found.device.rates)
    except UserError as error:
        raise UserError(f"{source}: {error}" if source else str(error)) from None
    return found


def catalogue() -> dict[str, Cluster]:
    """Every cluster that is known by name, at the size of one node."""
    from meshwright.hardware.catalogue import CLUSTERS

    return dict(CLUSTERS)


def cluster(name: str, count: int | None = None) -> Cluster:
    """A cluster of the catalogue, or of a hardware file (JSON), with `count` devices where that is given.

    Raises `UserError` for an unknown name, a file that cannot be read, and a count below 1.
    """
    from meshwright.hardware.catalogue import ALIASES, CLUSTERS
    from meshwright.hardware.hardware_file import read

    if name.endswith(".json") or (Path(name).is_file() and name not in CLUSTERS):
        found = read(Path(name))
    elif (known := ALIASES.get(name.lower(), name.lower())) in CLUSTERS:
        found = CLUSTERS[known]
    else:
        hint = did_you_mean(name.lower(), [*CLUSTERS, *ALIASES])
        raise UserError(
            f"cluster: '{name}' is neither a name of the catalogue nor a hardware file"
            + (hint or f"; the names are {', '.join(CLUSTERS)}")
        )
    return found if count is None else found.resized(count)


def with_network(
    given: Cluster,
    *,
    per_node: int | None = None,
    nodes: int | None = None,
    nics: int | None = None,
    nic_bandwidth: float | None = None,
    latency: float | None = None,
    oversubscription: float | None = None,
    price: float | None = None,
) -> Cluster:
    """The cluster with another node, network or price; what is None stays.

    `per_node` devices a node, `nodes` of them, `nics` a node of `nic_bandwidth` bytes a second each,
    `latency` seconds of a message that leaves a node, `oversubscription` of the outermost level. Raises
    `UserError`.
    """
    full = given.hierarchy
    outer = tuple(level for level in full if level.kind in NETWORKS)
    if not outer or not (inner := full[: len(full) - len(outer)]):
        raise UserError(f"{given.name}: has no nodes with a network between them that could be changed")
    devices = inner[-1].devices if per_node is None else per_node
    if devices < 1 or (nodes is not None and nodes < 1):
        raise UserError(f"per_node: {devices} devices on {nodes} nodes cannot be; give 1 or more of each")
    old = given.network or Network(1, outer[0].link.bandwidth * inner[-1].devices)
    network = Network(
        old.nics if nics is None else nics, old.bandwidth if nic_bandwidth is None else nic_bandwidth
    )
    if network.nics < 1:
        raise UserError(f"nics: {network.nics} NICs reach no other node; give 1 or more")
    bandwidth = network.nics * network.bandwidth / devices
    ratio = devices / inner[-1].devices
    changed = [
        replace(
            level,
            devices=max(1, round(level.devices * ratio)),
            link=Link(level.link.latency if latency is None else latency, bandwidth),
        )
        for level in outer
    ]
    if oversubscription is not None:
        changed[-1] = replace(changed[-1], oversubscription=oversubscription)
    kept = tuple(level for level in inner[:-1] if level.devices < devices)
    levels = (*kept, replace(inner[-1], devices=devices), *changed)
    whole = replace(
        given,
        count=changed[-1].devices,
        levels=levels,
        beyond=(),
        network=network,
        price=given.price if price is None else price,
    )
    return whole.resized(devices * nodes if nodes is not None else given.count)
