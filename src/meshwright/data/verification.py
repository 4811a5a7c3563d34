"""Verification of a folder of token shards: once, by one process, and from then on by its record."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal

import numpy as np

from meshwright.data.manifest import DOCUMENT, Manifest, ShardEntry, documents_file, tokens_file
from meshwright.data.publish import locked, sha256_file
from meshwright.data.verified import (
    FileState,
    Verified,
    drop_record,
    read_record,
    state_of,
    wait_for_tick,
    write_record,
)
from meshwright.spec.errors import UserError

Check = Literal["lazy", "files", "content"]
"""How much to verify on opening: 'lazy' compares a file's size and time with the record when it is mapped,
'files' those of every file at once, 'content' every byte with its SHA-256."""

_LOCK = "verified.lock"


class Verification:
    """Compares the files of `folder` with their manifest.

    `homes` are the folders that may hold a record of it, the one to write to first; `remedy` ends messages.
    """

    def __init__(self, folder: Path, manifest: Manifest, homes: list[Path], remedy: str) -> None:
        self._folder, self._manifest, self._homes, self._remedy = folder, manifest, homes, remedy

    def run(self, check: Check) -> dict[str, Verified]:
        """The files as they were verified, by the record where it holds, else by hashing what it does not
        hold for. Raises `UserError` that names the file.

        Of many processes that ask at once, one hashes and the others wait.
        """
        if check != "content" and (found := self._valid(check)) is not None:
            return found
        with locked(self._homes[0] / _LOCK, "data.cache"):
            if check != "content" and (found := self._valid(check)) is not None:
                return found  # another process made it meanwhile
            known = (self._record() or {}) if check != "content" else {}
            if check == "content":  # what turns out to be damaged must not stay recorded as verified
                drop_record(self._homes[0])
            states = self._states()
            wait_for_tick(states)
            self._hash([n for n, state in states.items() if n not in known or known[n].state != state])
            made = {n: Verified(state, self._manifest.files[n].sha256) for n, state in states.items()}
            write_record(self._homes[0], self._manifest.digest, made)
            return made

    def _record(self) -> dict[str, Verified] | None:
        """A record of these files, in whatever state."""
        hashes = {name: entry.sha256 for name, entry in self._manifest.files.items()}
        for home in self._homes:
            found = read_record(home, self._manifest.digest)
            if found is not None and {name: file.sha256 for name, file in found.items()} == hashes:
                return found
        return None

    def _valid(self, check: Check) -> dict[str, Verified] | None:
        """The record, unless the files are seen to be in another state."""
        found = self._record()
        if found is None or check == "lazy":
            return found
        return found if self._states() == {name: file.state for name, file in found.items()} else None

    def _states(self) -> dict[str, FileState]:
        """Every file's state. Raises `UserError` for one that is not there, or not of its size."""
        files = self._manifest.files
        paths = [self._folder / name for name in files]
        with ThreadPoolExecutor() as pool:  # a network file system takes its time for each
            found = list(pool.map(state_of, paths))
        states = {}
        for (name, entry), path, state in zip(files.items(), paths, found, strict=True):
            if Path(name).name != name or state is None:
                raise UserError(f"{path}: the manifest lists it, but it is not a file there; {self._remedy}")
            if state.size != entry.bytes:
                raise UserError(
                    f"{path}: has {state.size} bytes, its manifest says {entry.bytes}; {self._remedy}"
                )
            states[name] = state
        return states

    def _hash(self, names: list[str]) -> None:
        """Compare the SHA-256 of each file; look at the ids of tokens and the places of documents on the
        way."""
        looks = self._looks()

        def one(name: str) -> str:
            try:
                return sha256_file(self._folder / name, looks.get(name))
            except OSError as error:
                raise UserError(
                    f"{self._folder / name}: cannot be read ({error.strerror}); {self._remedy}"
                ) from error

        with ThreadPoolExecutor() as pool:  # hashing releases the interpreter's lock: one file per core
            for name, found in zip(names, pool.map(one, names), strict=True):
                wanted = self._manifest.files[name].sha256
                if found != wanted:
                    raise UserError(
                        f"{self._folder / name}: has the SHA-256 {found[:12]}…, its manifest says "
                        f"{wanted[:12]}…, so the file was altered; {self._remedy}"
                    )
                if name in looks and (fault := looks[name].fault()) is not None:
                    raise UserError(f"{self._folder / name}: {fault}; {self._remedy}")

    def _looks(self) -> dict[str, _TokensLook | _DocumentsLook]:
        looks: dict[str, _TokensLook | _DocumentsLook] = {}
        for number, shard in enumerate(self._manifest.shards):
            looks[tokens_file(number)] = _TokensLook(self._manifest)
            looks[documents_file(number)] = _DocumentsLook(shard)
        return looks


class _TokensLook:
    """Sees the chunks of a file of tokens."""

    def __init__(self, manifest: Manifest) -> None:
        self._dtype = np.dtype("<u2" if manifest.dtype == "uint16" else "<u4")
        self._vocab_size = manifest.vocab_size
        self._highest = -1

    def __call__(self, chunk: bytes) -> None:
        self._highest = max(self._highest, int(np.frombuffer(chunk, self._dtype).max()))

    def fault(self) -> str | None:
        """Problem of the file, as text."""
        if self._highest < self._vocab_size:
            return None
        return f"holds the token id {self._highest}, and its vocabulary has {self._vocab_size} entries"


class _DocumentsLook:
    """Sees the chunks of a file of documents."""

    def __init__(self, shard: ShardEntry) -> None:
        self._shard = shard
        self._rest = b""
        self._last = -1
        self._well = shard.documents > 0 or shard.tokens == 0

    def __call__(self, chunk: bytes) -> None:
        data = self._rest + chunk
        count = len(data) // DOCUMENT.itemsize
        self._rest = data[count * DOCUMENT.itemsize :]
        starts = np.frombuffer(data, DOCUMENT, count)["start"].astype(np.int64)
        if not count:
            return
        first = starts[0] == 0 if self._last < 0 else starts[0] > self._last
        self._well = self._well and bool(first) and not (np.diff(starts) < 1).any()
        self._last = int(starts[-1])

    def fault(self) -> str | None:
        """Problem of the file, as text."""
        fills = self._well and self._last < self._shard.tokens
        return None if fills else "its documents do not fill the token file"
