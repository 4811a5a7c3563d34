"""Reads ranges of token files, each block of which is compared with its hash when it is first read.

Files are read and not mapped: a process that touches a mapped file beyond its end, after somebody cut it, is
ended by SIGBUS, without a word.
"""

from __future__ import annotations

import hashlib
import os
import threading
import weakref
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from meshwright.data.manifest import TokenManifest
from meshwright.data.verified import BLOCK_BYTES, OpenRecord
from meshwright.spec.errors import DataError, StorageError

MOST_OPEN = 64
"""Files that are kept open; a corpus may have more of them than a process may open."""


class _FileStatus(NamedTuple):
    """Facts that change when a file changes."""

    size: int
    mtime_ns: int
    inode: int

    @staticmethod
    def of(descriptor: int) -> _FileStatus:
        status = os.fstat(descriptor)
        return _FileStatus(status.st_size, status.st_mtime_ns, status.st_ino)


@dataclass
class _Blocks:
    """Which blocks of a file were compared with their hashes, and the file's state since then."""

    compared: np.ndarray
    state: _FileStatus


class BlockReader:
    """Ranges of the files of `folder`, for several threads at once; `remedy` ends messages.

    Bytes that are returned belong to blocks whose hash is that of the record. Around each read the file's
    size, time of change and inode are compared with those of the last one; where they differ, all of its
    blocks are compared anew. Raises `DataError` that names the file and the block's bytes, and `StorageError`
    where the file cannot be read.
    """

    def __init__(self, folder: Path, manifest: TokenManifest, record: OpenRecord, remedy: str) -> None:
        self._folder, self._manifest, self._record, self._remedy = folder, manifest, record, remedy
        self._blocks: dict[str, _Blocks] = {}
        self._open: OrderedDict[str, int] = OrderedDict()
        self._lock = threading.Lock()
        weakref.finalize(self, _close, self._open)

    def read(self, name: str, spans: Sequence[tuple[int, int]]) -> list[memoryview]:
        """Return the bytes of a file from each start up to its stop."""
        try:
            with self._lock:
                return self._read(name, spans)
        except OSError as error:
            kind = DataError if isinstance(error, FileNotFoundError) else StorageError
            reason = f"cannot be read any more ({error.strerror or error})"
            raise kind(f"{self._folder / name}: {reason}; {self._remedy}") from error

    def _read(self, name: str, spans: Sequence[tuple[int, int]]) -> list[memoryview]:
        while True:
            descriptor = self._descriptor(name)
            state = _FileStatus.of(descriptor)
            if state.size != self._manifest.files[name].bytes:
                wanted = self._manifest.files[name].bytes
                raise self._error(name, f"has {state.size} bytes, its manifest says {wanted}: it was changed")
            if name not in self._blocks:
                self._check_record(name)
                self._blocks[name] = _Blocks(np.zeros(-(-state.size // BLOCK_BYTES), dtype=bool), state)
            blocks = self._blocks[name]
            if state != blocks.state:
                blocks.compared[:], blocks.state = False, state
            found = [self._span(name, descriptor, blocks, start, stop) for start, stop in spans]
            if _FileStatus.of(descriptor) == state:
                return found

    def _span(self, name: str, descriptor: int, blocks: _Blocks, start: int, stop: int) -> memoryview:
        """Return bytes of a file, after comparing those of their blocks that were not compared yet."""
        first, last = start // BLOCK_BYTES, -(-stop // BLOCK_BYTES)
        new = first + np.flatnonzero(~blocks.compared[first:last])
        if not new.size:
            return self._bytes(name, descriptor, start, stop)
        begin, end = first * BLOCK_BYTES, min(last * BLOCK_BYTES, blocks.state.size)
        data = self._bytes(name, descriptor, begin, end)
        for block in new.tolist():
            place = block * BLOCK_BYTES - begin
            if hashlib.sha256(data[place : place + BLOCK_BYTES]).digest() != self._record.hash(name, block):
                until = min((block + 1) * BLOCK_BYTES, blocks.state.size)
                fault = (
                    f"bytes {block * BLOCK_BYTES} to {until} (block {block}) are not those that were verified"
                )
                raise self._error(name, f"{fault}: it was changed or damaged")
            blocks.compared[block] = True
        return data[start - begin : stop - begin]

    def _bytes(self, name: str, descriptor: int, start: int, stop: int) -> memoryview:
        """Return bytes of a file, read in as many parts as the system makes of them."""
        data = bytearray(stop - start)
        view, place = memoryview(data), 0
        while place < len(data):
            count = os.preadv(descriptor, [view[place:]], start + place)
            if not count:
                raise self._error(name, f"ends at byte {start + place}: it was cut while it was read")
            place += count
        return view

    def _descriptor(self, name: str) -> int:
        """Return the descriptor of a file; the file that was not used for longest is closed for it."""
        if name not in self._open:
            if len(self._open) == MOST_OPEN:
                os.close(self._open.popitem(last=False)[1])
            self._open[name] = os.open(self._folder / name, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        self._open.move_to_end(name)
        return self._open[name]

    def _check_record(self, name: str) -> None:
        try:
            self._record.check([name])
        except ValueError as error:
            raise DataError(f"{self._folder}: {error}; remove {self._record.path} and start again") from error

    def _error(self, name: str, fault: str) -> DataError:
        return DataError(f"{self._folder / name}: {fault}; {self._remedy}")


def _close(files: OrderedDict[str, int]) -> None:
    while files:
        os.close(files.popitem()[1])
