"""A file that can be sized and opened at any byte: the interface, and files of disks."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from pathlib import Path, PurePosixPath
from typing import IO


class StoredFile(ABC):
    """A file of a corpus.

    `name` is its path or URL, for messages and for libraries that open it themselves. `parts` are the names
    of the folders that it is in, below the corpus, and its own.
    """

    def __init__(self, name: str, parts: tuple[str, ...]) -> None:
        self.name, self.parts = name, parts

    def __str__(self) -> str:
        return self.name

    @property
    def suffix(self) -> str:
        """The suffix of its name in small letters, which says how it is read."""
        return PurePosixPath(self.parts[-1]).suffix.lower()

    @property
    def stored(self) -> StoredFile:
        """The file as it is kept, where this one is what it unpacks to."""
        return self

    @abstractmethod
    def size(self) -> int:
        """Return the bytes that are kept. Raises `OSError`, or `UserError` with the reason."""

    @abstractmethod
    def version(self) -> str:
        """Return a text that is another one when its content is. Raises as `size` does."""

    @abstractmethod
    def open(self, offset: int = 0) -> IO[bytes]:
        """Return a stream of its bytes from `offset` on, whose reads raise as `size` does."""

    def head(self, count: int) -> bytes:
        """Return its first `count` bytes."""
        with self.open() as file:
            return file.read(count)

    def sha256(self) -> str:
        """Return the SHA-256 of its bytes in hexadecimal."""
        with self.open() as file:
            return hashlib.file_digest(file, "sha256").hexdigest()  # type: ignore[arg-type]


class LocalFile(StoredFile):
    """A file of a disk; its version is its size and the hash of its content."""

    def __init__(self, path: Path, root: Path | None = None) -> None:
        super().__init__(str(path), path.relative_to(path.parent if root is None else root).parts)
        self.path = path

    def size(self) -> int:
        """Return its bytes."""
        return self.path.stat().st_size

    def version(self) -> str:
        """Return its size and SHA-256."""
        return f"{self.size()}\0{self.sha256()}"

    def open(self, offset: int = 0) -> IO[bytes]:
        """Return the opened file."""
        file = self.path.open("rb")
        file.seek(offset)
        return file
