"""The hardware that a plan runs on: devices, the links between them, and measurements of both.

A cluster is `count` equal devices in nested groups: a node of 8 behind one switch, a leaf switch's nodes, the
whole cluster. Each level has the link by which a device reaches the devices outside its group of the level
below. Peaks are dense (no structured sparsity), as on datasheets; `Rates` holds the attained shares of them,
and `ProfiledTimes` the timings of a machine that `meshwright profile` has run on.

On a machine without accelerators a `Device` is the whole host, which `Cluster.sharing` ranks share.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import field, replace
from itertools import pairwise
from math import ceil
from typing import Annotated, Literal, NamedTuple

from pydantic import Field
from pydantic.dataclasses import dataclass

from meshwright.spec.errors import UserError, did_you_mean
from meshwright.spec.records import Count, Integer, NotNegative, Number, Positive, Record
from meshwright.units import FORMATS

Kind = Literal["nvlink", "infinity", "pcie", "infiniband", "ethernet", "ici", "neuronlink", "memory"]
"""Technology of a link; 'memory' is the shared memory of one host."""

DeviceKind = Literal["cuda", "rocm", "tpu", "neuron", "cpu"]

GPUS = ("cuda", "rocm")
"""Kinds of devices that are GPUs."""
RUNS_ON = (*GPUS, "cpu")
"""Kinds of devices that this program runs on: torch has them."""

NETWORKS = ("infiniband", "ethernet")
"""Kinds of links that leave a node."""

LEAST_OF_A_NODE = 0.75
"""Share of each node that is used at least, such as 64 of the 72 devices of a rack."""

MOST_ATTAINED = 0.9
"""Largest share of a peak that products attain at any power. Source: assumed."""

ROOT = 0.5
"""Power of a device's watts over those of another of its generation with which what it attains grows. Source:
assumed, between 1/3 (power as the cube of the clock) and 1 (at the least voltage)."""

_NO_SHARES = (
    "launch", "native", "power", "timed", "array", "contention", "reference_power", "reference_peak",
)  # fmt: skip
"""Fields of `Rates` that are no shares of a peak."""

OneOrMore = Annotated[Number, Field(ge=1)]


@dataclass(frozen=True)
class Link(Record):
    """Latency and bandwidth of messages from one device to another."""

    latency: NotNegative
    """Seconds of an empty message."""
    bandwidth: Positive
    """Bytes per second that one device sends, one way."""


@dataclass(frozen=True)
class Level(Record):
    """One level of the hierarchy: groups of `devices` devices, into which groups of the level below nest."""

    name: str
    devices: Count
    link: Link
    oversubscription: OneOrMore = 1.0
    """Ratio of what the devices of a group can send together to what its switches carry between them. When
    all send at once, each gets `link.bandwidth` / `oversubscription`."""
    kind: Kind = "infiniband"

    @property
    def loaded(self) -> float:
        """Bytes per second that one device sends, one way, while all devices of the group send."""
        return self.link.bandwidth / self.oversubscription


@dataclass(frozen=True)
class Rates(Record):
    """Attained shares of a device's peaks in large operations, and the cost of a small one.

    The defaults are round assumptions, for devices without published or measured runs.
    """

    matmul: Number = 0.8
    """Share of a format's peak FLOP/s in large matrix products, at one watt for each peak TFLOP/s."""
    power: Number = 0.0
    """Power of the watts for each peak TFLOP/s with which the shares of the peak grow."""
    attention: Number = 0.5
    """Share of the peak FLOP/s in the forward of fused attention over long sequences, at that power."""
    attention_backward: Number = 0.4
    """Share of the peak FLOP/s in the backward of fused attention over long sequences, at that power."""
    attention_ported: Number = 1.0
    """Further factor on both attention rates for kernels written for the previous device generation."""
    array: Integer = 0
    """Sides of the systolic arrays that a TPU multiplies with: heads of fewer channels leave the rest of them
    idle. 0 for devices whose kernels of attention have rates of their own by channels."""
    reference_power: NotNegative = 0.0
    """Watts of the generation's device that the shares are of, and its dense peak in 16 bits, in TFLOP/s."""
    reference_peak: NotNegative = 0.0
    timed: bool = False
    """True for devices that published runs of several sources were timed on."""
    native: Literal["flash2", "flash3", "flash4"] = "flash2"
    """The release of FlashAttention that is written for the device's generation."""
    memory: Number = 0.85
    """Share of the memory bandwidth in elementwise operators."""
    launch: Number = 4e-6
    """Minimum seconds of an operator."""
    link: Number = 0.8
    """Share of the innermost link's bandwidth in large collectives."""
    network: Number = 0.8
    """Share of the bandwidth of all other levels in large collectives."""
    contention: NotNegative = 0.0
    """Seconds, at least, that compute loses per second of a collective that it overlaps: both take compute
    units and memory. Programs have a number of their own, from runs on NVIDIA GPUs."""

    def check_shares(self, where: str = "") -> Rates:
        """Return the rates of a file, or raise `UserError`, which starts with `where`, if one is not a share.

        The constructor accepts others, because a sensitivity analysis also tries rates above 1.
        """
        for name, share in vars(self).items():
            key = f"{where}: device.rates.{name}" if where else f"device.rates.{name}"
            if name == "launch" and share < 0:
                raise UserError(f"{key}: {share} is not a time; give seconds, 0 or more")
            if name not in _NO_SHARES and not 0 < share <= 1:
                raise UserError(
                    f"{key}: {share} is not a share of the device's peak; give a number above 0 and up to 1"
                )
        return self


