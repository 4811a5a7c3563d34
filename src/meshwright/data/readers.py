"""Where text comes from: files, folders, JSONL, the standard library's sources, parquet, the hub.

Every reader gives documents as str, in one fixed order, and a fingerprint of their content.
"""

from __future__ import annotations

import hashlib
import os
import sysconfig
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path
from typing import Any

from meshwright.data.manifest import MANIFEST, TOKENS_FILE
from meshwright.data.publish import readable, sha256_file
from meshwright.data.row_files import (
    ALWAYS_ROWS,
    LARGEST_DOCUMENT,
    NAMED_ROWS,
    READABLE,
    SOURCES,
    load_dataset,
    rows_of,
    too_large,
)
from meshwright.spec.errors import UserError, did_you_mean
from meshwright.spec.files import is_lfs_pointer, user_path
from meshwright.spec.hf.json_object import read_json_object
from meshwright.units import gigabytes

HUB = "hf:"
SYNTHETIC = "synthetic"
SEPARATOR = "<|endoftext|>"  # between the documents of one .txt file, as in GPT-2's data sets

PACKED = (".gz", ".bz2", ".xz", ".zst", ".zip", ".lz4")
"""Suffixes of compressed files, which are not read."""
UNPACKED_FREELY, MOST_UNPACKED = 2**26, 1000
"""A parquet file may spell so many characters, or so many times its size: 479 bytes can spell a gigabyte."""

COMPRESSES = (".parquet", ".arrow")
"""Suffixes of files of rows that may be compressed inside."""
_UTF16 = (b"\xff\xfe", b"\xfe\xff")
"""Byte-order marks."""

ROWS_WANTED = 'give an array of objects with a text each, as in [{"text": "Once"}, {"text": "Twice"}]'
CHATS = ("messages", "conversations", "conversation")
"""Keys under which data sets have chats."""

_TEST_FOLDERS = frozenset({"test", "tests", "idle_test"})
_NOT_STDLIB = _TEST_FOLDERS | {"site-packages", "dist-packages", "__pycache__"}


class TextSource(ABC):
    """Documents in a fixed order.

    `name` is the one that the user gave. `skipped` counts the files and rows that the last complete walk over
    `documents` left out, by reason.
    """

    def __init__(self, name: str, text_key: str) -> None:
        self.name = name
        self.skipped: Counter[str] = Counter()
        self._text_key = text_key

    @abstractmethod
    def fingerprint(self) -> str:
        """Return a SHA-256 of names and content, which changes when anything is added, removed or altered."""

    @abstractmethod
    def documents(self) -> Iterator[str]:
        """Yield each document's text, never an empty one. Raises `UserError` that names the file."""

    def _texts(self, rows: Iterable[tuple[str, Any]]) -> Iterator[str]:
        """Yield the texts of rows; each comes with its place, for messages."""
        key = self._text_key
        for place, row in rows:
            if not isinstance(row, dict) or key not in row:
                raise UserError(f"data.text_key: {place} has no key '{key}'{_hint(key, row)}")
            text = row[key]
            if text is None or text == "":
                self.skipped["empty"] += 1
            elif not isinstance(text, str):
                remedy = ROWS_WANTED if isinstance(text, list) else "give text, or another data.text_key"
                raise UserError(
                    f"data.text_key: '{key}' in {place} is a {type(text).__name__}, not text; {remedy}"
                )
            elif not _is_utf8(text):
                self.skipped["not UTF-8"] += 1
            elif len(text) > LARGEST_DOCUMENT:
                raise too_large(place)
            else:
                yield text


def open_source(corpus: str, text_key: str) -> TextSource:
    """Return the reader of 'stdlib', 'hf:NAME[:CONFIG]', a file, or a folder. Raises `UserError`."""
    if corpus == "stdlib":
        root = Path(sysconfig.get_path("stdlib"))
        paths = [path for path in _walk(root, _NOT_STDLIB) if path.suffix == ".py" and not path.is_symlink()]
        return FileSource("stdlib", root, paths, text_key="", named=False)
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
    path = user_path(corpus, "data.corpus")
    if path.is_file():
        return FileSource(corpus, path.parent, [path], text_key, named=True)
    if path.is_dir():
        found = _walk(path)
        paths = _rows_of_data_sets([each for each in found if not _leads_out(each)])
        _refuse_tokens(path, paths)
        links = sum(map(_leads_out, found))
        return FileSource(corpus, path, paths, text_key, named=False, links=links)
    if path.exists():
        raise UserError(
            f"data.corpus: {corpus} is neither a file nor a folder but a pipe, a socket or a device, and "
            "text is read more than once; write it to a file first"
        )
    siblings = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
    raise UserError(
        f"data.corpus: there is no file or folder {corpus}{did_you_mean(path.name, siblings)}; "
        f"'stdlib', '{SYNTHETIC}' and '{HUB}NAME' need none"
    )


