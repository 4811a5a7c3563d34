"""Files that fsspec reaches: s3://, gs://, hf://, http:// and others, by the credentials of its libraries.

They are read by requests for ranges of bytes and never kept. Where a connection is cut, the range in flight
is asked for again, from the byte that was reached.
"""

from __future__ import annotations

import errno
import io
import re
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, TypeVar
from urllib.parse import unquote, urlsplit

from meshwright.spec.errors import UserError
from meshwright.storage.stored_file import StoredFile

T = TypeVar("T")
TRIES, FIRST_WAIT = 8, 1.0
"""Tries of a request that a connection's fault ends, and seconds before the second one, which double: about
two minutes."""
LEAST_RANGE, MOST_RANGE = 2**16, 2**23
"""Bytes that are asked for at once: few at first, as some readers look at the beginning alone."""

_URL = re.compile(r"([a-z][a-z0-9+.-]*)://", re.IGNORECASE)
_PACKAGES = {
    "s3": "s3fs; pip install 'meshwright[s3]'",
    "s3a": "s3fs; pip install 'meshwright[s3]'",
    "gs": "gcsfs; pip install 'meshwright[gcs]'",
    "gcs": "gcsfs; pip install 'meshwright[gcs]'",
    "az": "adlfs; pip install adlfs",
    "abfs": "adlfs; pip install adlfs",
    "hf": "huggingface_hub; pip install 'meshwright[hf]'",
    "http": "aiohttp; pip install aiohttp",
    "https": "aiohttp; pip install aiohttp",
}
"""Packages of the usual protocols, and how each is installed."""
_AS_STORED = {"client_kwargs": {"headers": {"Accept-Encoding": "identity"}}}
"""Options of http: a server must not compress what it sends, as sizes and ranges are those of the file."""
_WITH_FOLDERS = {"auto_mkdir": True}
"""Options of file: folders are made for what is written, as stores have none."""
_VERSIONS = ("ETag", "etag", "md5Hash", "blob_id", "generation", "content_md5", "Last-Modified", "mtime")
"""Facts by which a store tells one content of a file from another, the surest first."""
_LASTING = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError)
"""Errors that another try does not mend."""
_OF_STORES = (OSError, EOFError, ValueError, NotImplementedError)
"""Errors of the language that libraries of stores raise; others are mistakes of the program."""
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
"""Numbers of errors of disks that another try does not mend."""
_UNKNOWN = ("NoCredentialsError", "PartialCredentialsError", "DefaultCredentialsError", "RefreshError")
"""Classes of errors, of botocore and google.auth, that say that there are no credentials."""


def is_url(name: str | Path) -> bool:
    """Return True for a name that fsspec resolves, such as s3://bucket/folder; a file:// is one of a disk."""
    found = _URL.match(str(name))
    return found is not None and found[1].lower() not in ("file", "local")


def without_scheme(name: str) -> str:
    """Return the path of a file:// URL, and any other name as it is."""
    if is_url(name) or not _URL.match(name):
        return name
    url = urlsplit(name)
    return url.netloc + unquote(url.path)


def filesystem(url: str, key: str) -> tuple[Any, str]:
    """Return (fsspec's file system, path in it) of a URL. Raises `UserError`, which names the setting `key`.

    Nothing is remembered of folders, so that a file that has changed is seen.
    """
    import fsspec

    protocol = url.partition("://")[0].lower()
    if protocol not in fsspec.available_protocols():
        known = ", ".join(f"{name}://" for name in ("s3", "gs", "hf", "https", "file"))
        raise UserError(
            f"{key}: {url} begins with {protocol}://, which fsspec does not know; give a path, or one of "
            f"{known}"
        )
    options: dict[str, Any] = _AS_STORED if protocol in ("http", "https") else {}
    if protocol in ("file", "local"):
        options = _WITH_FOLDERS
    with told(url, key):
        try:
            found: tuple[Any, str] = fsspec.url_to_fs(
                protocol + url[len(protocol) :], use_listings_cache=False, **options
            )
        except ImportError as error:
            package = _PACKAGES.get(protocol, f"that fsspec asks for ({error})")
            raise UserError(f"{key}: {protocol}:// needs the package {package}") from error
    return found


