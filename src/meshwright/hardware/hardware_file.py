"""Hardware files: a `Cluster` as JSON."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

from meshwright import atomic
from meshwright.hardware.cluster import Cluster
from meshwright.spec import records
from meshwright.spec.errors import UserError, did_you_mean
from meshwright.spec.files import MAX_JSON, parse_json, read_text

LEAST_MEMORY = 2**20
"""Bytes of a device's memory below which the number must be in another unit."""


def to_json(cluster: Cluster) -> dict[str, Any]:
    """The cluster as plain values, from which `from_json` makes an equal one."""
    tree = asdict(cluster)
    if cluster.measured is None:
        del tree["measured"]
    return tree


def from_json(tree: Any, source: str = "") -> Cluster:
    """The cluster that plain values describe. Raises `UserError`, which starts with `source`, a file."""
    cluster = records.read(Cluster, tree, source)
    cluster.device.rates.check_shares(source)
    if (memory := cluster.device.memory) < LEAST_MEMORY:
        raise UserError(
            f"{source}{': ' if source else ''}device.memory: {memory} is a number of bytes, and no device "
            f"has as few; give such as 24000000000 for 24 GB"
        )
    return cluster


def read(path: Path) -> Cluster:
    """The cluster of a hardware file. Raises `UserError`."""
    if not path.is_file():
        near = did_you_mean(path.name, [file.name for file in path.parent.glob("*.json")])
        raise UserError(f"there is no hardware file {path}{near or '; meshwright profile --out writes one'}")
    try:
        return from_json(parse_json(read_text(path, MAX_JSON)), str(path))
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read as JSON ({error})") from None


def check_writable(path: Path | None, flag: str = "--out") -> None:
    """Refuse an output file that cannot be written, before any work is done. Raises `UserError`."""
    if path is None:
        return
    folder = path.parent
    replaceable = os.access(folder, os.W_OK) and (not path.exists() or os.access(path, os.W_OK))
    if path.is_dir() or not folder.is_dir() or not replaceable:
        why = "is a folder" if path.is_dir() else f"cannot be written in the folder {folder.absolute()}"
        raise UserError(f"{flag}: {path} {why}; give the name of a file in an existing folder")


def write(cluster: Cluster, path: Path) -> None:
    """Write the cluster to a file in one step, with one line per measured point. Raises `UserError`."""
    tree = to_json(cluster)
    measured = tree.pop("measured", None)
    text = json.dumps(tree, indent=2)
    if measured is not None:
        lines = []
        for name, value in measured.items():
            shown = json.dumps(value)
            if isinstance(value, (list, tuple)) and value:
                shown = "[\n" + ",\n".join(f"      {json.dumps(row)}" for row in value) + "\n    ]"
            lines.append(f"    {json.dumps(name)}: {shown}")
        text = f'{text[:-2]},\n  "measured": {{\n' + ",\n".join(lines) + "\n  }\n}"
    try:
        atomic.write(path, text + "\n")
    except OSError as error:
        raise UserError(
            f"--out: {path} cannot be written ({error.strerror}); give a file in a folder with space and "
            "write permission"
        ) from error
