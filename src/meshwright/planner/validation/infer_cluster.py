"""The cluster of a published run, from its row: its devices, their power, its nodes and its network."""

from __future__ import annotations

import re
from dataclasses import replace

from meshwright.hardware.cluster import Cluster
from meshwright.hardware.find import catalogue, cluster
from meshwright.hardware.network import with_network
from meshwright.planner.validation.table import PredictionError, Row, first_match, short

_NIC = (
    r"([1-9]) ?[x\u00d7] ?([1-9]\d{0,3}) ?"
    r"(?-i:[Gg]bps|Gb/s|[Gg][Bb]its?/s|Gb?(?:it)?[ -]?(?:IB|InfiniBand|[EHNX]DR|RoCE|Omni-?Path|Ethernet))"
)
"""NICs per node and Gbit/s of each in a comment: a unit of bits per second, or the network's name."""
_JEAN_ZAY = r"tr11|bigscience|jean[ -]zay", (4, 100.0)
"""Words for a cluster that the catalogue lacks, and its NICs per node and Gbit/s of each.

Source: Jean Zay's nodes of 8 A100 have 4 Omni-Path links of 100 Gbit/s (BigScience 2022, BLOOM's model card).
"""
_MOST_OF_A_NIC = 1600.0
"""Largest `network_gbps` that is taken for one device's; more is a node's."""
_LIMITED = r"power[ -]?(?:limit(?:ed)?|cap(?:ped)?)"
"""Words for devices that run below their rated power."""
_WATTS = (
    rf"{_LIMITED}(?: is| was)?(?: to| at| of| ?[=:])? ?(\d{{2,4}}) ?w(?:atts?)?"
    rf"|(\d{{2,4}}) ?w(?:atts?)? {_LIMITED}"
)
"""Words that tell to how many watts."""
_DEVICES = (
    (r"v100.*16", "v100-16"),
    (r"v100(?!\d)", "v100-32"),
    (r"trn2|trainium.?2", "trn2"),
    (r"a100.*40", "a100-40-sxm"),
    (r"a100.*pcie", "a100-80-pcie"),
    (r"a100(?!\d)", "a100-80-sxm"),
    (r"h100.*pcie", "h100-pcie"),
    (r"h100(?:.*[^a-z])?nvl(?![a-z0-9])|h100.*(?<!\d)94 ?g", "h100-nvl"),
    (r"h100.*(96|hbm2e)", "h100-96"),
    (r"h100(?!\d)", "h100-sxm"),
    (r"(?<!g)h200(?:.*[^a-z])?nvl(?![a-z0-9])", "h200-nvl"),
    (r"gh200", "gh200"),
    (r"gb300", "gb300-nvl72"),
    (r"gb200", "gb200-nvl72"),
    (r"b300", "b300"),
    (r"tpu.?v?4", "tpu-v4"),
    (r"tpu.?v?5p", "tpu-v5p"),
    (r"tpu.?v?5 ?-?(e|lite)", "tpu-v5e"),
    (r"tpu.?v?6|trillium", "tpu-v6e"),
    (r"tpu.?v?7|ironwood", "tpu-v7"),
    (r"3090", "rtx-3090"),
    (r"4090", "rtx-4090"),
    (r"5090", "rtx-5090"),
    (r"rtx.?a6000", "rtx-a6000"),
    (r"rtx.?pro.?6000", "rtx-pro-6000"),
    (r"\bl4\b", "l4"),
)
"""Pattern of a GPU's name -> its cluster in the catalogue; the first match counts."""
_NAMED = re.compile(
    r"(?<![a-z])(?!sxm|nvl|hbm|ddr|gen|[enhx]dr|ib|cx|[bft][fp])[a-z]{1,3}\d{2,4}[a-z]{0,3}(?![a-z0-9])"
)
"""A word like a device's name, such as v100 or mi250x, that is no form factor, memory or network."""


def cluster_of(row: Row, gpus: int) -> Cluster:
    """The catalogue's cluster of the row's GPU with the row's power, nodes and network.

    Raises `PredictionError` for an unknown GPU, for GPUs of several kinds, and for a limit of power without
    its watts.
    """
    usual = _with_nodes(row, _with_power(row, _catalogued(row, gpus)))
    if len(usual.levels) == 1:
        return usual
    if (each := row.numbers.get("network_gbps")) is not None:
        nics = usual.node if each <= _MOST_OF_A_NIC else 1
        return with_network(usual, nics=nics, nic_bandwidth=each * 1e9 / 8).resized(gpus)
    words, network = _JEAN_ZAY
    if stated := row.says(_NIC):
        network = int(stated[1]), float(stated[2])
    elif not row.says(words):
        return usual
    nics, each = network
    row.derive("network_gbps", f"{nics} x {each:g} a node")
    return with_network(usual, nics=nics, nic_bandwidth=each * 1e9 / 8).resized(gpus)


def _catalogued(row: Row, gpus: int) -> Cluster:
    """The catalogue's cluster of the one kind of GPU that the row names."""
    gpu = row.words["gpu"].lower().replace("_", "-")
    kinds = {_device(part) or _unknown(part) for part in re.split(r"[/+,&;]| and | with ", gpu)} - {None}
    if len(kinds) > 1:
        raise PredictionError(f"the GPUs '{short(row.words['gpu'])}' are of several kinds")
    if (name := _device(gpu)) is None:
        raise PredictionError(f"the GPU '{short(row.words['gpu'])}' is not in the catalogue")
    return cluster(name, gpus)


def _device(gpu: str) -> str | None:
    """The cluster in the catalogue of a GPU's name in small letters, or None."""
    whole = re.sub(r"\b\d+ ?[x\u00d7] ?", "", gpu)
    catalogued = (name for name in catalogue() if re.search(rf"(?<![a-z0-9]){name}(?![a-z0-9])", whole))
    return first_match(_DEVICES, gpu) or next(catalogued, None)


def _unknown(part: str) -> str | None:
    """A word like a device's name in a part of a cell, or None."""
    found = _NAMED.search(part)
    return found[0] if found else None


def _with_power(row: Row, usual: Cluster) -> Cluster:
    """The cluster with its devices at the row's power."""
    watts = row.numbers.get("power_w")
    if watts is None and (told := row.says(_WATTS)):
        watts = row.derive("power_w", float(told[1] or told[2]))
    if watts is None:
        if row.says(_LIMITED):
            raise PredictionError(
                "its GPUs are limited in power, and it does not tell to how many watts; give power_w"
            )
        return usual
    return replace(usual, device=usual.device.at_power(watts))


def _with_nodes(row: Row, usual: Cluster) -> Cluster:
    """The cluster with the row's number of GPUs in a node, each with as much of the network as usual.

    The links of a pod of TPUs join hosts, too, whatever each of these has, and a bridge joins two cards.
    """
    size = row.whole("gpus_per_node")
    if size is None or size == usual.node or usual.levels[0].kind == "ici" or usual.levels[0].name == "pair":
        return usual
    if usual.count % size and usual.count > size:
        raise PredictionError(f"its {usual.count} GPUs are not nodes of gpus_per_node = {size}")
    nics = max(1, round(usual.network.nics * size / usual.node)) if usual.network else None
    return with_network(usual, per_node=size, nics=nics).resized(usual.count)
