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

Training waits for the copy to host memory only, and on a GPU its next update for that, on the device; the
rest happens behind it (CheckFreq, Mohan et al. 2021).
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from meshwright.checkpoint.background import BackgroundThread
from meshwright.checkpoint.claim import claim
from meshwright.checkpoint.directory import (
    candidates,
    latest_is_damaged,
    latest_line,
    latest_step,
    next_name,
    published,
)
from meshwright.checkpoint.disk import LATEST, MANIFEST, Disk
from meshwright.checkpoint.errors import BadCheckpointError, CheckpointError
from meshwright.checkpoint.frozen import FrozenTensors
from meshwright.checkpoint.lease import Lease
from meshwright.checkpoint.manifest import DTYPE_NAMES
from meshwright.checkpoint.no_second_tier import NoSecondTier
from meshwright.checkpoint.reader import (
    Reading,
    match_tensors,
    parse_manifest,
    read_manifest_text,
)
from meshwright.checkpoint.retention import Retention
from meshwright.checkpoint.save_plan import Tensors, describe
from meshwright.checkpoint.second_tier import SecondTier
from meshwright.checkpoint.staging import Forms, StreamedImage
from meshwright.checkpoint.uploads import CopyPolicy
from meshwright.checkpoint.weights import WeightPart
from meshwright.checkpoint.writer import Writer
from meshwright.comm.control import Control
from meshwright.comm.traffic_counter import TrafficCounter


