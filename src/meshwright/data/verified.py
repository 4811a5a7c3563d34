"""The record of a verification: a SHA-256 of each block of each file in a folder of tokens.

A file whose own SHA-256 was that of the manifest has blocks with these hashes, whichever copy of it is read.
So readers compare a block when they first read it (`block_reader.py`), and no start hashes whole files again.

    FOLDER/.meshwright/                 in the folder of tokens, unless that is read-only
    CACHE/verified/<hash of FOLDER>/    in the cache: the record, its lock, and indices

The record is one file: a line of JSON, with the SHA-256 of each file's hashes and of the line itself, and the
hashes, 32 bytes a block, of the files in sorted order. A record that is damaged, of another version or of
another manifest does not count.
"""

from __future__ import annotations

import hashlib
import json
import os
import weakref
from collections.abc import Iterable, Mapping
from itertools import accumulate
from pathlib import Path

from meshwright.data.manifest import TokenManifest
from meshwright.data.publish import write_atomically
from meshwright.spec.files import user_path

BESIDE = ".meshwright"
"""The folder of the record in a folder of tokens."""
RECORD = "blocks.bin"
BLOCK_BYTES = 2**18
"""Bytes that are hashed together, at most. Samples lie anywhere, so each new one costs a block to read: a
larger one would cost more, a smaller one would make the record long (0.012% of the tokens)."""

_VERSION = 2
_HASH = 32  # bytes of a SHA-256


class BlockHashes:
    """SHA-256 of all bytes that pass in sequence, and of each block of them; `size` counts them."""

    def __init__(self) -> None:
        self._whole, self._block = hashlib.sha256(), hashlib.sha256()
        self.size = self._filled = 0
        self._blocks: list[bytes] = []

    def update(self, data: bytes) -> None:
        """Take the next bytes."""
        self._whole.update(data)
        self.size += len(data)
        rest = memoryview(data)
        while rest:
            part, rest = rest[: BLOCK_BYTES - self._filled], rest[BLOCK_BYTES - self._filled :]
            self._block.update(part)
            self._filled += len(part)
            if self._filled == BLOCK_BYTES:
                self._blocks.append(self._block.digest())
                self._block, self._filled = hashlib.sha256(), 0

    def hexdigest(self) -> str:
        """Return the SHA-256 of all bytes, in hexadecimal."""
        return self._whole.hexdigest()

    def blocks(self) -> bytes:
        """Return the SHA-256 of each block, one after another; the last block may be shorter."""
        return b"".join([*self._blocks, *([self._block.digest()] if self._filled else [])])


class OpenRecord:
    """An opened record, which can be read on when its file is removed or replaced. Raises `ValueError`."""

    def __init__(self, path: Path, manifest: TokenManifest) -> None:
        self.path = path
        self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self._descriptor)
        files = manifest.files
        length = len(_header(manifest, dict.fromkeys(files, 64 * "0")))
        line = os.pread(self._descriptor, length, 0)
        self._digests: dict[str, str] = json.loads(line)["files"]
        if line != _header(manifest, self._digests):
            raise ValueError(f"{path} is not the record of these files")
        names = sorted(files)
        self._sizes = {name: _HASH * -(-files[name].bytes // BLOCK_BYTES) for name in names}
        behind = accumulate(self._sizes.values(), initial=length)
        self._places = dict(zip(names, behind, strict=False))

    def check(self, names: Iterable[str]) -> None:
        """Raise `ValueError` where the hashes of any of these files are damaged."""
        for name in names:
            found = os.pread(self._descriptor, self._sizes[name], self._places[name])
            if hashlib.sha256(found).hexdigest() != self._digests[name]:
                raise ValueError(f"the record of {name} is damaged")

    def hash(self, name: str, block: int) -> bytes:
        """Return the SHA-256 of one block of a file."""
        return os.pread(self._descriptor, _HASH, self._places[name] + _HASH * block)


def cache_folder(cache: str | None) -> Path:
    """Return the folder of `data.cache`."""
    return user_path(cache or "~/.cache/meshwright", "data.cache")


def record_folders(folder: Path, cache: Path) -> list[Path]:
    """Return the folders that may hold records and indices of `folder`, the one to write to first."""
    inside = folder / BESIDE
    cached = cache / "verified" / hashlib.sha256(os.fsencode(folder.resolve())).hexdigest()[:16]
    return [inside, cached] if os.access(folder, os.W_OK | os.X_OK) else [cached, inside]


def write_record(folder: Path, manifest: TokenManifest, hashes: Mapping[str, bytes]) -> None:
    """Record in `folder` the hashes of the blocks of a manifest's files. Raises `UserError`."""
    digests = {name: hashlib.sha256(found).hexdigest() for name, found in hashes.items()}
    body = b"".join(found for _, found in sorted(hashes.items()))
    write_atomically(folder / RECORD, _header(manifest, digests) + body)


def open_record(folder: Path, manifest: TokenManifest, *, whole: bool) -> OpenRecord | None:
    """Return the record in `folder`; None without a valid one. With `whole` all of it is checked at once."""
    try:
        record = OpenRecord(folder / RECORD, manifest)
        if whole:
            record.check(manifest.files)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    return record


def _header(manifest: TokenManifest, digests: Mapping[str, str]) -> bytes:
    """Return the line of JSON, which ends with a newline."""
    files = {name: digests[name] for name in manifest.files}
    body = {"version": _VERSION, "block_bytes": BLOCK_BYTES, "manifest": manifest.digest, "files": files}
    digest = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
    return json.dumps({**body, "sha256": digest}, sort_keys=True).encode() + b"\n"
