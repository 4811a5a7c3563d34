"""Tensors that no step changes: written once for all checkpoints of a directory, which refer to them.

DIR/frozen-0123456789abcdef/     like the directory of a checkpoint, named by what it holds
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from meshwright.checkpoint.directory import published
from meshwright.checkpoint.disk import FROZEN, MANIFEST
from meshwright.checkpoint.errors import BadCheckpointError, SaveError, reading
from meshwright.checkpoint.manifest import Manifest
from meshwright.checkpoint.reader import Reading, match_tensors, parse_manifest, read_manifest_text
from meshwright.checkpoint.save_plan import Tensors, describe
from meshwright.checkpoint.writer import Writer
from meshwright.comm.traffic_counter import TrafficCounter


class FrozenTensors:
    """The tensors of a run that no step changes, in a directory beside its checkpoints.

    `name` is that of the directory which further checkpoints refer to; None where there is none. Rank 0 keeps
    its manifest, so that a save reads nothing of it.
    """

    def __init__(self, writer: Writer, wire: TrafficCounter) -> None:
        self.name: str | None = None
        self._manifest: Manifest | None = None
        self._writer, self._wire = writer, wire

    def save(self, tensors: Tensors) -> None:
        """Write `tensors` (this rank's), unless they are there; collective.

        Directories that no checkpoint refers to are removed.
        """
        writer = self._writer
        description = writer.ranks.together(lambda: describe(tensors, writer.ranks.rank))
        writer.plan.agree(description)
        image = writer.ranks.together(lambda: writer.image(tensors, asynchronous=False))
        names: list[str] = []
        writer.commit(0, image, lambda temporary, parts: names.append(self._publish(temporary, parts)))
        self.name = writer.ranks.broadcast(names[0] if names else None)

    def load(self, name: str | None, tensors: Tensors) -> None:
        """Fill `tensors` in place from the directory `name`, of any layout; nothing for None. Collective."""
        self.name = name
        if name is None:
            return
        path, ranks, disk = self._writer.directory / name, self._writer.ranks, self._writer.disk
        text = ranks.on_first(lambda: read_manifest_text(path, disk))
        manifest = ranks.together(lambda: parse_frozen(path, text))
        ranks.together(lambda: match_tensors(manifest, tensors, path))
        found = Reading(path, manifest, tensors, disk)
        ranks.together(found.read)
        found.commit(self._wire)
        self._manifest = manifest

    def refer_to(self, checkpoint: Manifest) -> None:
        """Let further checkpoints refer to the directory that `checkpoint` refers to, if there is one."""
        self.name, self._manifest = checkpoint.frozen, checkpoint.frozen_part()

    def fields(self) -> dict[str, str]:
        """Fields of a checkpoint's state by which `load` finds the directory."""
        return {} if self.name is None else {"frozen": self.name}

    def added_to(self, manifest: Manifest) -> Manifest:
        """The manifest of a checkpoint that refers to these tensors, too.

        Raises SaveError where their directory is gone: the checkpoint could not be loaded.
        """
        if self.name is None or self._manifest is None:
            return manifest
        path = self._writer.directory / self.name
        if not path.is_dir():
            raise SaveError(
                f"{path} is gone, and with it the tensors that no step changes; put it back, or no "
                f"checkpoint here can be loaded"
            )
        return manifest.with_frozen(self._manifest, self.name)

    def _publish(self, temporary: Path, parts: list[Any]) -> str:
        """On rank 0: the root and one rename; returns the new name."""
        writer, directory, disk = self._writer, self._writer.directory, self._writer.disk
        manifest = self._manifest = writer.manifest(0, {}, parts)
        name = _name_of(manifest)
        with writer.explained("publish", 0):
            writer.lease.check()
            disk.write_file(temporary / MANIFEST, [memoryview(manifest.render().encode())])
            disk.sync_directory(temporary)
            with writer.lease.fenced():
                used = self._used()
                for old in directory.glob(f"{FROZEN}*"):
                    if old.name not in {*used, name}:
                        disk.remove_tree(old)
                if (directory / name).exists():
                    disk.remove_tree(temporary)
                else:
                    disk.rename(temporary, directory / name)
                disk.sync_directory(directory)
        return name

    def _used(self) -> set[str]:
        """The directories that checkpoints refer to; all, where a checkpoint is damaged."""
        directory, used = self._writer.directory, set[str]()
        for path in published(directory).values():
            try:
                manifest = parse_manifest(path, read_manifest_text(path, self._writer.disk))
            except BadCheckpointError:
                return {path.name for path in directory.glob(f"{FROZEN}*")}
            if manifest.frozen is not None:
                used.add(manifest.frozen)
        return used


def parse_frozen(path: Path, text: str) -> Manifest:
    """Return the manifest of a directory of frozen tensors, checked. Raises BadCheckpointError."""
    with reading(path / MANIFEST):
        manifest = Manifest.parse(text)
    if _name_of(manifest) != path.name:
        raise BadCheckpointError(f"{path} holds other tensors than its name says")
    return manifest


def _name_of(manifest: Manifest) -> str:
    """The name of a directory, which depends on all its bytes."""
    parts = json.dumps([[file, digest] for file, _, digest in manifest.parts])
    return f"{FROZEN}{hashlib.sha256(parts.encode()).hexdigest()[:16]}"