@dataclass(frozen=True)
class Device(Record):
    """One chip, with the figures of its datasheet."""

    name: str
    peak: Mapping[str, Positive]
    """Dense FLOP/s by number format; formats that the chip does not support are absent."""
    memory: Count
    """Bytes, as the driver reports them; contexts of programs are part of them."""
    bandwidth: Positive
    """Bytes per second of the memory, reads and writes together."""
    cache: Integer
    """Bytes of the last-level cache."""
    units: Count
    """Streaming multiprocessors, compute units or cores."""
    source: str
    rates: Rates = field(default_factory=Rates)
    kind: DeviceKind = "cuda"
    power: Positive | None = None
    """Maximum watts, where the source states them."""
    host_link: Positive | None = None
    """Bytes per second between the device and its host's memory, one way, where they are known."""
    capability: tuple[int, int] | None = None
    """Compute capability of a GPU of NVIDIA's; None where it is not known."""
    host_memory: Positive | None = None
    """Bytes of its host's memory that are its share, where they are known."""

    @property
    def default_format(self) -> str:
        """The format that a run computes in where it names none: bf16, fp16 on a GPU without it, or fp32."""
        if self.kind == "cpu":
            return "fp32"
        return "fp16" if "bf16" not in self.peak and "fp16" in self.peak else "bf16"

    @property
    def planning_only(self) -> str:
        """A sentence for a device that this program does not run on; an empty text for others."""
        if self.kind in RUNS_ON:
            return ""
        return f"{self.name} is known for planning only: this program runs on CUDA, ROCm and CPU"

    def clock(self, format: str) -> float:
        """Factor on the attained shares of a format's peak: with less power for it the clock is lower.

        Devices of one generation attain what its reference does, times the root of their power over its.
        """
        rates, peak = self.rates, self.peak[format] / 1e12
        if self.power is None:
            return 1.0
        if not rates.reference_power:
            return (self.power / peak) ** rates.power
        same = rates.reference_peak / (self.peak.get("bf16", self.peak[format]) / 1e12)
        share = (rates.reference_power / (same * peak)) ** rates.power
        return share * same * (self.power / rates.reference_power) ** ROOT

    def at_power(self, watts: float) -> Device:
        """The device limited to so many watts; as it is where its rated power is not known."""
        if self.power is None:
            return self
        rates = self.rates
        if not rates.reference_power:
            bf16 = self.peak.get("bf16", max(self.peak.values())) / 1e12
            rates = replace(rates, reference_power=self.power, reference_peak=bf16)
        return replace(self, power=watts, rates=rates)

    def attained(self, format: str) -> float:
        """Share of the peak of one of its formats that large matrix products attain."""
        share = self.rates.matmul * self.clock(format)
        return min(MOST_ATTAINED, share) if self.rates.power else share

    def __post_init__(self) -> None:
        known = ", ".join(FORMATS)
        if not self.peak:
            raise UserError(f"device.peak: is empty; give the dense FLOP/s of one format or more, of {known}")
        for name in self.peak:
            if name not in FORMATS:
                raise UserError(f"device.peak: '{name}' is not one of {known}{did_you_mean(name, FORMATS)}")