@contextmanager
def told(url: str, key: str, verb: str = "read") -> Iterator[None]:
    """Raise `UserError` for what a library of a store raises; mistakes of the program go through."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        if type(error).__module__ == "builtins" and not isinstance(error, _OF_STORES):
            raise
        if is_missing(error):
            if verb != "read":
                reason = f"its bucket or folder is not there ({reason_of(error)})"
                raise UserError(
                    f"{key}: {url} cannot be {verb}, as {reason}; make it, or give another"
                ) from error
            raise UserError(f"{key}: there is no file or folder {url} (any more); give another") from error
        remedy = "see whether the address, the connection and the credentials are right, and start again"
        raise UserError(f"{key}: {url} cannot be {verb} ({reason_of(error)}); {remedy}") from error


def is_missing(error: Exception) -> bool:
    """Return True if a store has no such file; fsspec says so, too, where it does not reach a server."""
    unreached = isinstance(error.__cause__, OSError) and not isinstance(error.__cause__, FileNotFoundError)
    return isinstance(error, FileNotFoundError) and not unreached


def reason_of(error: Exception) -> str:
    """Return an error's reason in one line."""
    if isinstance(error, FileNotFoundError) and isinstance(error.__cause__, OSError):
        error = error.__cause__
    text = (isinstance(error, OSError) and error.strerror) or str(error)
    return " ".join(str(text).split()) or type(error).__name__


def may_pass(error: Exception) -> bool:
    """Return True for an error that another try may get over: a connection's, or of a library's own class."""
    if isinstance(error, (*_LASTING, UserError)) or type(error).__name__ in _UNKNOWN:
        return False
    if isinstance(error, OSError) and error.errno in _FULL:
        return False
    return isinstance(error, OSError | EOFError) or type(error).__module__ != "builtins"


def tried(
    work: Callable[[], T],
    cut: Callable[[Exception], object],
    wait: Callable[[float], object] = time.sleep,
    tries: int | None = None,
) -> T:
    """Return what `work` returns, which is called `tries` times (`TRIES`) where a connection's fault ends it.

    `cut` is told each fault but the last, and `wait` is called with the seconds before the next try.
    """
    tries = TRIES if tries is None else tries
    for number in range(tries):
        try:
            return work()
        except Exception as error:
            if number + 1 == tries or not may_pass(error):
                raise
            cut(error)
        wait(FIRST_WAIT * 2**number)
    raise AssertionError("the last try returns or raises")


def remote_files(url: str) -> list[RemoteFile] | None:
    """Return the file that a URL names, or all files below it, without hidden ones, sorted as on a disk.

    None where nothing is there. Raises `UserError`.
    """
    store, path = filesystem(url, "data.corpus")
    with told(url, "data.corpus"):
        try:
            info = store.info(path)
        except FileNotFoundError as error:
            if is_missing(error):
                return None
            raise
        if info["type"] == "file":
            name = path.rstrip("/").rpartition("/")[2]
            return [RemoteFile(store, url, path, (name,), info)]
        found = store.find(path, detail=True)
    files = []
    for place, info in found.items():
        parts = tuple(part for part in place[len(path) :].split("/") if part)
        placeholder = info["type"] != "file" or place.endswith("/")  # stands for a folder
        if parts and not placeholder and not any(part.startswith(".") for part in parts):
            files.append(RemoteFile(store, store.unstrip_protocol(place), place, parts, info))
    return sorted(files, key=lambda file: file.parts) or None


class RemoteFile(StoredFile):
    """A file of a store; its version is its size, and what the store says of its content, such as an ETag.

    Where the store says nothing of it, the content is hashed.
    """

    def __init__(
        self, store: Any, url: str, path: str, parts: tuple[str, ...], info: Mapping[str, Any]
    ) -> None:
        super().__init__(url, parts)
        self._store, self._path = store, path
        self._size, self._content = info.get("size"), _content(info)

    def size(self) -> int:
        """Return its bytes, as the store listed them."""
        if self._size is None:
            raise UserError(
                f"data.corpus: the server of {self} does not tell its size; download it, and give the file"
            )
        return int(self._size)

    def version(self) -> str:
        """Return its size and what the store says of its content."""
        return f"{self.size()}\0{self._content or self.sha256()}"

    def open(self, offset: int = 0) -> IO[bytes]:
        """Return a stream over ranges, which can be sought in."""
        return io.BufferedReader(_Ranges(self, self.size(), offset), LEAST_RANGE)

    def check(self) -> None:
        """Raise `UserError` if the store has another content than it had when the file was listed."""
        if self._content is None:
            return
        info = self._store.info(self._path)
        if (info.get("size"), _content(info)) != (self._size, self._content):
            raise UserError(f"data.corpus: {self} was changed while it was read; start again")

    def handle(self) -> IO[bytes]:
        """Return a stream of the library, which asks for what is read and no more."""
        return self._store.open(self._path, "rb", cache_type="none")


