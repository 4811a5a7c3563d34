"""A folder below a URL, whose files are listed, read, sent, fetched and removed by name.

Stores have no folders, only names with slashes; in a store a file appears whole, or not at all.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from meshwright.storage.remote import filesystem, is_missing, told, tried
from meshwright.storage.upload import put

T = TypeVar("T")


class RemoteFolder:
    """The files below `url`, by their names in it; every method raises `UserError`, which names `key`.

    What a connection's fault ends is tried `tries` times, by default as often as reads of corpora are, and
    `wait` is called with the seconds between two tries.
    """

    def __init__(
        self,
        url: str,
        key: str,
        wait: Callable[[float], object] = time.sleep,
        tries: int | None = None,
    ) -> None:
        self.url, self.key = url.rstrip("/"), key
        self._wait, self._tries = wait, tries

    def __str__(self) -> str:
        return self.url

    def sizes(self) -> dict[str, int]:
        """Return the bytes of every file by name, sorted; nothing where nothing is there."""

        def listed(store: Any, root: str) -> dict[str, int]:
            found = store.find(root, detail=True)
            files = {path[len(root) :].strip("/"): each for path, each in sorted(found.items())}
            return {name: int(each["size"]) for name, each in files.items() if each["type"] == "file"}

        return self._asked(listed, "", "read", missing=dict)

    def read(self, name: str) -> bytes | None:
        """Return the content of a file; None where it is not there."""

        def content(store: Any, path: str) -> bytes | None:
            return bytes(store.cat_file(path))

        return self._asked(content, name, "read", missing=lambda: None)

    def write(self, name: str, content: bytes) -> None:
        """Put a short content at a name, in one request."""
        self._asked(lambda store, path: store.pipe_file(path, content), name, "written")

    def send(self, file: Path, name: str) -> None:
        """Send a file of a disk, and compare the sizes."""
        url = f"{self.url}/{name}"
        self._asked(lambda store, path: put(store, file, path, url, self.key), name, "written")

    def fetch(self, name: str, file: Path, size: int) -> None:
        """Write the content of a file, of `size` bytes, to the path `file` of a disk."""

        def get(store: Any, path: str) -> None:
            store.get_file(path, str(file))
            if (got := file.stat().st_size) < size:
                raise EOFError(f"it ended at byte {got} of {size}")

        self._asked(get, name, "read")

    def remove(self, name: str) -> None:
        """Remove a file, if it is there."""
        self._asked(lambda store, path: store.rm_file(path), name, "removed", missing=lambda: None)

    def remove_below(self, name: str) -> None:
        """Remove all files below a name, in no order."""
        self._asked(lambda store, path: store.rm(path, recursive=True), name, "removed", missing=lambda: None)

    def _asked(
        self, work: Callable[[Any, str], T], name: str, verb: str, missing: Callable[[], T] | None = None
    ) -> T:
        """Return what `work` returns of the store and the path of a name; without the file what `missing`
        does, if it is given."""
        url = f"{self.url}/{name}".rstrip("/")
        store, root = filesystem(self.url, self.key)
        path = f"{root.rstrip('/')}/{name}".rstrip("/")
        with told(url, self.key, verb):
            try:
                return tried(lambda: work(store, path), lambda _fault: None, self._wait, self._tries)
            except FileNotFoundError as error:
                if missing is None or not is_missing(error):
                    raise
                return missing()