class Matmul(NamedTuple):
    """Time of one (m, k) x (k, n) matrix product."""

    format: str
    m: Count
    n: Count
    k: Count
    seconds: Positive

    @property
    def flops(self) -> int:
        """FLOPs of the product."""
        return 2 * self.m * self.n * self.k


class AttentionTime(NamedTuple):
    """Seconds of causal attention over `sequences` sequences: its forward, and its backward alone."""

    format: str
    sequences: Count
    heads: Count
    kv_heads: Count
    head_dim: Count
    length: Count
    forward: Positive
    backward: Positive

    @property
    def flops(self) -> int:
        """FLOPs of the forward: two products over the causal half. Those of the backward are proportional."""
        return 2 * self.sequences * self.heads * self.length**2 * self.head_dim


class Collective(NamedTuple):
    """Time of a collective over `ranks` ranks whose smallest common level is `level`.

    `bytes` counts the whole tensor: the gathered one, the one before a reduce-scatter, the one reduced, or
    all that a rank sends in an all-to-all; for a send, the message.
    """

    operation: str
    ranks: Count
    level: str
    bytes: Count
    seconds: Positive


@dataclass(frozen=True)
class ProfiledTimes(Record):
    """Times that `meshwright profile` took, by the host's clock or by CUDA events."""

    matmul: tuple[Matmul, ...] = ()
    """Matrix products while all `ranks` of a host compute, as in training."""
    attention: tuple[AttentionTime, ...] = ()
    """The model's own attention while all `ranks` of a host compute."""
    collectives: tuple[Collective, ...] = ()
    """Where ranks share cores, the seconds that a collective adds to the matrix products before it."""
    matmul_alone: tuple[Matmul, ...] = ()
    """Matrix products while one process of each host computes, with its share of the threads."""
    memory_bandwidth: NotNegative | None = None
    """Bytes per second that one rank's elementwise operators read and write while all ranks run them."""
    copy_bandwidth: NotNegative | None = None
    """Bytes per second that one rank's copies read and write while all ranks copy."""
    optimiser_bandwidth: NotNegative | None = None
    """Bytes per second that fused AdamW reads and writes: 28 per parameter in fp32, gradient included."""
    launch: NotNegative | None = None
    """Seconds of an operator on a handful of numbers."""
    overlap_compute: NotNegative | None = None
    """Slowdown factor (>= 1) of matrix products while an all-reduce runs."""
    overlap_collective: NotNegative | None = None
    """Slowdown factor (>= 1) of an all-reduce while matrix products run."""
    collective_compute: Mapping[str, Number] = field(default_factory=dict)
    """By operation, the share of a large collective's time in which it occupies the rank's processor. Empty
    on GPUs, where it is not measured."""
    ranks: Count = 1
    """Processes that ran at once on each host."""
    taken: Mapping[str, str] = field(default_factory=dict)
    """Date, versions and description of the machine."""


@dataclass(frozen=True)
class Network(Record):
    """The network interfaces of one node."""

    nics: Count
    bandwidth: Positive
    """Bytes per second of one interface, one way."""


