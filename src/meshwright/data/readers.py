"""Where text comes from: files, folders, JSONL, the standard library's sources, parquet, the hub.

Every reader gives the same thing: documents as str, in the same order each time, and a fingerprint of their
content.
"""

from __future__ import annotations

import hashlib
import json
import os
import sysconfig
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

from meshwright.data.manifest import MANIFEST, TOKENS_FILE
from meshwright.data.publish import sha256_file
from meshwright.spec.errors import UserError, did_you_mean

ROWS = (".jsonl", ".ndjson")
PARQUET = ".parquet"
HUB = "hf:"
SYNTHETIC = "synthetic"
SEPARATOR = "<|endoftext|>"  # between the documents of one .txt file, as GPT-2's data sets have it

_TEST_FOLDERS = frozenset({"test", "tests", "idle_test"})
_NOT_STDLIB = _TEST_FOLDERS | {"site-packages", "dist-packages", "__pycache__"}


class TextSource(Protocol):
    """Documents in a fixed order."""

    name: str
    """Name that the user gave."""
    skipped: Counter[str]
    """Why files and rows were left out of the last complete walk over `documents`, with counts."""

    def fingerprint(self) -> str:
        """SHA-256 of names and content: another one when anything was added, removed or changed."""
        ...

    def documents(self) -> Iterator[str]:
        """Each document's text; never an empty one. Raises `UserError` that names the file."""
        ...


def open_source(corpus: str, text_key: str) -> TextSource:
    """The reader of `data.corpus`: 'stdlib', 'hf:NAME[:CONFIG]', a file, or a folder. Raises `UserError`."""
    if corpus == "stdlib":
        return _stdlib()
    if corpus == SYNTHETIC:
        raise UserError(
            f"data.corpus: '{SYNTHETIC}' has no text to tokenize; train on it as it is, or give text"
        )
    if corpus.startswith(HUB):
        return HubSource(corpus, text_key)
    if not corpus:
        raise UserError(
            f"data.corpus: '' names nothing; give 'stdlib', '{SYNTHETIC}', '{HUB}NAME', a file or a folder"
        )
    path = Path(corpus).expanduser()
    if path.is_file():
        return FileSource(corpus, path.parent, [path], text_key, named=True)
    if path.is_dir():
        paths = _walk(path)
        _refuse_tokens(path, paths)
        return FileSource(corpus, path, paths, text_key, named=False)
    if path.exists():
        raise UserError(
            f"data.corpus: {corpus} is neither a file nor a folder but a pipe, a socket or a device, and "
            "text is read more than once; write it to a file first"
        )
    beside = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
    raise UserError(
        f"data.corpus: there is no file or folder {corpus}{did_you_mean(path.name, beside)}; "
        f"'stdlib', '{SYNTHETIC}' and '{HUB}NAME' need none"
    )


def _stdlib() -> TextSource:
    root = Path(sysconfig.get_path("stdlib"))
    paths = [path for path in _walk(root, _NOT_STDLIB) if path.suffix == ".py"]
    return FileSource("stdlib", root, paths, text_key="", named=False)


def _walk(root: Path, without: frozenset[str] = frozenset()) -> list[Path]:
    """Files below `root`, sorted, without hidden ones, hidden folders and symbolic links."""
    found: list[Path] = []
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if not name.startswith(".") and name not in without]
        paths = [Path(folder, name) for name in files if not name.startswith(".")]
        found += [path for path in paths if path.is_file() and not path.is_symlink()]
    return sorted(found, key=lambda path: path.relative_to(root).parts)


def _refuse_tokens(root: Path, paths: list[Path]) -> None:
    """Refuse a folder of token shards, or one with such a folder in it: its files are no text."""
    for path in paths:
        folder = path.parent
        if not TOKENS_FILE.fullmatch(path.name):
            continue
        if not (folder / MANIFEST).is_file():
            raise UserError(
                f"data.corpus: {folder} holds tokens, and its {MANIFEST} is missing; tokenize its text again"
            )
        remedy = (
            "train on it as it is, or give the text it was made of"
            if folder == root
            else f"give that folder, or move it out of {root}"
        )
        raise UserError(f"data.corpus: {folder} holds tokens already and not text; {remedy}")


