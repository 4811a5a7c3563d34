"""Software of all ranks, which must be the same: code, torch, NCCL and the driver, and the run itself."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from meshwright.doctor.finding import Finding, of_ranks
from meshwright.doctor.world import ExaminedWorld
from meshwright.host import content
from meshwright.rank.world import code_version
from meshwright.spec import RunSpec

DRIVER = Path("/sys/module/nvidia/version"), Path("/proc/driver/nvidia/version")
REMEDIES = {
    "meshwright": "install one version of it on all hosts, from one wheel or one shared folder",
    "torch": "install one version of it on all hosts (pip install -c constraints.txt)",
    "NCCL": "install one torch on all hosts, and see that LD_LIBRARY_PATH and LD_PRELOAD name no other NCCL",
    "the driver": "install one driver on all hosts",
    "the device": "start ranks on hosts of one kind, or on as many of each kind as the layout is to have",
    "the run": "start all ranks with the same run file and flags",
}
MAY_DIFFER = "the driver", "the device"
"""A run starts with others, whose ranks wait for the slowest."""


def software(spec: RunSpec | None, cuda: bool) -> dict[str, str]:
    """Versions of this rank's software, by its names; "" where there is none."""
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if cuda else ""
    return {
        "meshwright": code_version(),
        "torch": torch.__version__,
        "NCCL": nccl,
        "the driver": _driver() if cuda else "",
        "the device": torch.cuda.get_device_name() if cuda else "cpu",
        "the run": "" if spec is None else f"{spec.digest()[:12]}",
    }


def versions(world: ExaminedWorld, own: Mapping[str, str]) -> list[Finding]:
    """On rank 0, what is another version on some ranks than on most. Every rank calls this."""
    rows: list[dict[str, Any]] = world.ranks.gather(dict(own))
    found = []
    for name, remedy in REMEDIES.items() if rows else ():
        (usual, _), *others = Counter(row[name] for row in rows).most_common()
        for version, _ in others:
            ranks = tuple(rank for rank, row in enumerate(rows) if row[name] == version)
            rest = tuple(rank for rank, row in enumerate(rows) if row[name] == usual)
            sentence = (
                f"{name} is {version or 'not there'} on {of_ranks(ranks, world.names)}, and "
                f"{usual or 'not there'} on {of_ranks(rest, world.names)}"
            )
            found.append(Finding("versions", name not in MAY_DIFFER, sentence, remedy, ranks))
    return found


def _driver() -> str:
    """The version of NVIDIA's driver; "" where the kernel does not tell."""
    for file in DRIVER:
        if match := re.search(r"\d+\.\d+(\.\d+)?", content(file)):
            return match[0]
    return ""
