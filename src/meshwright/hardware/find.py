"""Clusters by name: those of the catalogue, and those of hardware files."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

from meshwright.hardware.catalogue import ALIASES, CLUSTERS
from meshwright.hardware.cluster import Cluster
from meshwright.hardware.hardware_file import read
from meshwright.spec.errors import UserError, did_you_mean


def catalogue() -> dict[str, Cluster]:
    """Clusters by their names in the catalogue, each at the size of one node."""
    return dict(CLUSTERS)


_MAKERS = re.compile(r"(?:(?:nvidia|amd|google|aws|geforce|tesla|instinct|quadro)[ _-]+)+")
_SIZED = re.compile(r"(.+?)[ _-]+(\d+) ?gi?b")
"""A name, and the memory behind it in GB or GiB: 'h100-80gb', 'V100 16GB'."""
_NEAR = 0.1
"""Largest share by which the memory of a name differs from the usable memory of its device."""


def known_name(name: str) -> str | None:
    """The catalogue's name of a cluster, however it is written: RTX4090, 'NVIDIA A100 80GB', h100-80gb.

    Case, spaces, dashes, makers and a memory that the device has do not count. None for an unknown one.
    """
    plain = _MAKERS.sub("", name.lower().strip())
    if (found := _plain_names().get(_plain(plain))) is not None:
        return found
    sized = _SIZED.fullmatch(plain)
    if sized is None:
        return None
    base, size = sized[1], int(sized[2])
    found = _plain_names().get(_plain(f"{base}{size}")) or _plain_names().get(_plain(base))
    if found is None or abs(CLUSTERS[found].device.memory / (size * 2**30) - 1) > _NEAR:
        return None
    return found


@cache
def _plain_names() -> dict[str, str]:
    """Names of the catalogue, and others for them, without dashes -> the catalogue's."""
    return {_plain(other): name for other, name in {**ALIASES, **{name: name for name in CLUSTERS}}.items()}


def _plain(name: str) -> str:
    return re.sub(r"[ _-]", "", name)


def is_catalogued(name: str) -> bool:
    """True for a name of the catalogue, or another one for it."""
    return known_name(name) is not None


def cluster(name: str, count: int | None = None) -> Cluster:
    """A cluster of the catalogue, or of a hardware file (JSON), resized to `count` devices if given.

    Raises `UserError` for an unknown name, a file that cannot be read, and a count below 1.
    """
    if name.endswith(".json") or (Path(name).is_file() and name not in CLUSTERS):
        known = read(Path(name))
    elif (catalogued := known_name(name)) is not None:
        known = CLUSTERS[catalogued]
    else:
        hint = did_you_mean(name.lower(), [*CLUSTERS, *ALIASES])
        raise UserError(
            f"cluster: '{name}' is neither a name of the catalogue nor a hardware file"
            + (hint or f"; the names are {', '.join(CLUSTERS)}")
        )
    return known if count is None else known.resized(count)
