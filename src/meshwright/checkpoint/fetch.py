"""Fetch the newest whole checkpoint of a store into a checkpoint directory, every byte verified.

It is put together under a temporary name beside its place, so that a reader sees a whole checkpoint or none.
"""

from __future__ import annotations

import errno
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from meshwright.checkpoint.directory import latest_line, next_name, published, read_latest, step_of
from meshwright.checkpoint.disk import LATEST, MANIFEST, TEMPORARY, Disk
from meshwright.checkpoint.errors import BadCheckpointError, CheckpointError, SaveError, UnreadableError
from meshwright.checkpoint.frozen import parse_frozen
from meshwright.checkpoint.inspect import verify_part
from meshwright.checkpoint.lease import Lease
from meshwright.checkpoint.manifest import Manifest
from meshwright.checkpoint.reader import read_part
from meshwright.checkpoint.remote_checkpoints import SENT, answering, remote_checkpoints, sent_names
from meshwright.checkpoint.uploads import in_parallel
from meshwright.units import gigabytes

CheckState = Callable[[dict[str, Any]], None]
"""Raises `UserError` for the state of a checkpoint that a run must not go on from."""
MOST_TOLD = 3
"""Damaged files of a checkpoint that a sentence names."""


class Fetcher:
    """One fetch from the store at `url` into a checkpoint `directory`, whose lease is held; for rank 0."""

    def __init__(self, directory: Path, url: str, lease: Lease, disk: Disk, warnings: list[str]) -> None:
        self._directory, self._lease, self._disk, self._warnings = directory, lease, disk, warnings
        self._own, self._intact = _own_step(directory)
        # Where the directory has what to go on from, a store that does not answer keeps no restart waiting.
        self._remote = remote_checkpoints(url, tries=None if self._own is None else 1)
        self._latest: str | None = None

    def newest(self, check: CheckState) -> dict[str, Any] | None:
        """Fetch the newest whole checkpoint that is newer than the directory's; return what to tell of it.

        None where there is none. One that is not whole, or damaged, is passed over for the one before, which
        is a sentence in the warnings, as is a store that does not answer while the directory has one. Raises
        `UserError` where the directory has none and the store does not answer, or has damaged ones alone, and
        what `check` raises of the state.
        """
        failures: list[str] = []
        try:
            for name in self._candidates():
                try:
                    told = self._fetch(name, check)
                except BadCheckpointError as error:
                    failures.append(str(error))
                    continue
                if failures:
                    self._warnings.append(f"{'; '.join(failures)}; {self._remote}/{name} is used instead")
                return told
        except (UnreadableError, SaveError) as error:
            if self._own is None:
                raise
            failures.append(str(error))
        if failures and self._own is None:
            raise CheckpointError(f"no checkpoint in {self._remote} can be used: {'; '.join(failures)}")
        if failures:
            self._warnings.append(f"{'; '.join(failures)}; that of step {self._own} here is used instead")
        return None

    def _candidates(self) -> list[str]:
        """The checkpoints of the store that are newer than the directory's, best first.

        Where the store's LATEST is what this directory's run made it, all that came after is here, and if an
        earlier step is LATEST here, the run went back to it.
        """
        with answering():
            self._latest = self._remote.latest()
            if self._own is not None and self._latest is not None:
                ours = self._intact and self._latest in sent_names(self._directory)
                if ours or step_of(self._latest) <= self._own:
                    return []
            history = self._remote.history()
        return [name for name in history if self._own is None or step_of(name) > self._own]

    def _fetch(self, name: str, check: CheckState) -> dict[str, Any]:
        """Make a checkpoint of the store one of the directory, and its LATEST."""
        begun = time.perf_counter()
        with answering():
            text, manifest = self._remote.manifest(name)
        check(manifest.state)
        frozen, fetched = manifest.frozen, 0
        if frozen is not None and not (self._directory / frozen).is_dir():
            with answering():
                frozen_text, its = self._remote.manifest(frozen)
            parse_frozen(self._directory / frozen, frozen_text)
            fetched += self._fetch_folder(frozen, frozen_text, its, lambda: self._directory / frozen)
        fetched += self._fetch_folder(name, text, manifest, lambda: next_name(self._directory, manifest.step))
        with self._saving(name), self._lease.fenced():
            latest = published(self._directory)[manifest.step].name
            for file, there in ((LATEST, latest), (SENT, self._latest)):
                if there is not None:
                    line = latest_line(there)
                    self._disk.replace_file(self._directory / file, line, secrets.token_hex(6))
        seconds = round(time.perf_counter() - begun, 3)
        return {
            "step": manifest.step,
            "source": f"{self._remote}/{name}",
            "bytes": fetched,
            "seconds": seconds,
        }

    def _fetch_folder(self, name: str, text: str, manifest: Manifest, target: Callable[[], Path]) -> int:
        """Fetch a folder, verify it and give it its name; return the bytes. Raises BadCheckpointError."""
        temporary = self._directory / f"{TEMPORARY}fetch-{secrets.token_hex(6)}"
        try:
            with self._saving(name):
                self._disk.make_directory(temporary)
            files = self._fetch_files(name, temporary, manifest)
            with self._saving(name):
                self._disk.write_file(temporary / MANIFEST, [memoryview(text.encode())])
                for file in files:
                    with self._disk.opened(temporary / file) as (descriptor, _):
                        self._disk.sync(descriptor)
                self._disk.sync_directory(temporary)
                with self._lease.fenced():
                    self._disk.rename(temporary, target())
                    self._disk.sync_directory(self._directory)
        except BaseException as error:
            with self._saving(name):
                if os.path.lexists(temporary):
                    self._disk.remove_tree(temporary)
            if isinstance(error, BadCheckpointError):
                sentence = str(error).replace(str(temporary), f"{self._remote}/{name}")
                raise BadCheckpointError(sentence) from error
            raise
        return sum(files.values())

    def _fetch_files(self, name: str, temporary: Path, manifest: Manifest) -> dict[str, int]:
        """Fetch the parts of a manifest and the files that they list, verify all, and return their bytes."""
        own = [number for number in range(manifest.part_count) if manifest.folder_of(number) == "."]
        parts = (
            {}
            if manifest.inside is not None
            else {manifest.parts[n].file: manifest.parts[n].bytes for n in own}
        )
        self._download(name, temporary, parts)
        files: dict[str, int] = {}
        for number in own:
            files |= read_part(temporary, manifest, number, self._disk).files
        self._download(name, temporary, files)
        problems: list[str] = []
        for number in own:
            verify_part(temporary, manifest, number, self._disk, problems)
        if problems:
            more = f"; and {len(problems) - MOST_TOLD} more" if len(problems) > MOST_TOLD else ""
            raise BadCheckpointError("; ".join(problems[:MOST_TOLD]) + more)
        return parts | files

    def _download(self, name: str, temporary: Path, files: Mapping[str, int]) -> None:
        for file, size in files.items():
            there = self._sizes.get(f"{name}/{file}")
            if there != size:
                told = "is missing" if there is None else f"has {there} bytes where its manifest says {size}"
                raise BadCheckpointError(f"{self._remote}/{name}/{file} {told}")
        with self._saving(name):
            if (free := shutil.disk_usage(self._directory).free) < (needed := sum(files.values())):
                lack = f"it needs {gigabytes(needed)} and {gigabytes(free)} are free"
                raise SaveError(f"no space in {self._directory} for {self._remote}/{name}: {lack}")
        fetch = self._remote.folder.fetch
        with answering():
            in_parallel(
                [partial(fetch, f"{name}/{file}", temporary / file, size) for file, size in files.items()]
            )

    @cached_property
    def _sizes(self) -> dict[str, int]:
        with answering():
            return self._remote.folder.sizes()

    @contextmanager
    def _saving(self, name: str) -> Iterator[None]:
        """Raise SaveError for an error of this host's disk."""
        try:
            yield
        except OSError as error:
            reason = error.strerror or str(error)
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                reason = "no space is left"
            raise SaveError(
                f"could not fetch {self._remote}/{name} into {self._directory}: {reason}"
            ) from error


def _own_step(directory: Path) -> tuple[int | None, bool]:
    """Return the step that the directory would go on from, None where it has none, and whether that is what
    its LATEST names: else newer ones may have been here."""
    steps, latest = published(directory), read_latest(directory)
    if latest is not None and latest.is_dir():
        return step_of(latest.name), True
    return max(steps, default=None), False