class _Ranges(io.RawIOBase):
    """The bytes of a remote file, range by range; from the second one on the next is fetched meanwhile."""

    def __init__(self, file: RemoteFile, size: int, offset: int) -> None:
        self._file, self._size, self._place = file, size, offset
        self._start, self._block, self._length = offset, b"", LEAST_RANGE
        self._next: tuple[int, Future[bytes]] | None = None
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="remote file")
        self._handle: IO[bytes] | None = None
        self._closing = threading.Event()

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._place

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._place = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._place, io.SEEK_END: self._size}[whence]
        return self._place

    def readinto(self, buffer: Any) -> int:
        if self._place >= self._size:
            return 0
        if not self._start <= self._place < self._start + len(self._block):
            self._block, self._start = self._take(self._place), self._place
        first = self._place - self._start
        part = self._block[first : first + len(buffer)]
        buffer[: len(part)] = part
        self._place += len(part)
        return len(part)

    def close(self) -> None:
        if not self.closed:
            self._closing.set()
            self._pool.shutdown(wait=True, cancel_futures=True)
            self._drop()
        super().close()

    def _take(self, place: int) -> bytes:
        """Return the range that begins at `place`, and have the one behind it fetched."""
        goes_on = place == self._start + len(self._block) > self._start
        if self._next is None or self._next[0] != place:
            self._length = min(4 * self._length, MOST_RANGE) if goes_on else LEAST_RANGE
            self._next = place, self._pool.submit(self._fetch, place, self._length)
        block = self._next[1].result()
        behind, self._next = place + len(block), None
        if goes_on and behind < self._size:  # who reads the beginning alone asks for no more
            self._length = min(4 * self._length, MOST_RANGE)
            self._next = behind, self._pool.submit(self._fetch, behind, self._length)
        return block

    def _fetch(self, start: int, length: int) -> bytes:
        """Return the bytes from `start` on, in as many requests as it takes."""
        stop, got, tries = min(start + length, self._size), bytearray(), 1
        checked = stop < self._size
        while start + len(got) < stop or not checked:
            with told(self._file.name, "data.corpus"):
                try:
                    if start + len(got) < stop:
                        got += self._asked(start + len(got), stop)
                    else:
                        self._file.check()
                        checked = True
                    tries = 1
                except Exception as error:
                    self._drop()
                    if tries == TRIES or not may_pass(error) or self._closing.is_set():
                        raise
                    warnings.warn(
                        f"data.corpus: {self._file} was cut at byte {start + len(got)} ({reason_of(error)}); "
                        "it is read on from there",
                        stacklevel=2,
                    )
                    self._closing.wait(FIRST_WAIT * 2 ** (tries - 1))
                    tries += 1
        return bytes(got)

    def _asked(self, start: int, stop: int) -> bytes:
        """Return what one request for the bytes up to `stop` gives, which may be fewer."""
        if self._handle is None:
            self._handle = self._file.handle()
        if not self._handle.seekable():
            raise UserError(
                f"data.corpus: the server of {self._file} does not serve ranges of bytes, which reading on "
                "after a cut needs; download it, and give the file"
            )
        self._handle.seek(start)
        data = self._handle.read(stop - start)
        if not data:
            raise EOFError("the connection ended")
        return data

    def _drop(self) -> None:
        """Let go of a stream that may be broken."""
        handle, self._handle = self._handle, None
        if handle is not None:
            handle.close()


def _content(info: Mapping[str, Any]) -> str | None:
    """Return what a store says of a file's content; None where it says nothing."""
    lfs = info.get("lfs")
    if isinstance(lfs, Mapping) and lfs.get("sha256"):
        return f"sha256 {lfs['sha256']}"
    return next((f"{name} {info[name]}" for name in _VERSIONS if info.get(name)), None)
