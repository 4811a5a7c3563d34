"""Clusters by name: those of the catalogue, and those of hardware files."""

from __future__ import annotations

from pathlib import Path

from meshwright.hardware.catalogue import ALIASES, CLUSTERS
from meshwright.hardware.cluster import Cluster
from meshwright.hardware.hardware_file import read
from meshwright.spec.errors import UserError, did_you_mean


def catalogue() -> dict[str, Cluster]:
    """Clusters by their names in the catalogue, each at the size of one node."""
    return dict(CLUSTERS)


def is_catalogued(name: str) -> bool:
    """True for a name of the catalogue, or another one for it."""
    return ALIASES.get(name.lower(), name.lower()) in CLUSTERS


def cluster(name: str, count: int | None = None) -> Cluster:
    """A cluster of the catalogue, or of a hardware file (JSON), resized to `count` devices if given.

    Raises `UserError` for an unknown name, a file that cannot be read, and a count below 1.
    """
    if name.endswith(".json") or (Path(name).is_file() and name not in CLUSTERS):
        known = read(Path(name))
    elif is_catalogued(name):
        known = CLUSTERS[ALIASES.get(name.lower(), name.lower())]
    else:
        hint = did_you_mean(name.lower(), [*CLUSTERS, *ALIASES])
        raise UserError(
            f"cluster: '{name}' is neither a name of the catalogue nor a hardware file"
            + (hint or f"; the names are {', '.join(CLUSTERS)}")
        )
    return known if count is None else known.resized(count)