@dataclass(frozen=True)
class Cluster(Record):
    """`count` equal devices, and the hierarchy of groups that they form, innermost level first."""

    name: str
    device: Device
    count: Count
    levels: tuple[Level, ...]
    """The last level holds all devices."""
    price: NotNegative | None
    """USD per device and hour."""
    source: str
    measured: ProfiledTimes | None = None
    sharing: Count = 1
    """Ranks that share one host's cores and memory on machines without accelerators."""
    network: Network | None = None
    beyond: tuple[Level, ...] = ()
    """Further levels of a larger cluster of this kind, from the full size of the last of `levels` on."""
    whole_node: Count | None = None
    """Devices of a node, where fewer of each are used."""
    host: Count | None = None
    """Devices that one operating system runs, where these are not all of a node."""

    def __post_init__(self) -> None:
        if not self.levels or self.levels[-1].devices != self.count:
            raise UserError(f"levels: the last one must hold all {self.count} devices")
        levels = self.hierarchy
        names = [level.name for level in levels]
        if len(set(names)) < len(names):
            raise UserError(f"levels: {', '.join(names)} are not distinct names; rename one")
        for inner, wider in pairwise(levels[:-1]):
            if wider.devices % inner.devices or wider.devices == inner.devices:
                raise UserError(
                    f"levels: groups of {inner.devices} ('{inner.name}') do not nest in groups of "
                    f"{wider.devices} ('{wider.name}'); give a multiple"
                )
        if len(self.levels) > 1 and self.levels[-2].devices >= self.count:
            raise UserError(
                f"levels: '{self.levels[-1].name}' is not larger than the level before it; "
                "give it more devices"
            )

    @property
    def hierarchy(self) -> tuple[Level, ...]:
        """All levels of a cluster of this kind, at their full size."""
        if not self.beyond:
            return self.levels
        outermost = replace(self.levels[-1], devices=self.beyond[0].devices)
        return (*self.levels[:-1], outermost, *self.beyond[1:])

    def level_of(self, ranks: Iterable[int]) -> Level:
        """The innermost level with a group that holds all of `ranks`, which count from 0."""
        members = set(ranks)
        if not members or min(members) < 0 or max(members) >= self.count:
            raise ValueError(f"ranks {sorted(members)} are not within {self.count} devices")
        return next(level for level in self.levels if len({rank // level.devices for rank in members}) == 1)

    @property
    def node(self) -> int:
        """Devices that are used of one node: those joined by more than a network."""
        return max((level.devices for level in self.hierarchy if level.kind not in NETWORKS), default=1)

    @property
    def in_words(self) -> str:
        """Number and name of the devices, and how many of a node are used where that is not all of them."""
        words = f"{self.count:,} x {self.device.name}"
        if self.whole_node is None or self.count <= self.node:
            return words
        name = next(level.name for level in self.hierarchy if level.devices == self.node)
        return f"{words} ({self.node} of the {self.whole_node} of each {name})"

    def resized(self, count: int) -> Cluster:
        """A cluster of this kind with `count` devices. Raises `UserError` below 1.

        Where that is no number of whole nodes, and equal parts of nodes do, as many of each node are used.
        """
        if count < 1:
            raise UserError(f"count: {count} is not a number of devices; give 1 or more")
        node, used = self.whole_node or self.node, self.node
        part = self._part_of_a_node(count, node)
        full = tuple(
            replace(level, devices=max(1, level.devices * part // used)) if level.devices >= used else level
            for level in self.hierarchy
        )
        inner = tuple(level for level in full[:-1] if level.devices < count)
        beyond = full[len(inner) :]
        levels = (*inner, replace(beyond[0], devices=count))
        sharing = levels[0].devices if self.device.kind == "cpu" else self.sharing
        whole_node = node if part < node else None
        return replace(
            self, count=count, levels=levels, beyond=beyond, sharing=sharing, whole_node=whole_node
        )

    def _part_of_a_node(self, count: int, node: int) -> int:
        """Return how many devices of each node of `node` devices are used by `count` devices."""
        if count <= node or self.device.kind == "cpu":
            return node
        inner = (level.devices for level in self.hierarchy if level.devices < self.node)
        unit = self.host or max(inner, default=1)
        parts = range(node, ceil(LEAST_OF_A_NODE * node) - 1, -1)
        return next((part for part in parts if count % part == 0 and part % unit == 0), node)
