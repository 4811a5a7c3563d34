"""Hardware files: a `Cluster` as JSON on the disk."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from meshwright.hardware.cluster import Cluster, from_json, to_json
from meshwright.spec.errors import UserError, did_you_mean


def read(path: Path) -> Cluster:
    """The cluster of a hardware file. Raises `UserError`."""
    if not path.is_file():
        near = did_you_mean(path.name, [beside.name for beside in path.parent.glob("*.json")])
        raise UserError(f"there is no hardware file {path}{near or '; meshwright profile --out writes one'}")
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
        return from_json(tree, str(path))
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read as JSON ({error})") from None
    except RecursionError:
        raise UserError(
            f"{path}: its lists or tables are nested too deep to be read; a hardware file has a few levels, "
            "as `meshwright profile --out FILE.json` writes them"
        ) from None


def check_writable(path: Path | None, flag: str = "--out") -> None:
    """Refuse a name that no file can be written under, before anything is done. Raises `UserError`."""
    if path is None:
        return
    folder = path.parent
    if path.is_dir() or not folder.is_dir() or not os.access(path if path.exists() else folder, os.W_OK):
        why = "is a folder" if path.is_dir() else f"cannot be written in the folder {folder.absolute()}"
        raise UserError(f"{flag}: {path} {why}; give the name of a file in a folder that is there")


def write(cluster: Cluster, path: Path) -> None:
    """Write it for people too: one line for each measured point. Raises `UserError`."""
    tree = to_json(cluster)
    measured = tree.pop("measured", None)
    text = json.dumps(tree, indent=2)
    if measured is not None:
        text = f'{text[:-2]},\n  "measured": {_with_rows(measured)}\n}}'
    try:
        path.write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise UserError(f"--out: {path} cannot be written ({error.strerror})") from None


def _with_rows(tree: Mapping[str, Any]) -> str:
    lines = []
    for name, value in tree.items():
        shown = json.dumps(value)
        if isinstance(value, (list, tuple)) and value:
            shown = "[\n" + ",\n".join(f"      {json.dumps(row)}" for row in value) + "\n    ]"
        lines.append(f"    {json.dumps(name)}: {shown}")
    return "{\n" + ",\n".join(lines) + "\n  }"
