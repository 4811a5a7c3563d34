"""Save and load training state on any layout, so that a crash at any moment costs no published checkpoint.

    DIR/step-00000020/manifest.json      the tensors, the parts of the manifest and their SHA-256
                      part-00000.json    where each piece of some ranks lies, with its SHA-256
                      rank-00000.bin     the pieces that rank 0 wrote
    DIR/LATEST                           the name of the newest
    DIR/frozen-0123456789abcdef/         tensors that no step changes, once for all checkpoints
    DIR/lease.json, lease.lock           who may write

A save: every rank writes its own pieces into a directory with a temporary name and syncs them; one of every
few ranks lists theirs in a part of the manifest, which each compares with what it wrote; rank 0 writes the
root over the parts, syncs the directory, and renames once; then LATEST is replaced and old checkpoints are
removed. A reader sees a whole checkpoint or none. Nothing is pickled.

Training waits for the copy to host memory only; the rest happens behind it (CheckFreq, Mohan et al. 2021).
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import secrets
import shutil
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from meshwright.checkpoint.claim import claim
from meshwright.checkpoint.directory import (
    candidates,
    latest_is_damaged,
    latest_line,
    latest_step,
    published,
)
from meshwright.checkpoint.disk import (
    FROZEN,
    LATEST,
    MANIFEST,
    TEMPORARY,
    Disk,
    parse_step_name,
    part_file,
    rank_file,
    step_name,
)
from meshwright.checkpoint.errors import BadCheckpointError, CheckpointError, SaveError
from meshwright.checkpoint.lease import Lease
from meshwright.checkpoint.manifest import Manifest, Part, PartFile, join, lists, report
from meshwright.checkpoint.reader import (
    Reading,
    frozen_name,
    match_tensors,
    parse_frozen,
    parse_manifest,
    read_manifest_text,
)
from meshwright.checkpoint.retention import Retention
from meshwright.checkpoint.save_plan import SavePlan, Tensors, describe
from meshwright.checkpoint.staging import HostImage, LiveImage, devices_of
from meshwright.comm.control import Control
from meshwright.comm.mesh import TrafficCounter
from meshwright.spec.tiling import tiling
from meshwright.units import gigabytes

PARTS = 128
"""Most parts that a manifest has."""


class CheckpointStore:
    """The checkpoints of one directory.

    `control` joins the ranks that save and load together, by default this process alone; a store that saves
    asynchronously needs one of its own. Every method is collective over it and is called on all its ranks in
    the same order, except `poll` and `close`. The store holds the directory's lease from the first save
    (or `claim`) until `close`; a reader needs none. `lease` is that of this directory (`Lease.beside`), by
    default an own one. The newest `keep` checkpoints are kept, and those of steps that `keep_every` divides.

    `warnings` collects sentences about problems that did not stop the work: a fallback to an older
    checkpoint, an old one that could not be removed. `wire` records the bytes that replicas send each other
    on a load.
    """

    def __init__(
        self,
        directory: Path,
        keep: int,
        control: Control | None = None,
        *,
        keep_every: int = 0,
        lease: Lease | None = None,
        disk: Disk | None = None,
        wire: TrafficCounter | None = None,
    ) -> None:
        if keep < 1:
            raise CheckpointError(f"checkpoint.keep is {keep}, it must be at least 1")
        self.directory = Path(directory).absolute()
        self.warnings: list[str] = []
        self._disk = disk or Disk()
        self._retention = Retention(self.directory, keep, keep_every, self._disk, self.warnings)
        self._wire = wire or TrafficCounter()
        self._ranks = control or Control()
        self._lease = lease or Lease(self.directory, "meshwright", disk=self._disk)
        self._copy = HostImage()
        self._plan = SavePlan(self._ranks)
        self._claimed = False
        self.frozen: str | None = None
        """Name of the directory of what no step changes, which further checkpoints refer to."""
        self.published: int | None = None
        """The step that this store published last, once this rank knows that it is."""
        self._thread: threading.Thread | None = None
        self._failure: Exception | None = None

    # -- writing ---------------------------------------------------------------

    def claim(self) -> None:
        """Become the directory's one writer; remove what dead saves left.

        Raises when another run is alive, and when a rank sees another directory than rank 0. Call it when a
        run starts, so that it fails before it has trained anything.
        """
        if not self._claimed:
            self._join()
            claim(self.directory, self._ranks, self._lease, self._disk)
            self._claimed = True

    def save(self, step: int, tensors: Tensors, state: Mapping[str, Any], asynchronous: bool = False) -> None:
        """Publish a checkpoint of `tensors` (this rank's) and of rank 0's JSON `state` under `step`.

        Returns when the tensors may be changed: right after the copy to host memory when `asynchronous`
        (then `poll` raises a failure), else when it is published. Waits for a save that is in flight. Where
        anything fails on any rank, all ranks raise the same error, the partial directory is removed and older
        checkpoints stay.
        """
        self._join()
        text, description = self._ranks.together(lambda: self._prepare(tensors, state))
        self.claim()
        self._plan.agree(description)
        image = self._ranks.together(lambda: self._image(self._plan, tensors, asynchronous, self._copy))

        def publish(temporary: Path, parts: list[Any]) -> None:
            self._publish(temporary, step, json.loads(text), parts)

        if not asynchronous:
            self._commit(step, image, self._plan, publish)
            self.published = step
            return

        def commit() -> None:
            try:
                self._commit(step, image, self._plan, publish)
                self.published = step
            except Exception as error:
                self._failure = error

        self._thread = threading.Thread(target=commit, name=f"checkpoint of step {step}", daemon=True)
        self._thread.start()

    def save_frozen(self, tensors: Tensors) -> None:
        """Write `tensors` (this rank's), which no step changes, for all checkpoints from now on.

        Its directory is named by what it holds, so the same tensors are not kept twice. Directories that no
        checkpoint refers to are removed.
        """
        self._join()
        _, description = self._ranks.together(lambda: self._prepare(tensors, {}))
        self.claim()
        plan = SavePlan(self._ranks)
        plan.agree(description)
        image = self._ranks.together(lambda: self._image(plan, tensors, False, HostImage()))
        names: list[str] = []
        self._commit(
            0,
            image,
            plan,
            lambda temporary, parts: names.append(self._publish_frozen(temporary, plan, parts)),
        )
        self.frozen = self._ranks.broadcast(names[0] if names else None)

    def load_frozen(self, name: str, tensors: Tensors) -> None:
        """Fill `tensors` in place from the directory `name` of what no step changes, of any layout."""
        path = self.directory / name
        text = self._ranks.on_first(lambda: read_manifest_text(path, self._disk))
        manifest = self._ranks.together(lambda: parse_frozen(path, text))
        self._ranks.together(lambda: match_tensors(manifest, tensors, path))
        self._fill(path, manifest, tensors)
        self.frozen = name

    def poll(self) -> None:
        """Raise what a background save raised, once, or that the lease is lost. Local: call it every step.

        All ranks get the same sentence, but maybe a step apart: a trainer that stops for it agrees with its
        peers first.
        """
        if self._lease.lost:
            self._lease.check()
        if not self.busy:
            self._join()
            self._deliver()

    @property
    def busy(self) -> bool:
        """True if a background save is in progress on this rank."""
        return self._thread is not None and self._thread.is_alive()

    def wait(self) -> None:
        """Wait for the save in flight; raise on every rank what it raised, unless `poll` did."""
        self._join()
        self._ranks.together(self._deliver)

    def close(self) -> None:
        """Finish the save in flight, give back the lease, and raise a failure that was not raised yet."""
        self._join()
        if self._claimed and self._ranks.rank == 0:
            self._lease.release()
        self._claimed = False
        self._deliver()

    def _join(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _deliver(self) -> None:
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    # -- reading ---------------------------------------------------------------

    def latest(self) -> int | None:
        """Return the step to resume from, None where nothing was published. `load` may find it damaged.

        Where LATEST itself is damaged, `warnings` says which step is taken instead.
        """
        self._join()
        return self._ranks.on_first(self._latest)

    def go_back(self, step: int) -> None:
        """Make a published step the latest: from there the run goes on, and later steps are abandoned.

        Without it a run that ends before its next save would be resumed from a step that it had given up.
        """
        self._join()

        def point() -> None:
            (path,) = candidates(self.directory, step)
            with self._explained("go back to", step), self._lease.fenced():
                self._disk.replace_file(self.directory / LATEST, latest_line(path.name), secrets.token_hex(6))

        self._ranks.on_first(point)

    def load(
        self,
        step: int | None,
        tensors: Tensors,
        check: Callable[[dict[str, Any]], None] | None = None,
        converted: Collection[str] = (),
    ) -> dict[str, Any]:
        """Fill `tensors` in place from a checkpoint written under any layout; return its state.

        `step` None takes the latest, or, where that is damaged, the best before it, and says so in
        `warnings`; a damaged one asked for by number is refused. Every byte that is read is verified before
        the first tensor changes on any rank. `check` is given the state first and may raise UserError.
        Tensors with a name in `converted` may be stored in another dtype. Raises UserError when a tensor is
        missing or differs in shape or dtype, when all checkpoints are damaged, and when there is none.
        """
        self._join()
        failures: list[str] = []
        names = self._ranks.on_first(lambda: self._candidates(step))
        for name in names:
            try:
                state = self._load(self.directory / name, tensors, check, converted)
            except BadCheckpointError as error:
                if step is not None:
                    raise
                failures.append(str(error))
                self._retention.damaged.add(name)
                continue
            if failures:
                self.warnings.append(f"{'; '.join(failures)}; {self.directory / name} is used instead")
            return state
        raise CheckpointError(f"no checkpoint in {self.directory} can be used: {'; '.join(failures)}")

    def _candidates(self, step: int | None) -> list[str]:
        if step is None:
            self._latest()
        return [path.name for path in candidates(self.directory, step)]

    def _latest(self) -> int | None:
        """On rank 0: `latest_step`, with a warning where LATEST does not name it."""
        step = latest_step(self.directory)
        told = f"{self.directory / LATEST} is damaged; the highest step, step {step}, is used instead"
        if latest_is_damaged(self.directory) and told not in self.warnings:
            self.warnings.append(told)
        return step

    def _load(
        self,
        path: Path,
        tensors: Tensors,
        check: Callable[[dict[str, Any]], None] | None,
        converted: Collection[str],
    ) -> dict[str, Any]:
        text = self._ranks.on_first(lambda: read_manifest_text(path, self._disk))
        manifest = self._ranks.together(lambda: parse_manifest(path, text))
        if check is not None:
            self._ranks.together(lambda: check(manifest.state))
        self._ranks.together(lambda: match_tensors(manifest, tensors, path, converted))
        self._fill(path, manifest, tensors)
        self.frozen = manifest.frozen
        return manifest.state

    def _fill(self, path: Path, manifest: Manifest, tensors: Tensors) -> None:
        reading = Reading(path, manifest, tensors, self._disk)
        self._ranks.together(reading.read)
        reading.commit(self._wire)

    # -- the steps of a save ---------------------------------------------------

    def _prepare(self, tensors: Tensors, state: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
        """Return the state's text, and a description of the tensors that this rank holds."""
        self._deliver()
        return json.dumps(dict(state)), describe(tensors, self._ranks.rank)

    @staticmethod
    def _image(plan: SavePlan, tensors: Tensors, asynchronous: bool, copy: HostImage) -> LiveImage:
        """This rank's pieces as they are now: in `copy`, unless training waits and all are on the host."""
        share = plan.own_share(tensors)
        if not asynchronous and not devices_of(share):
            return LiveImage(share)
        copy.stage(share)
        return copy

    def _commit(
        self, step: int, image: LiveImage, plan: SavePlan, publish: Callable[[Path, list[Any]], None]
    ) -> None:
        """Write the image, and publish it on rank 0."""
        temporary = self.directory / self._ranks.on_first(lambda: self._open(step, plan.bytes))
        try:
            rows = self._ranks.together(lambda: self._write_pieces(temporary, step, image))
            count = max(tiling().manifest_ranks, -(-self._ranks.size // PARTS))
            listed = self._ranks.gather(rows, within=count)
            part = self._ranks.together(lambda: self._write_part(temporary, step, listed))
            parts = [each for each in self._ranks.gather(part) if each is not None]
            files = self._ranks.broadcast([list(each["file"]) for each in parts])
            first = self._ranks.rank - self._ranks.rank % count
            self._ranks.together(lambda: self._check_part(temporary, step, files, first, rows))
            self._ranks.on_first(lambda: publish(temporary, parts))
        except Exception:
            if self._ranks.rank == 0:
                self._discard(temporary)
            raise

    def _open(self, step: int, needed: int) -> str:
        """On rank 0: make the directory of so many bytes under a temporary name, which is returned."""
        temporary = self.directory / f"{TEMPORARY}step-{step:08d}-{secrets.token_hex(6)}"
        with self._explained("begin", step):
            if shutil.disk_usage(self.directory).free < needed:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            self._disk.make_directory(temporary)
        return temporary.name

    def _write_pieces(self, temporary: Path, step: int, image: LiveImage) -> list[list[Any]]:
        """Write this rank's file, if it has any piece. Returns the pieces' rows."""
        if not image.bytes:
            return []
        with self._explained("write", step):
            self._disk.write_file(temporary / rank_file(self._ranks.rank), *image.data())
        return image.rows()

    def _write_part(self, temporary: Path, step: int, listed: list[list[Any]]) -> dict[str, Any] | None:
        """Write the part of the manifest with the pieces of this rank and the next ones, and report it."""
        part = Part.of(listed, self._ranks.rank)
        if not part.files:
            return None
        content = part.render().encode()
        file = PartFile(part_file(self._ranks.rank), len(content), hashlib.sha256(content).hexdigest())
        with self._explained("write", step):
            self._disk.write_file(temporary / file.file, memoryview(content))
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
        with self._explained("check", step):
            content = (temporary / name).read_bytes()
        told = [name, len(content), hashlib.sha256(content).hexdigest()]
        if told not in files or not lists(content, self._ranks.rank, rows):
            raise SaveError(
                f"{name} of the checkpoint of step {step} in {self.directory} does not list what rank "
                f"{self._ranks.rank} wrote, so it is not published: memory, a disk or the network changed "
                f"it; earlier checkpoints are kept"
            )

    def _publish(self, temporary: Path, step: int, state: dict[str, Any], parts: list[Any]) -> None:
        """On rank 0: the manifest's root, one rename, LATEST, and the removal of old checkpoints."""
        manifest = self._manifest(step, state, self._plan, parts)
        if self.frozen is not None:
            path = self.directory / self.frozen
            frozen = parse_frozen(path, read_manifest_text(path, self._disk))
            manifest = manifest.with_frozen(frozen, self.frozen)
        token = temporary.name.rpartition("-")[2]
        with self._explained("publish", step):
            self._lease.check()
            self._disk.write_file(temporary / MANIFEST, memoryview(manifest.render().encode()))
            self._disk.sync_directory(temporary)  # every rank's files have their names by now
            with self._lease.fenced():
                target = self._next_name(step)
                self._disk.rename(temporary, target)
                self._disk.sync_directory(self.directory)
                self._disk.replace_file(self.directory / LATEST, latest_line(target.name), token)
                self._retention.retire(token)
        self._retention.sweep()

    def _manifest(self, step: int, state: dict[str, Any], plan: SavePlan, parts: list[Any]) -> Manifest:
        tensors, spreads, files = join(plan.forms, parts)
        return Manifest(
            step=step,
            saved_at=datetime.now(UTC).isoformat(timespec="seconds"),
            ranks=self._ranks.size,
            generation=self._lease.generation,
            state=state,
            tensors=tensors,
            spreads=spreads,
            parts=files,
        )

    def _publish_frozen(self, temporary: Path, plan: SavePlan, parts: list[Any]) -> str:
        """On rank 0: the root of what no step changes, and one rename; returns the new name."""
        manifest = self._manifest(0, {}, plan, parts)
        name = frozen_name(manifest)
        with self._explained("publish", 0):
            self._lease.check()
            self._disk.write_file(temporary / MANIFEST, memoryview(manifest.render().encode()))
            self._disk.sync_directory(temporary)
            with self._lease.fenced():
                used = {found for path in published(self.directory).values() if (found := self._refers(path))}
                for old in self.directory.glob(f"{FROZEN}*"):
                    if old.name not in used:
                        self._disk.remove_tree(old)
                if name in used:
                    self._disk.remove_tree(temporary)
                else:
                    self._disk.rename(temporary, self.directory / name)
                self._disk.sync_directory(self.directory)
        return name

    def _refers(self, path: Path) -> str | None:
        """The directory of what no step changes that a checkpoint refers to."""
        return parse_manifest(path, read_manifest_text(path, self._disk)).frozen

    def _next_name(self, step: int) -> Path:
        existing = published(self.directory).get(step)
        parsed = parse_step_name(existing.name) if existing is not None else None
        return self.directory / step_name(step, parsed[1] + 1 if parsed else 0)

    def _discard(self, temporary: Path) -> None:
        token = temporary.name.rpartition("-")[2]
        try:
            for path in (temporary, self.directory / f"{TEMPORARY}{LATEST}-{token}"):
                if os.path.lexists(path):
                    self._disk.remove_tree(path)
        except OSError as error:
            self.warnings.append(f"the partial checkpoint {temporary} could not be removed: {error}")

    @contextmanager
    def _explained(self, action: str, step: int) -> Iterator[None]:
        """Turn an OSError into a SaveError about an action on the checkpoint of a step.

        Where a file or directory has vanished, another run may have taken over and swept it away.
        """
        try:
            yield
        except OSError as error:
            if error.errno == errno.ENOENT and self._claimed:
                self._lease.check()
            reason = f"could not {action} the checkpoint of step {step} in {self.directory}: "
            reason += error.strerror or str(error)
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                reason = f"no space for the checkpoint of step {step} in {self.directory}: {self._lack()}"
            raise SaveError(f"{reason}; earlier checkpoints are kept") from error

    def _lack(self) -> str:
        """Return what the file system, which has just refused to store more, has none of."""
        room = os.statvfs(self.directory)
        free = room.f_bavail * room.f_frsize
        if free < self._plan.bytes:
            return f"it needs {gigabytes(self._plan.bytes)} and {gigabytes(free)} are free"
        if room.f_files and not room.f_favail:
            return "no inode is left for another file"
        return f"the disk refuses it although {gigabytes(free)} are free; a quota may be used up"
