"""Files in gzip or zstd, unpacked as they are read."""

from __future__ import annotations

import io
import zlib
from collections.abc import Callable
from pathlib import PurePosixPath
from typing import IO, Any, Protocol

from meshwright.spec.errors import UserError
from meshwright.storage.stored_file import StoredFile

COMPRESSED = (".gz", ".zst")
"""Suffixes of files that are unpacked."""
_MOST_OUT = 2**20
"""Bytes that are unpacked at once at most, of gzip."""
_IN = {".gz": 2**16, ".zst": 2**12}
"""Bytes that are unpacked at once: zstd gives all that they hold, and 4 bytes may hold 128 KiB."""


class _Unpacker(Protocol):
    """A decompressor of one frame, as `zlib.decompressobj` is."""

    @property
    def eof(self) -> bool: ...

    @property
    def unused_data(self) -> bytes: ...

    @property
    def unconsumed_tail(self) -> bytes: ...

    def decompress(self, data: bytes, max_length: int, /) -> bytes: ...


class CompressedFile(StoredFile):
    """A file in gzip or zstd as what it unpacks to, under its name without the last suffix.

    To open it at a byte unpacks all that is before. Raises `UserError` with the place in the file where it is
    damaged or ends too early.
    """

    def __init__(self, file: StoredFile) -> None:
        inside = PurePosixPath(file.parts[-1]).stem
        super().__init__(file.name, (*file.parts[:-1], inside))
        self._file = file

    @property
    def stored(self) -> StoredFile:
        """The compressed file."""
        return self._file

    def size(self) -> int:
        """Return the bytes that are kept."""
        return self._file.size()

    def version(self) -> str:
        """Return that of the compressed file."""
        return self._file.version()

    def open(self, offset: int = 0) -> IO[bytes]:
        """Return a stream of what is unpacked."""
        raw = _Unpacked(self._file, _format(self._file))
        opened = io.BufferedReader(raw, _MOST_OUT)
        while offset > 0 and (skipped := len(opened.read(min(offset, _MOST_OUT)))):
            offset -= skipped
        return opened


def _format(file: StoredFile) -> tuple[Callable[[], _Unpacker], type[Exception]]:
    """Return what makes the decompressor of a frame, and the class of its errors. Raises `UserError`."""
    if file.suffix == ".gz":
        return lambda: zlib.decompressobj(zlib.MAX_WBITS | 16), zlib.error
    try:
        import zstandard
    except ImportError as error:
        raise UserError(
            f"data.corpus: {file} needs the package zstandard; pip install 'meshwright[zstd]'"
        ) from error
    # Files of `zstd --long=31` look back two gigabytes.
    unpacking = zstandard.ZstdDecompressor(max_window_size=2**31)
    return lambda: _ZstdFrame(unpacking.decompressobj()), zstandard.ZstdError


class _ZstdFrame:
    """A decompressor of zstandard, with the interface of zlib's."""

    def __init__(self, unpacking: Any) -> None:
        self._unpacking = unpacking

    @property
    def unconsumed_tail(self) -> bytes:
        return b""

    @property
    def eof(self) -> bool:
        return bool(self._unpacking.eof)

    @property
    def unused_data(self) -> bytes:
        return bytes(self._unpacking.unused_data)

    def decompress(self, data: bytes, max_length: int) -> bytes:
        """Return all that `data` holds, whatever `max_length`."""
        return bytes(self._unpacking.decompress(data))


class _Unpacked(io.RawIOBase):
    """The bytes of a compressed file, frame after frame (RFC 1952 calls them members, RFC 8878 frames)."""

    def __init__(self, file: StoredFile, format_: tuple[Callable[[], _Unpacker], type[Exception]]) -> None:
        self._file, (self._new, self._error) = file, format_
        self._packed = file.open()
        self._frame: _Unpacker | None = None
        self._frames = 0
        self._rest, self._read_to = b"", 0
        self._holds = False  # the decompressor has more than it gave
        self._ready = memoryview(b"")

    def readable(self) -> bool:
        return True

    def close(self) -> None:
        if not self.closed:
            self._packed.close()
        super().close()

    def readinto(self, buffer: Any) -> int:
        while not self._ready:
            if not self._rest and not self._holds:
                self._rest = self._packed.read(_IN[self._file.suffix])
                self._read_to += len(self._rest)
                if not self._rest:
                    self._check_whole()
                    return 0
            self._ready = memoryview(self._unpack())
        part = self._ready[: len(buffer)]
        buffer[: len(part)] = part
        self._ready = self._ready[len(part) :]
        return len(part)

    def _unpack(self) -> bytes:
        """Return what some bytes of the file hold, perhaps nothing."""
        if self._frame is None:
            if self._frames and self._file.suffix == ".gz":
                self._rest = self._rest.lstrip(b"\0")  # they may fill up a block
                if not self._rest:
                    return b""
            self._frame = self._new()
            self._frames += 1
        try:
            found = self._frame.decompress(self._rest, _MOST_OUT)
        except self._error as error:
            raise self._damaged(f"is damaged before its byte {self._read_to} ({error})") from error
        self._rest = self._frame.unused_data if self._frame.eof else self._frame.unconsumed_tail
        self._holds = not self._frame.eof and len(found) >= _MOST_OUT
        if self._frame.eof:
            self._frame = None
        return found

    def _check_whole(self) -> None:
        """Raise `UserError` if the file ends within a frame, or without any."""
        if self._frame is not None or not self._frames:
            raise self._damaged(f"ends at byte {self._read_to}, before its compressed data does")

    def _damaged(self, fault: str) -> UserError:
        return UserError(f"data.corpus: {self._file} {fault}; fetch or compress it again")
