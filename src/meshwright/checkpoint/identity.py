"""Which weights a checkpoint holds, without reading them."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any, NamedTuple

from meshwright.checkpoint.directory import candidates
from meshwright.checkpoint.disk import Disk
from meshwright.checkpoint.reader import parse_manifest, read_manifest_text, read_part


class Identity(NamedTuple):
    """Step and state of a checkpoint, and a SHA-256 of the names, places and hashes of its weights."""

    step: int
    sha256: str
    state: dict[str, Any]


def newest(folder: Path) -> Identity:
    """Return the identity of the checkpoint in a folder that a run would go on from.

    Raises `UserError` without one, and BadCheckpointError for a manifest that cannot be trusted.
    """
    path, disk = candidates(folder, None)[0], Disk()
    manifest = parse_manifest(path, read_manifest_text(path, disk))
    pieces = [
        [name, piece.offsets, piece.sizes, piece.sha256]
        for number in range(manifest.part_count)
        for name, listed in read_part(path, manifest, number, disk).tensors.items()
        for piece in listed
        if name.startswith("model/")
    ]
    text = json.dumps(sorted(pieces))
    return Identity(manifest.step, hashlib.sha256(text.encode()).hexdigest(), manifest.state)
