"""Clusters with another node, network or price than those of the catalogue."""

from __future__ import annotations

from dataclasses import replace

from meshwright.hardware.cluster import NETWORKS, Cluster, Link, Network
from meshwright.spec.errors import UserError


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
    """A copy of the cluster with another node, network or price; arguments that are None change nothing.

    `per_node` is the devices per node, `nodes` the number of nodes, `nics` the network interfaces per node,
    `nic_bandwidth` the bytes per second of each, `latency` the seconds of a message that leaves a node, and
    `oversubscription` that of the outermost level. Raises `UserError`.
    """
    full = given.hierarchy
    between = [level for level in full if level.kind in NETWORKS]
    inner = full[: len(full) - len(between)]
    if not inner or not between:
        raise UserError(f"{given.name}: has no nodes with a network between them that could be changed")
    node = inner[-1]
    devices = node.devices if per_node is None else per_node
    if devices < 1 or (nodes is not None and nodes < 1):
        raise UserError(f"per_node: {devices} devices on {nodes} nodes are too few; give 1 or more of each")
    network = given.network or Network(1, between[0].link.bandwidth * node.devices)
    if nics is not None:
        network = replace(network, nics=nics)
    if nic_bandwidth is not None:
        network = replace(network, bandwidth=nic_bandwidth)
    levels = [*(level for level in inner[:-1] if level.devices < devices), replace(node, devices=devices)]
    for level in between:
        size = max(1, round(level.devices * (devices / node.devices)))
        seconds = level.link.latency if latency is None else latency
        link = Link(seconds, network.nics * network.bandwidth / devices)
        levels.append(replace(level, devices=size, link=link))
    if oversubscription is not None:
        levels[-1] = replace(levels[-1], oversubscription=oversubscription)
    price, count = given.price if price is None else price, levels[-1].devices
    whole = replace(given, count=count, levels=tuple(levels), beyond=(), network=network, price=price)
    return whole.resized(devices * nodes if nodes is not None else given.count)
