"""Verification of a whole folder of token shards: once, by one process.

Its record then lets readers compare the blocks that they read (`block_reader.py`).
"""

from __future__ import annotations

import os
import stat
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np

from meshwright.data.manifest import DOCUMENT, ShardEntry, TokenManifest, documents_file, tokens_file
from meshwright.data.publish import hashed_chunks, locked, readable
from meshwright.data.verified import RECORD, BlockHashes, OpenRecord, open_record, write_record
from meshwright.spec.errors import UserError

Check = Literal["lazy", "files", "content"]
"""How much to verify on opening: 'lazy' nothing, 'files' the size of each file and the record itself,
'content' every byte by its SHA-256. A folder without a record is verified as by 'content'."""

_Scan = Callable[[Iterable[bytes]], str | None]
"""Takes the chunks of a file and returns what is wrong with its content, or None."""


@dataclass(frozen=True)
class Verification:
    """Compares the files of `folder` with their manifest.

    `homes` are the folders that may hold a record of it, the one to write to first; `remedy` ends messages.
    """

    folder: Path
    manifest: TokenManifest
    homes: list[Path]
    remedy: str

    def run(self, check: Check) -> OpenRecord:
        """Return the record of the blocks' hashes, made by hashing all files where there is none.

        Of many processes that ask at once, one hashes and the others wait. Raises `UserError` that names the
        file.
        """
        if (record := self._recorded(check)) is not None:
            return record
        with locked(self.homes[0] / "verified.lock", "data.cache"):
            if (record := self._recorded(check)) is not None:
                return record  # another process made it meanwhile
            if check == "content":  # a damaged file must not stay recorded as verified
                (self.homes[0] / RECORD).unlink(missing_ok=True)
            self._check_sizes()
            write_record(self.homes[0], self.manifest, self._check_contents())
        made = open_record(self.homes[0], self.manifest, whole=False)
        assert made is not None  # it was written just now
        return made

    def _recorded(self, check: Check) -> OpenRecord | None:
        """Return a record of these files, unless all must be read."""
        if check == "content":
            return None
        found = (open_record(home, self.manifest, whole=check == "files") for home in self.homes)
        record = next((record for record in found if record is not None), None)
        if record is not None and check == "files":
            self._check_sizes()
        return record

    def _check_sizes(self) -> None:
        """Raise `UserError` for a file that is missing, or not of its size."""
        files = self.manifest.files
        with ThreadPoolExecutor() as pool:  # a network file system takes its time for each
            sizes = list(pool.map(_size_of, (self.folder / name for name in files)))
        for (name, entry), size in zip(files.items(), sizes, strict=True):
            if Path(name).name != name or size is None:
                raise self._error(name, "the manifest lists it, but it is not a file there")
            if size != entry.bytes:
                raise self._error(name, f"has {size} bytes, its manifest says {entry.bytes}")

    def _check_contents(self) -> dict[str, bytes]:
        """Return the hashes of the blocks of files whose SHA-256 is that of the manifest.

        It also checks the ids of tokens and the places of documents. Raises `UserError` for other files.
        """
        scans: dict[str, _Scan] = {}
        for number, shard in enumerate(self.manifest.shards):
            scans[tokens_file(number)] = partial(_token_fault, self.manifest)
            scans[documents_file(number)] = partial(_document_fault, shard)

        def check(name: str) -> bytes:
            hashes = BlockHashes()
            with readable(f"{self.folder / name}:", self.remedy):
                fault = scans.get(name, _no_fault)(hashed_chunks(self.folder / name, hashes))
            found, wanted = hashes.hexdigest(), self.manifest.files[name].sha256
            if found != wanted:
                fault = f"has the SHA-256 {found[:12]}…, its manifest says {wanted[:12]}…: it was altered"
            if fault is not None:
                raise self._error(name, fault)
            return hashes.blocks()

        with ThreadPoolExecutor() as pool:  # hashing releases the interpreter's lock: one file per core
            return dict(zip(self.manifest.files, pool.map(check, self.manifest.files), strict=True))

    def _error(self, name: str, fault: str) -> UserError:
        return UserError(f"{self.folder / name}: {fault}; {self.remedy}")


def _token_fault(manifest: TokenManifest, chunks: Iterable[bytes]) -> str | None:
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


def _size_of(path: Path) -> int | None:
    """Return the bytes of a plain file; None for a link, a folder, or nothing at all."""
    try:
        status = os.lstat(path)
    except OSError:
        return None
    return status.st_size if stat.S_ISREG(status.st_mode) else None


def _no_fault(chunks: Iterable[bytes]) -> None:
    deque(chunks, maxlen=0)
