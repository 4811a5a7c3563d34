"""Verification of a folder of token shards: once, by one process, and from then on by its record."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np

from meshwright.data.manifest import DOCUMENT, Manifest, ShardEntry, documents_file, tokens_file
from meshwright.data.publish import hashed_chunks, locked, readable
from meshwright.data.verified import RECORD, FileState, read_record, state_of, wait_for_tick, write_record
from meshwright.spec.errors import UserError

Check = Literal["lazy", "files", "content"]
"""How much to verify on opening: 'lazy' compares a file's size and time with the record when it is mapped,
'files' those of every file at once, 'content' every byte with its SHA-256."""

_Scan = Callable[[Iterable[bytes]], str | None]
"""Takes the chunks of a file and returns what is wrong with its content, or None."""


@dataclass(frozen=True)
class Verification:
    """Compares the files of `folder` with their manifest.

    `homes` are the folders that may hold a record of it, the one to write to first; `remedy` ends messages.
    """

    folder: Path
    manifest: Manifest
    homes: list[Path]
    remedy: str

    def run(self, check: Check) -> dict[str, FileState]:
        """Return the states of the verified files: of the record where it is valid, else after hashing the
        files that are in other states. Raises `UserError` that names the file.

        Of many processes that ask at once, one hashes and the others wait.
        """
        if (recorded := self._recorded(check)) is not None:
            return recorded
        with locked(self.homes[0] / "verified.lock", "data.cache"):
            if (recorded := self._recorded(check)) is not None:
                return recorded  # another process made it meanwhile
            known = (self._record() or {}) if check != "content" else {}
            if check == "content":  # a damaged file must not stay recorded as verified
                (self.homes[0] / RECORD).unlink(missing_ok=True)
            states = self._states()
            wait_for_tick(states)
            self._check_contents([name for name, state in states.items() if known.get(name) != state])
            write_record(self.homes[0], self.manifest, states)
            return states

    def _record(self) -> dict[str, FileState] | None:
        """Return the states of a record of these files, whether they are still in them or not."""
        records = (read_record(home, self.manifest) for home in self.homes)
        return next((record for record in records if record is not None), None)

    def _recorded(self, check: Check) -> dict[str, FileState] | None:
        """Return the record unless the files are seen to be in another state, or must all be read."""
        record = self._record() if check != "content" else None
        return record if record is None or check == "lazy" or record == self._states() else None

    def _states(self) -> dict[str, FileState]:
        """Return every file's state. Raises `UserError` for one that is missing, or not of its size."""
        files = self.manifest.files
        with ThreadPoolExecutor() as pool:  # a network file system takes its time for each
            found = list(pool.map(state_of, (self.folder / name for name in files)))
        states = {}
        for (name, entry), state in zip(files.items(), found, strict=True):
            if Path(name).name != name or state is None:
                raise self._error(name, "the manifest lists it, but it is not a file there")
            if state.size != entry.bytes:
                raise self._error(name, f"has {state.size} bytes, its manifest says {entry.bytes}")
            states[name] = state
        return states

    def _check_contents(self, names: list[str]) -> None:
        """Compare the SHA-256 of files; also check the ids of tokens and the places of documents."""
        scans: dict[str, _Scan] = {}
        for number, shard in enumerate(self.manifest.shards):
            scans[tokens_file(number)] = partial(_token_fault, self.manifest)
            scans[documents_file(number)] = partial(_document_fault, shard)

        def check(name: str) -> None:
            digest = hashlib.sha256()
            with readable(f"{self.folder / name}:", self.remedy):
                fault = scans.get(name, _no_fault)(hashed_chunks(self.folder / name, digest))
            found, wanted = digest.hexdigest(), self.manifest.files[name].sha256
            if found != wanted:
                fault = f"has the SHA-256 {found[:12]}…, its manifest says {wanted[:12]}…: it was altered"
            if fault is not None:
                raise self._error(name, fault)

        with ThreadPoolExecutor() as pool:  # hashing releases the interpreter's lock: one file per core
            deque(pool.map(check, names), maxlen=0)

    def _error(self, name: str, fault: str) -> UserError:
        return UserError(f"{self.folder / name}: {fault}; {self.remedy}")


def _token_fault(manifest: Manifest, chunks: Iterable[bytes]) -> str | None:
    highest = max((int(np.frombuffer(chunk, manifest.token_dtype).max()) for chunk in chunks), default=-1)
    if highest < manifest.vocab_size:
        return None
    return f"holds the token id {highest}, and its vocabulary has {manifest.vocab_size} entries"


def _document_fault(shard: ShardEntry, chunks: Iterable[bytes]) -> str | None:
    last, rising = -1, True
    for chunk in chunks:
        starts = np.frombuffer(chunk, DOCUMENT)["start"].astype(np.int64)
        rising = rising and (last >= 0 or starts[0] == 0) and bool((np.diff(starts, prepend=last) > 0).all())
        last = int(starts[-1])
    fills = rising and last < shard.tokens and (shard.documents > 0 or shard.tokens == 0)
    return None if fills else "its documents do not fill the token file"


def _no_fault(chunks: Iterable[bytes]) -> None:
    deque(chunks, maxlen=0)
