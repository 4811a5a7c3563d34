"""New folders and files where fsspec reaches, sent file by file.

Stores cannot rename a folder, so what makes it one, such as a config.json, is sent last: until then nobody
takes it for whole.
"""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from meshwright import atomic
from meshwright.spec.errors import UserError
from meshwright.storage.remote import filesystem, is_url, reason_of, told, tried, without_scheme

LAST = "config.json"
"""File without which a folder is not taken for a model."""


class NewFolder:
    """A folder that is being written: its files are made in the folder `path` of a disk."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def finished(self, name: str) -> None:
        """Take note that nothing more is written to the file `name`, which is not read again."""


class _Uploads(NewFolder):
    """A new folder below a URL; a file that is finished is sent, and removed from the disk."""

    def __init__(self, path: Path, url: str, key: str) -> None:
        super().__init__(path)
        self._url, self._key = url.rstrip("/"), key
        self._sent: list[str] = []

    def finished(self, name: str) -> None:
        upload(self.path / name, f"{self._url}/{name}", self._key)
        self._sent.append(name)
        (self.path / name).unlink()

    def finish(self) -> None:
        """Send all other files."""
        files = sorted(path for path in self.path.rglob("*") if path.is_file())
        for file in sorted(files, key=lambda file: file.name == LAST):
            self.finished(file.relative_to(self.path).as_posix())

    def remove(self) -> None:
        """Remove what was sent, or warn of what is left."""
        try:
            store, path = filesystem(self._url, self._key)
            while self._sent:
                store.rm_file(f"{path.rstrip('/')}/{self._sent[-1]}")
                self._sent.pop()
        except Exception as error:
            warnings.warn(
                f"{self._key}: {len(self._sent)} files, {self._sent[0]} the first, are left in {self._url} "
                f"({reason_of(error)}); remove them",
                stacklevel=2,
            )


@contextmanager
def new_folder(target: Path | str, key: str) -> Iterator[NewFolder]:
    """Yield a folder to be written that becomes `target`, a path or URL, when the body ends well.

    On a disk it appears by one rename. Below a URL each file is sent as it is finished, by way of a temporary
    folder of this host, and config.json last; what was sent is removed if the body raises. Raises `OSError`,
    and `UserError`, which starts with `key`, also where `target` exists and is not an empty folder.
    """
    if not is_url(target):
        with atomic.folder(Path(without_scheme(str(target)))) as unfinished:
            yield NewFolder(unfinished)
        return
    check_new(target, key)
    with tempfile.TemporaryDirectory(prefix="meshwright-") as temporary:
        uploads = _Uploads(Path(temporary), str(target), key)
        try:
            yield uploads
            uploads.finish()
        except BaseException:
            uploads.remove()
            raise


@contextmanager
def new_file(target: Path | str, key: str) -> Iterator[Path]:
    """Yield the path of a new file that becomes `target`, a path or URL, when the body ends well."""
    if not is_url(target):
        yield Path(without_scheme(str(target)))
        return
    check_new(target, key)
    with tempfile.TemporaryDirectory(prefix="meshwright-") as temporary:
        path = Path(temporary, str(target).rpartition("/")[2])
        yield path
        upload(path, str(target), key)


def check_new(target: Path | str, key: str) -> None:
    """Raise `UserError` if something is at a URL already, or where no files can be written."""
    if not is_url(target):
        return
    url = str(target)
    if url.lower().startswith(("http://", "https://")):
        raise UserError(f"{key}: {url} cannot be written to; give a folder of a disk, s3://, gs:// or hf://")
    store, path = filesystem(url, key)
    with told(url, key, "written"):
        try:
            there = store.find(path)
        except FileNotFoundError:
            there = []
    if there:
        raise UserError(
            f"{key}: {url} exists, and is not an empty folder; give another one, or empty it first"
        )


def upload(file: Path, url: str, key: str) -> None:
    """Send a file to a URL, from its beginning again where a connection was cut, and compare the sizes."""

    def cut(error: Exception) -> None:
        warnings.warn(f"{key}: {url} was cut ({reason_of(error)}); it is sent again", stacklevel=4)

    store, path = filesystem(url, key)
    with told(url, key, "written"):
        tried(lambda: put(store, file, path, url, key), cut)


def put(store: Any, file: Path, path: str, url: str, key: str) -> None:
    """Send a file to `path` of a store, and compare the sizes; `url` and `key` are for the sentence."""
    size = file.stat().st_size
    store.put_file(str(file), path)
    there = store.info(path).get("size")
    if there != size:
        raise UserError(f"{key}: {url} has {there} bytes after {size} were sent; send it again")