def _walk(root: Path, without: frozenset[str] = frozenset()) -> list[Path]:
    """Return the files below `root`, sorted, without hidden ones, hidden folders and links to folders."""
    paths: list[Path] = []
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if not name.startswith(".") and name not in without]
        visible = [Path(folder, name) for name in files if not name.startswith(".")]
        paths += [path for path in visible if path.is_file()]
    return sorted(paths, key=lambda path: path.relative_to(root).parts)


def _leads_out(path: Path) -> bool:
    """Return True for a link, unless a cache of the hub has it from snapshots/REVISION/ into its blobs/."""
    if not path.is_symlink():
        return False
    target = path.resolve()
    caches = [each.parent.parent for each in path.absolute().parents if each.parent.name == "snapshots"]
    return not any(target.is_relative_to(cache.resolve() / "blobs") for cache in caches)


def _rows_of_data_sets(paths: list[Path]) -> list[Path]:
    """Return the files without those that describe data sets which the package datasets saved.

    Of a folder that `Dataset.save_to_disk` made, the Arrow files that its state.json lists stay. Raises
    `UserError` for one of `DatasetDict`, which holds several.
    """
    left_out: set[Path] = set()
    arrow: dict[Path, list[Path]] = {path.parent: [] for path in paths if path.suffix.lower() == ".arrow"}
    for path in paths:
        if path.parent in arrow:
            arrow[path.parent].append(path)
    for path in paths:
        if path.name == "dataset_dict.json" and any(path.parent in each.parents for each in arrow):
            splits = sorted(each.name for each in arrow if each.parent == path.parent)
            raise UserError(
                f"data.corpus: {path.parent} is a data set with the splits {', '.join(splits)}; give the "
                f"folder of one, such as {path.parent / splits[0]}"
            )
        if path.parent in arrow and path.name == "dataset_info.json":
            left_out.add(path)
        if path.parent in arrow and path.name == "state.json":
            state = read_json_object(path, "data.corpus")
            listed = [file.get("filename") for file in state.get("_data_files") or ()]
            left_out |= {each for each in arrow[path.parent] if each.name not in listed}
    return [path for path in paths if path not in left_out]


def _refuse_tokens(root: Path, paths: list[Path]) -> None:
    """Raise `UserError` if a folder of token shards is among these files below `root`: it holds no text."""
    for path in paths:
        folder = path.parent
        if not TOKENS_FILE.fullmatch(path.name):
            continue
        if not (folder / MANIFEST).is_file():
            raise UserError(
                f"data.corpus: {folder} holds tokens, and its {MANIFEST} is missing; tokenize its text again"
            )
        remedy = f"give that folder, or move it out of {root}"
        if folder == root:
            remedy = "train on it as it is, or give the text it was made of"
        raise UserError(f"data.corpus: {folder} holds tokens already and not text; {remedy}")