class CheckpointStore:
    """The checkpoints of one directory.

    `control` joins the ranks that save and load together, by default this process alone; a store that saves
    asynchronously needs one of its own. Every method is collective over it and is called on all its ranks in
    the same order, except `poll` and `close`. The store holds the directory's lease from the first save
    (or `claim`) until `close`; a reader needs none. `lease` is that of this directory (`Lease.beside`), by
    default an own one. The newest `keep` checkpoints are kept, and those of steps that `keep_every` divides.
    With `remote` each `remote_every`-th is copied to that URL, too, as `second_tier` says.

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
        remote: str | None = None,
        remote_every: int = 1,
    ) -> None:
        if keep < 1:
            raise CheckpointError(f"checkpoint.keep is {keep}, it must be at least 1")
        self.directory = Path(directory).absolute()
        self.warnings: list[str] = []
        self._disk = disk or Disk()
        self._wire = wire or TrafficCounter()
        self._ranks = control or Control()
        self._lease = lease or Lease(self.directory, "meshwright", disk=self._disk)
        self.second_tier = NoSecondTier()
        if remote is not None:
            copies = CopyPolicy(remote_every, keep, keep_every)
            self.second_tier = SecondTier(
                self.directory, remote, copies, self._ranks, self._lease, self._disk, self.warnings
            )
        self._retention = Retention(
            self.directory, keep, keep_every, self._disk, self.warnings, self.second_tier.in_use
        )
        self._writer = Writer(self.directory, self._ranks, self._lease, self._disk, self.warnings)
        aside = Writer(self.directory, self._ranks, self._lease, self._disk, self.warnings)
        self.frozen = FrozenTensors(aside, self._wire)
        self.published: int | None = None
        """The step that this store published last, once this rank knows that it is."""
        self._behind = BackgroundThread()

    # -- writing ---------------------------------------------------------------

    def claim(self) -> None:
        """Become the directory's one writer; remove what dead saves left.

        Raises when another run is alive, and when a rank sees another directory than rank 0. Call it when a
        run starts, so that it fails before it has trained anything.
        """
        if not self._writer.claimed:
            self._behind.join()
            claim(self.directory, self._ranks, self._lease, self._disk)
            self._writer.claimed = True

    def save(self, step: int, tensors: Tensors, state: Mapping[str, Any], asynchronous: bool = False) -> None:
        """Publish a checkpoint of `tensors` (this rank's) and of rank 0's JSON `state` under `step`.

        Returns when the tensors may be changed: when it is published, or, when `asynchronous`, right after
        the copy to host memory, which from a GPU is only issued: what changes the tensors there is issued
        after `fence`. Then `poll` raises a failure. Waits for a save that is in flight. Where anything fails
        on any rank, all ranks raise the same error, the partial directory is removed and older checkpoints
        stay.
        """
        self._behind.join()
        text, description = self._ranks.together(lambda: self._prepare(tensors, state))
        self.claim()
        self._writer.plan.agree(description)
        image = self._ranks.together(lambda: self._writer.image(tensors, asynchronous))

        def publish(temporary: Path, parts: list[Any]) -> None:
            self._publish(temporary, step, json.loads(text), parts)

        if not asynchronous:
            self._writer.commit(step, image, publish)
            self.published = step
            return

        def commit() -> None:
            self._writer.commit(step, image, publish)
            self.published = step

        self._behind.start(f"checkpoint of step {step}", commit)

    def fence(self) -> None:
        """Let what training issues from now on, which may change what is saved, wait for copies of it."""
        self._writer.fence()

    def save_parts(
        self, step: int, forms: Forms, parts: Iterable[WeightPart], state: Mapping[str, Any]
    ) -> None:
        """Publish a checkpoint of tensors that come part by part, one of which is in memory at a time.

        `forms` has the dtype and the shape of each tensor by name; its parts cover it, in any dtype. This
        process is alone. Errors are those of `save`, and what `parts` raises.
        """
        if self._ranks.size > 1:
            raise CheckpointError("parts of tensors are saved by one process alone")
        self._behind.join()
        text = json.dumps(dict(state))
        self.claim()
        described = {name: [DTYPE_NAMES[dtype], list(shape), 0] for name, (dtype, shape) in forms.items()}
        self._writer.plan.agree(described)

        def publish(temporary: Path, reported: list[Any]) -> None:
            self._publish(temporary, step, json.loads(text), reported)

        self._writer.commit(step, StreamedImage(forms, parts), publish)
        self.published = step

    def save_frozen(self, tensors: Tensors) -> None:
        """Write `tensors` (this rank's), which no step changes, for all checkpoints from now on.

        Nothing is written where no rank has any, or where checkpoints refer to them already.
        """
        self._behind.join()
        self._ranks.together(self._behind.raise_error)
        if self.frozen.name is None and self._ranks.any(bool(tensors)):
            self.claim()
            self.frozen.save(tensors)

    def poll(self) -> None:
        """Raise what a background save raised, once, or that the lease is lost. Local: call it every step.

        All ranks get the same sentence, but maybe a step apart: a trainer that stops for it agrees with its
        peers first.
        """
        if self._lease.lost:
            self._lease.check()
        if not self.busy:
            self._behind.join()
            self._behind.raise_error()

    @property
    def busy(self) -> bool:
        """True if a background save is in progress on this rank."""
        return self._behind.busy

    def wait(self) -> None:
        """Wait for the save in flight; raise on every rank what it raised, unless `poll` did."""
        self._behind.join()
        self._ranks.together(self._behind.raise_error)

    def close(self) -> None:
        """Finish the save in flight, give back the lease, and raise a failure that was not raised yet.

        What is not in the second tier yet is told, and not waited for: `second_tier.wait` does that.
        """
        self._behind.join()
        self.second_tier.close()
        if self._writer.claimed and self._ranks.rank == 0:
            self._lease.release()
        self._writer.claimed = False
        self._behind.raise_error()

    # -- the second tier -------------------------------------------------------

    def fetch(self, check: Callable[[dict[str, Any]], None]) -> None:
        """Fetch the newest checkpoint of the second tier where the directory has none, or an older one.

        `check` is given its state first, and may raise UserError. What is wrong there is in `warnings`, but
        where the directory has no checkpoint: then UserError is raised.
        """
        self._behind.join()
        self.claim()
        self.second_tier.fetch(check)

    def copy(self, step: int) -> None:
        """Copy a published checkpoint to the second tier, behind training, unless it is there; local."""
        path = published(self.directory).get(step) if self._ranks.rank == 0 else None
        if path is not None:
            self.second_tier.send(path)

    # -- reading ---------------------------------------------------------------

    def latest(self) -> int | None:
        """Return the step to resume from, None where nothing was published. `load` may find it damaged.

        Where LATEST itself is damaged, `warnings` says which step is taken instead.
        """
        self._behind.join()
        return self._ranks.on_first(self._latest)

    def go_back(self, step: int) -> None:
        """Make a published step the latest: from there the run goes on, and later steps are abandoned.

        Without it a run that ends before its next save would be resumed from a step that it had given up.
        """
        self._behind.join()

        def point() -> None:
            (path,) = candidates(self.directory, step)
            with self._writer.explained("go back to", step), self._lease.fenced():
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
        self._behind.join()
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
        reading = Reading(path, manifest, tensors, self._disk)
        self._ranks.together(reading.read)
        reading.commit(self._wire)
        self.frozen.refer_to(manifest)
        return manifest.state

    # -- the steps of a save ---------------------------------------------------

    def _prepare(self, tensors: Tensors, state: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
        """Return the state's text, and a description of the tensors that this rank holds."""
        self._behind.raise_error()
        return json.dumps(dict(state)), describe(tensors, self._ranks.rank)

    def _publish(self, temporary: Path, step: int, state: dict[str, Any], parts: list[Any]) -> None:
        """On rank 0: the manifest's root, one rename, LATEST, and the removal of old checkpoints."""
        token = temporary.name.rpartition("-")[2]
        with self._writer.explained("publish", step):
            self._lease.check()
            manifest = self.frozen.added_to(self._writer.manifest(step, state, parts))
            self._disk.write_file(temporary / MANIFEST, [memoryview(manifest.render().encode())])
            self._disk.sync_directory(temporary)  # every rank's files have their names by now
            with self._lease.fenced():
                target = next_name(self.directory, step)
                self._disk.rename(temporary, target)
                self._disk.sync_directory(self.directory)
                self._disk.replace_file(self.directory / LATEST, latest_line(target.name), token)
                self._retention.retire(token)
        self._retention.sweep()
        self.second_tier.published(target)