class FileSource:
    """Text files, one document each, and JSONL and parquet files, one document a row.

    A file that the user named must be readable as text. In a folder, files that are empty, binary (holding a
    NUL byte) or not UTF-8 are left out and counted.
    """

    def __init__(self, name: str, root: Path, paths: list[Path], text_key: str, *, named: bool) -> None:
        self.name = name
        self.skipped: Counter[str] = Counter()
        self._root = root
        self._paths = paths
        self._text_key = text_key
        self._named = named

    def fingerprint(self) -> str:
        """SHA-256 over relative names, sizes and content hashes of all files."""

        def one(path: Path) -> str:
            with _reading(path):
                return (
                    f"{path.relative_to(self._root).as_posix()}\0{path.stat().st_size}\0{sha256_file(path)}\n"
                )

        with ThreadPoolExecutor() as pool:
            lines = list(pool.map(one, self._paths))
        return hashlib.sha256("".join(lines).encode("utf-8", "surrogateescape")).hexdigest()

    def documents(self) -> Iterator[str]:
        """Each document's text, file by file."""
        self.skipped.clear()
        for path in self._paths:
            if path.suffix in ROWS:
                yield from self._rows(path)
            elif path.suffix == PARQUET:
                rows = _load_dataset("parquet", data_files=str(path))
                yield from _row_texts(_numbered(rows, path), self._text_key, self.skipped)
            else:
                yield from self._text(path)

    def _text(self, path: Path) -> Iterator[str]:
        with _reading(path):
            raw = path.read_bytes()
        reason = "binary" if b"\0" in raw[:8192] else ""
        try:
            text = raw.decode("utf-8")
        except UnicodeDecodeError:
            reason = reason or "not UTF-8"
        if reason and self._named:
            raise UserError(f"data.corpus: {path} is {reason}; give UTF-8 text, JSONL or parquet")
        if reason:
            self.skipped[reason] += 1
            return
        parts = text.split(SEPARATOR) if path.suffix == ".txt" else [text]
        texts = [part for part in parts if part.strip()]
        if not texts:
            self.skipped["empty"] += 1
        yield from texts

    def _rows(self, path: Path) -> Iterator[str]:
        def rows() -> Iterator[tuple[str, Any]]:
            with _reading(path), path.open("rb") as file:
                for number, line in enumerate(file, start=1):
                    if line.strip():
                        try:
                            row = json.loads(line)
                        except (ValueError, RecursionError) as error:
                            raise UserError(
                                f"data.corpus: {path} line {number} is not JSON ({error})"
                            ) from error
                        yield f"{path} line {number}", row

        yield from _row_texts(rows(), self._text_key, self.skipped)


class HubSource:
    """A data set of the Hugging Face hub, its 'train' split: 'hf:NAME' or 'hf:NAME:CONFIG'."""

    def __init__(self, name: str, text_key: str) -> None:
        self.name = name
        self.skipped: Counter[str] = Counter()
        path, _, config = name.removeprefix(HUB).partition(":")
        if not path.strip():
            raise UserError(f"data.corpus: '{name}' lacks the data set's name; give '{HUB}NAME'")
        self._path, self._config = path, config or None
        self._text_key = text_key

    def fingerprint(self) -> str:
        """SHA-256 over the text of all rows."""
        digest = hashlib.sha256()
        for text in self.documents():
            digest.update(hashlib.sha256(text.encode()).digest())
        return digest.hexdigest()

    def documents(self) -> Iterator[str]:
        """The text of each row."""
        self.skipped.clear()
        rows = _load_dataset(self._path, name=self._config)
        yield from _row_texts(_numbered(rows, self.name), self._text_key, self.skipped)


def _numbered(rows: Iterator[Any], where: Path | str) -> Iterator[tuple[str, Any]]:
    """Each row of a file or a data set without lines, behind its place."""
    for number, row in enumerate(rows, start=1):
        yield f"{where} row {number}", row


def _row_texts(rows: Iterator[tuple[str, Any]], key: str, skipped: Counter[str]) -> Iterator[str]:
    """The texts under `key`; `rows` gives each row behind its place, for messages."""
    for place, row in rows:
        if not isinstance(row, dict) or key not in row:
            keys = list(row) if isinstance(row, dict) else []
            hint = did_you_mean(key, keys) or (f"; its keys are {', '.join(keys)}" if keys else "")
            raise UserError(f"data.text_key: {place} has no key '{key}'{hint}")
        text = row[key]
        if text is None or text == "":
            skipped["empty"] += 1
        elif not isinstance(text, str):
            raise UserError(f"data.text_key: '{key}' in {place} is a {type(text).__name__}, not text")
        elif not _is_utf8(text):
            skipped["not UTF-8"] += 1
        else:
            yield text


def _is_utf8(text: str) -> bool:
    """JSON can spell halves of surrogate pairs, which are no text."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _load_dataset(path: str, **options: Any) -> Iterator[Any]:
    try:
        import datasets
    except ImportError as error:
        raise UserError(
            "data.corpus: parquet and hub data sets need the package datasets; pip install 'meshwright[hf]'"
        ) from error
    try:
        rows = datasets.load_dataset(path, split="train", streaming=True, **options)
        yield from rows
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        shown = options.get("data_files", path)
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(f"data.corpus: {shown} cannot be read by datasets ({reason})") from error


class _reading:  # noqa: N801 - reads as a verb in `with _reading(path):`
    """Turn what the file system refuses into a `UserError` that names the file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, OSError):
            raise UserError(f"data.corpus: {self._path} cannot be read ({error.strerror})") from error