class FileSource(TextSource):
    """Text files, one document each, and JSONL, JSON, CSV, TSV and parquet files, one document a row.

    A file that the user named must be readable as text. In a folder, files that are empty, binary (holding a
    NUL byte) or not UTF-8 are left out and counted; and JSON, CSV and TSV, which may be sources, are rows if
    the first one has the key of the text.
    """

    def __init__(
        self, name: str, root: Path, paths: list[Path], text_key: str, *, named: bool, links: int = 0
    ) -> None:
        super().__init__(name, text_key)
        self._links = links
        self._root = root
        self._paths = paths
        self._named = named

    def fingerprint(self) -> str:
        """Return the SHA-256 of relative names, sizes and content hashes of all files."""

        def describe(path: Path) -> str:
            with readable(f"data.corpus: {path}", READABLE):
                name, size = path.relative_to(self._root).as_posix(), path.stat().st_size
                return f"{name}\0{size}\0{sha256_file(path)}\n"

        with ThreadPoolExecutor() as pool:
            lines = list(pool.map(describe, self._paths))
        return hashlib.sha256("".join(lines).encode("utf-8", "surrogateescape")).hexdigest()

    def documents(self) -> Iterator[str]:
        """Yield each document's text, file by file."""
        self.skipped.clear()
        if self._links:
            self.skipped["link"] = self._links
        for path in self._paths:
            if is_lfs_pointer(path):
                if self._named:
                    raise UserError(
                        f"data.corpus: {path} is a pointer of Git LFS; fetch the file: git lfs pull"
                    )
                self.skipped["pointer of Git LFS"] += 1
            elif self._has_rows(path):
                texts = self._texts(self._counted(rows_of(path)))
                yield from _unpacked(path, texts) if path.suffix.lower() in COMPRESSES else texts
            else:
                yield from self._parts(path)

    def _has_rows(self, path: Path) -> bool:
        """Return True for a file whose rows are documents, False for one that is text."""
        suffix = path.suffix.lower()
        if suffix not in NAMED_ROWS or (self._named and suffix not in SOURCES):
            return suffix in ALWAYS_ROWS or suffix in NAMED_ROWS
        try:
            _, first = next(rows_of(path), ("", None))
        except UserError:  # text of another kind
            return False
        return isinstance(first, dict) and (self._named or self._text_key in first)

    def _counted(self, rows: Iterator[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
        """Yield the rows of a file, which counts as empty without any; strings are the column 'text'."""
        first = next(rows, None)
        if first is None:
            self.skipped["empty"] += 1
            return
        rows = chain([first], rows)
        if isinstance(first[1], str):
            rows = ((place, {"text": row} if isinstance(row, str) else row) for place, row in rows)
        yield from rows

    def _parts(self, path: Path) -> Iterator[str]:
        """Yield the documents of a file of text."""
        with readable(f"data.corpus: {path}", READABLE), path.open("rb") as file:
            raw = file.read(8192)
            reason = "binary" if b"\0" in raw else ""
            packed = path.suffix.lower() in PACKED
            if reason and not packed and raw.startswith(_UTF16):
                reason = "not UTF-8"
            is_txt = path.suffix.lower() == ".txt"
            if not reason and not is_txt and path.stat().st_size > LARGEST_DOCUMENT:
                raise too_large(path)
            raw += b"" if reason else file.read()
        try:
            text = raw.decode("utf-8-sig")  # a byte-order mark is no part of the text
        except UnicodeDecodeError:
            reason = reason or "not UTF-8"
        if reason and self._named:
            remedy = (
                "unpack it first" if packed else "give UTF-8 text, JSON, JSONL, CSV, TSV, parquet or Arrow"
            )
            raise UserError(f"data.corpus: {path} is {reason}; {remedy}")
        if reason:
            self.skipped["compressed" if packed else reason] += 1
            return
        parts = text.split(SEPARATOR) if is_txt else [text]
        if any(len(part) > LARGEST_DOCUMENT for part in parts):
            raise too_large(path)
        texts = [part for part in parts if part and not part.isspace()]
        if not texts:
            self.skipped["empty"] += 1
        yield from texts


def _hint(key: str, row: Any) -> str:
    """Return what to say of a row that lacks `key`: its keys, and what to do."""
    if not isinstance(row, dict):
        return f"; it is no object: {ROWS_WANTED}"
    keys = [name for name in row if isinstance(name, str)]
    if len(keys) == 1:
        for mark, name in ((";", "';'"), ("\t", "tabs"), ("|", "'|'")):
            if key in (name.strip() for name in keys[0].split(mark)):
                return f"; its fields are divided by {name}: give it as CSV with commas, or as TSV with tabs"
    if meant := did_you_mean(key, keys):
        return meant
    if not keys:
        return f"; it has no keys: {ROWS_WANTED}"
    return f"; its keys are {', '.join(keys)}; {_instead(row)}"


def _instead(row: dict[str, Any]) -> str:
    """Return what to do about a row whose keys are others."""
    if chats := [name for name in CHATS if isinstance(row.get(name), list)]:
        return (
            f"{chats[0]} are a chat, which is not rendered as text yet: render it first, with the "
            "tokenizer's apply_chat_template, and give the texts"
        )
    texts = [name for name, value in row.items() if isinstance(value, str)]
    if len(texts) == 1:
        return f"give data.text_key = '{texts[0]}'"
    if texts:
        return "give data.text_key = one of them, or write what belongs together as one text first"
    if tables := [name for name, value in row.items() if isinstance(value, list)]:
        return f"if its rows are in '{tables[0]}', give that array alone: {ROWS_WANTED}"
    return "none of them is text; give data.text_key = one that is text in all rows, or write the text first"


class HubSource(TextSource):
    """A data set of the Hugging Face hub, its 'train' split: 'hf:NAME' or 'hf:NAME:CONFIG'."""

    def __init__(self, name: str, text_key: str) -> None:
        super().__init__(name, text_key)
        self._path, _, self._config = name.removeprefix(HUB).partition(":")
        if not self._path.strip():
            raise UserError(f"data.corpus: '{name}' lacks the data set's name; give '{HUB}NAME'")

    def fingerprint(self) -> str:
        """Return the SHA-256 of the text of all rows."""
        digest = hashlib.sha256()
        for text in self.documents():
            digest.update(hashlib.sha256(text.encode()).digest())
        return digest.hexdigest()

    def documents(self) -> Iterator[str]:
        """Yield the text of each row."""
        self.skipped.clear()
        yield from self._texts(load_dataset(self.name, self._path, name=self._config or None))


def _unpacked(path: Path, texts: Iterator[str]) -> Iterator[str]:
    """Yield the texts of a parquet file, unless they are far more than a file of its size has to tell."""
    size, found = path.stat().st_size, 0
    most = max(UNPACKED_FREELY, MOST_UNPACKED * size)
    for text in texts:
        found += len(text)
        if found > most:
            raise UserError(
                f"data.corpus: {path} has {gigabytes(size)} and unpacks to more than {gigabytes(most)} of "
                f"text, as if it were made to fill a disk; if that is meant, give the text as JSONL"
            )
        yield text


def _is_utf8(text: str) -> bool:
    """Return False for text with halves of surrogate pairs, which JSON can spell but UTF-8 cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
