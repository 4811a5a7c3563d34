"""Clusters that are known by name."""

from __future__ import annotations

from meshwright.planner.hardware import Cluster

CLUSTERS: dict[str, Cluster] = {}

ALIASES: dict[str, str] = {}
