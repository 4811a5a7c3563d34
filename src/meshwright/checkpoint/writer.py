"""Writing of one directory by all ranks under a temporary name: pieces, parts of the manifest, checks.

What is written is published by one rename, which the caller does on rank 0: `store.py`, in a
thread where a save is asynchronous.
"""

from __future__ import annotations

import errno
import hashlib
import os
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from meshwright.checkpoint.disk import LATEST, TEMPORARY, Disk, part_file, rank_file
from meshwright.checkpoint.errors import SaveError
from meshwright.checkpoint.lease import Lease
from meshwright.checkpoint.manifest import Manifest, ManifestPart, PartFile, join, lists, report
from meshwright.checkpoint.save_plan import SavePlan, Tensors
from meshwright.checkpoint.staging import HostImage, LiveImage, devices_of
from meshwright.comm.control import Control
from meshwright.spec.tiling import tiling
from meshwright.units import gigabytes

PARTS = 128
"""Most parts that a manifest has."""


class Writer:
    """The writer of directories in `directory` with tensors of one set of names and shapes.

    A partial directory that cannot be removed is a sentence in `warnings`.
    """

    def __init__(
        self, directory: Path, ranks: Control, lease: Lease, disk: Disk, warnings: list[str]
    ) -> None:
        self.directory, self.ranks, self.lease, self.disk = directory, ranks, lease, disk
        self.plan = SavePlan(ranks)
        self.claimed = False
        """True while the directory's lease is held."""
        self._warnings = warnings
        self._copy = HostImage()

    def image(self, tensors: Tensors, asynchronous: bool) -> LiveImage:
        """This rank's pieces as they are now: a copy, but where training waits and all are in host memory."""
        share = self.plan.own_share(tensors)
        if not asynchronous and not devices_of(share):
            return LiveImage(share)
        self._copy.stage(share)
        return self._copy

    def fence(self) -> None:
        """Let what training issues from now on wait for the copies of `image`, on the device."""
        self._copy.fence()

    def commit(self, step: int, image: LiveImage, publish: Callable[[Path, list[Any]], None]) -> None:
        """Write the image, and `publish` it on rank 0, given the directory and the reported parts.

        Where anything fails on any rank, all ranks raise the same error, and the directory is removed.
        """
        temporary = self.directory / self.ranks.on_first(lambda: self._open(step))
        try:
            rows = self.ranks.together(lambda: self._write_pieces(temporary, step, image))
            count = max(tiling().manifest_ranks, -(-self.ranks.size // PARTS))
            listed = self.ranks.gather(rows, within=count)
            part = self.ranks.together(lambda: self._write_part(temporary, step, listed))
            parts = [each for each in self.ranks.gather(part) if each is not None]
            files = self.ranks.broadcast([list(each["file"]) for each in parts])
            first = self.ranks.rank - self.ranks.rank % count
            self.ranks.together(lambda: self._check_part(temporary, step, files, first, rows))
            self.ranks.on_first(lambda: publish(temporary, parts))
        except Exception:
            if self.ranks.rank == 0:
                self._discard(temporary)
            raise

    def manifest(self, step: int, state: Mapping[str, Any], parts: list[Any]) -> Manifest:
        """Return the root over the reported parts."""
        tensors, spreads, files = join(self.plan.forms, parts)
        return Manifest(
            step=step,
            saved_at=datetime.now(UTC).isoformat(timespec="seconds"),
            ranks=self.ranks.size,
            generation=self.lease.generation,
            state=dict(state),
            tensors=tensors,
            spreads=spreads,
            parts=files,
        )

    def _open(self, step: int) -> str:
        """On rank 0: make the directory under a temporary name, which is returned."""
        temporary = self.directory / f"{TEMPORARY}step-{step:08d}-{secrets.token_hex(6)}"
        with self.explained("begin", step):
            if shutil.disk_usage(self.directory).free < self.plan.bytes:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            self.disk.make_directory(temporary)
        return temporary.name

    def _write_pieces(self, temporary: Path, step: int, image: LiveImage) -> list[list[Any]]:
        """Write this rank's file, if it has any piece. Returns the pieces' rows."""
        if not image.bytes:
            return []
        with self.explained("write", step):
            self.disk.write_file(temporary / rank_file(self.ranks.rank), image.data())
        return image.rows()

    def _write_part(self, temporary: Path, step: int, listed: list[list[Any]]) -> dict[str, Any] | None:
        """Write the part of the manifest with the pieces of this rank and the next ones, and report it."""
        part = ManifestPart.of(listed, self.ranks.rank)
        if not part.files:
            return None
        content = part.render().encode()
        file = PartFile(part_file(self.ranks.rank), len(content), hashlib.sha256(content).hexdigest())
        with self.explained("write", step):
            self.disk.write_file(temporary / file.file, [memoryview(content)])
        return report(part, file)

    def _check_part(
        self, temporary: Path, step: int, files: list[list[Any]], first: int, rows: list[list[Any]]
    ) -> None:
        """Raise `SaveError` unless the part that is to be published lists the `rows` of this rank's pieces.

        `files` are the parts of the root; rank `first` wrote this rank's.
        """
        name, content = part_file(first), b""
        if not rows:
            return
        with self.explained("check", step):
            content = (temporary / name).read_bytes()
        told = [name, len(content), hashlib.sha256(content).hexdigest()]
        if told not in files or not lists(content, self.ranks.rank, rows):
            raise SaveError(
                f"{name} of the checkpoint of step {step} in {self.directory} does not list what rank "
                f"{self.ranks.rank} wrote, so it is not published: memory, a disk or the network changed "
                f"it; earlier checkpoints are kept"
            )

    def _discard(self, temporary: Path) -> None:
        token = temporary.name.rpartition("-")[2]
        try:
            for path in (temporary, self.directory / f"{TEMPORARY}{LATEST}-{token}"):
                if os.path.lexists(path):
                    self.disk.remove_tree(path)
        except OSError as error:
            self._warnings.append(f"the partial checkpoint {temporary} could not be removed: {error}")

    @contextmanager
    def explained(self, action: str, step: int) -> Iterator[None]:
        """Turn an OSError into a SaveError about an action on the checkpoint of a step.

        Where a file or directory has vanished, another run may have taken over and swept it away.
        """
        try:
            yield
        except OSError as error:
            if error.errno == errno.ENOENT and self.claimed:
                self.lease.check()
            reason = f"could not {action} the checkpoint of step {step} in {self.directory}: "
            reason += error.strerror or str(error)
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                reason = f"no space for the checkpoint of step {step} in {self.directory}: {self._lack()}"
            raise SaveError(f"{reason}; earlier checkpoints are kept") from error

    def _lack(self) -> str:
        """Return what the file system, which has just refused to store more, has none of."""
        room = os.statvfs(self.directory)
        free = room.f_bavail * room.f_frsize
        if free < self.plan.bytes:
            return f"it needs {gigabytes(self.plan.bytes)} and {gigabytes(free)} are free"
        if room.f_files and not room.f_favail:
            return "no inode is left for another file"
        return f"the disk refuses it although {gigabytes(free)} are free; a quota may be used up"
