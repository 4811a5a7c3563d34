"""Readers of text: files, JSONL, parquet, the hub.

Every reader gives documents as str, in one fixed order, and a fingerprint of their content.
"""

from __future__ import annotations

import codecs
import hashlib
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from typing import IO, Any, TypeVar

from meshwright.data.chat_formats import near_format
from meshwright.data.publish import readable
from meshwright.data.row_files import (
    ALWAYS_ROWS,
    LARGEST_DOCUMENT,
    NAMED_ROWS,
    READABLE,
    SOURCES,
    Rows,
    rows_of,
    too_large,
)
from meshwright.data.tokenizer import IDs, Tokenizer
from meshwright.spec.errors import UserError, did_you_mean
from meshwright.spec.files import LFS_POINTER
from meshwright.storage.stored_file import StoredFile
from meshwright.units import gigabytes

SYNTHETIC = "synthetic"
SEPARATOR = "<|endoftext|>"  # between the documents of one .txt file, as in GPT-2's data sets

PACKED = (".gz", ".bz2", ".xz", ".zst", ".zip", ".lz4")
"""Suffixes of compressed files, which are not read but for those of `sources.unpacked`."""
UNPACKED_FREELY, MOST_UNPACKED = 2**26, 1000
"""A compressed file may spell so many characters, or so many times its size: 479 bytes can be a gigabyte."""

COMPRESSES = (".parquet", ".arrow")
"""Suffixes of files of rows that may be compressed inside."""
_UTF16 = (b"\xff\xfe", b"\xfe\xff")
"""Byte-order marks."""

ROWS_WANTED = 'give an array of objects with a text each, as in [{"text": "Once"}, {"text": "Twice"}]'

_HEAD, _AT_ONCE = 2**13, 2**22
"""Bytes of a file of text that say whether it is binary, and bytes of it that are read at once."""

Encoded = tuple[IDs, int, int]
"""(token ids, UTF-8 bytes of the text, hash of the text) of a document."""


_T = TypeVar("_T")


class TextSource(ABC):
    """Documents in a fixed order.

    `name` is the one that the user gave. `skipped` counts the files and rows that the last complete walk over
    `documents` left out, by reason.
    """

    is_text = True
    """False where they are token ids already."""

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

    def rows(self) -> Rows:
        """Yield the rows, each a chat. Raises `UserError` where there are none, and for wrong ones."""
        raise UserError(
            f"data.format: {self.name} has no rows, and chats are rows; give JSON, JSONL, parquet or Arrow"
        )

    def first_row(self) -> Any:
        """Return the first row; None where the documents are no rows."""
        return None

    def fingerprint_of_rows(self) -> str:
        """Return a SHA-256 of the rows, which changes when one is added, removed or altered."""
        return self.fingerprint()

    def size(self) -> int | None:
        """Return the bytes that its files take; None where that is not known before all is read."""
        return None

    def check_text(self) -> None:
        """Raise `UserError` if the documents are not text, which a tokenizer could be trained on."""
        if not self.is_text:
            raise UserError(
                f"data.tokenizer: {self.name} holds token ids, which only the tokenizer that they were made "
                "with can spell; give its tokenizer.json"
            )

    def encoded(
        self, tokenizer: Tokenizer, encode: Callable[[Iterator[str]], Iterator[Encoded]]
    ) -> Iterator[Encoded]:
        """Yield the documents as ids of `tokenizer`, which `encode` makes of texts. Raises `UserError`."""
        return encode(self.documents())

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


class FileSource(TextSource):
    """Text files, one document each, and JSONL, JSON, CSV, TSV and parquet files, one document a row.

    A file that the user named must be readable as text. In a folder, files that are empty, binary (holding a
    NUL byte) or not UTF-8 are left out and counted; and JSON, CSV and TSV, which may be sources, are rows if
    the first one has the key of the text.
    """

    def __init__(
        self, name: str, files: Sequence[StoredFile], text_key: str, *, named: bool, links: int = 0
    ) -> None:
        super().__init__(name, text_key)
        self._links = links
        self._files = files
        self._named = named

    def fingerprint(self) -> str:
        """Return the SHA-256 of relative names and versions of all files."""
        return fingerprint_of(self._files)

    def size(self) -> int:
        """Return the bytes of the files that are read, packed ones as they are kept."""
        return sum(file.size() for file in self._files if not self._is_binary(file))

    def _is_binary(self, file: StoredFile) -> bool:
        """Return True for a file that is left out since it begins with what no text has."""
        if file.stored is not file or file.suffix in (*ALWAYS_ROWS, *NAMED_ROWS, *COMPRESSES):
            return False
        with readable(f"data.corpus: {file}", READABLE):
            return b"\0" in file.head(_HEAD)

    def documents(self) -> Iterator[str]:
        """Yield each document's text, file by file."""
        for file in self._present():
            is_packed = file.stored is not file
            if self._has_rows(file):
                texts = self._texts(self._counted(rows_of(file)))
                is_packed = is_packed or file.suffix in COMPRESSES
            else:
                texts = self._parts(file)
            yield from _bounded(file, texts, len) if is_packed else texts

    def rows(self) -> Rows:
        """Yield the rows of all files, file by file; files of a folder that have none are counted."""
        for file in self._present():
            if not _may_have_rows(file):
                if self._named:
                    super().rows()
                self.skipped["files without rows"] += 1
                continue
            rows = rows_of(file)
            packed = file.stored is not file or file.suffix in COMPRESSES
            yield from _bounded(file, rows, lambda row: len(str(row[1]))) if packed else rows

    def first_row(self) -> Any:
        """Return the first row of the first file that has rows; None for sources, and where it is no JSON."""
        file = next(filter(_may_have_rows, self._files), None)
        if file is None or file.head(_HEAD).startswith(LFS_POINTER):
            return None
        if self._named or file.suffix in ALWAYS_ROWS:
            return next((row for _, row in rows_of(file)), None)
        try:
            return next((row for _, row in rows_of(file)), None)
        except UserError:  # a source of another kind
            return None

    def _present(self) -> Iterator[StoredFile]:
        """Yield the files; pointers of Git LFS are counted, or refused where one is named."""
        self.skipped.clear()
        if self._links:
            self.skipped["link"] = self._links
        for file in self._files:
            with readable(f"data.corpus: {file}", READABLE):
                head = file.stored.head(_HEAD)
            if not head.startswith(LFS_POINTER):
                yield file
                continue
            if self._named:
                raise UserError(f"data.corpus: {file} is a pointer of Git LFS; fetch the file: git lfs pull")
            self.skipped["pointer of Git LFS"] += 1

    def check_first(self) -> None:
        """Raise the `UserError` of the first document, unless reading it takes long.

        That is so of parquet and arrow files, and of large files that may be one document.
        """
        if not self._files:
            return
        first = self._files[0]
        if first.suffix not in COMPRESSES and (first.suffix in NAMED_ROWS or first.size() <= _AT_ONCE):
            next(self.documents(), None)

    def _has_rows(self, file: StoredFile) -> bool:
        """Return True for a file whose rows are documents, False for one that is text."""
        if file.suffix not in NAMED_ROWS or (self._named and file.suffix not in SOURCES):
            return file.suffix in ALWAYS_ROWS or file.suffix in NAMED_ROWS
        try:
            _, first = next(rows_of(file), ("", None))
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

    def _parts(self, file: StoredFile) -> Iterator[str]:
        """Yield the documents of a file of text."""
        with readable(f"data.corpus: {file}", READABLE), file.open() as opened:
            raw = opened.read(_HEAD)
            reason = "binary" if b"\0" in raw else ""
            packed = file.suffix in PACKED
            if reason and not packed and raw.startswith(_UTF16):
                reason = "not UTF-8"
            if not reason:
                raw = _read_on(opened, raw, LARGEST_DOCUMENT)
                if len(raw) > LARGEST_DOCUMENT:
                    if file.suffix != ".txt":
                        raise too_large(file)
                    yield from _long_text(file, raw, opened)
                    return
        try:
            text = raw.decode("utf-8-sig")  # a byte-order mark is no part of the text
        except UnicodeDecodeError:
            reason = reason or "not UTF-8"
        if reason and self._named:
            remedy = (
                "unpack it first" if packed else "give UTF-8 text, JSON, JSONL, CSV, TSV, parquet or Arrow"
            )
            raise UserError(f"data.corpus: {file} is {reason}; {remedy}")
        if reason:
            self.skipped["compressed" if packed else reason] += 1
            return
        texts = _documents(file, text.split(SEPARATOR) if file.suffix == ".txt" else [text])
        first = next(texts, None)
        if first is None:
            self.skipped["empty"] += 1
            return
        yield first
        yield from texts


def fingerprint_of(files: Sequence[StoredFile]) -> str:
    """Return the SHA-256 of the places and versions of files. Raises `UserError`."""

    def describe(file: StoredFile) -> str:
        with readable(f"data.corpus: {file}", READABLE):
            return f"{'/'.join(file.stored.parts)}\0{file.version()}\n"

    with ThreadPoolExecutor() as pool:
        lines = list(pool.map(describe, files))
    return hashlib.sha256("".join(lines).encode("utf-8", "surrogateescape")).hexdigest()


def _read_on(file: IO[bytes], raw: bytes, most: int) -> bytes:
    """Return `raw` and what follows it in a file, which is read until they are more than `most` bytes."""
    parts, size = [raw], len(raw)
    while size <= most and (part := file.read(_AT_ONCE)):
        parts.append(part)
        size += len(part)
    return b"".join(parts)


def _documents(file: StoredFile, parts: Iterable[str]) -> Iterator[str]:
    """Yield the texts of a file that are not blank. Raises `UserError` for one that is too large."""
    for part in parts:
        if len(part) > LARGEST_DOCUMENT:
            raise too_large(file)
        if part and not part.isspace():
            yield part


def _long_text(file: StoredFile, raw: bytes, opened: IO[bytes]) -> Iterator[str]:
    """Yield the documents of a .txt file that is not read whole: it begins with `raw`, and goes on.

    Raises `UserError` where it is not UTF-8, which comes too late to leave it out.
    """
    decoder = codecs.getincrementaldecoder("utf-8-sig")()
    place, text = 0, ""
    try:
        while raw:
            text += decoder.decode(raw)
            place += len(raw)
            *parts, text = text.split(SEPARATOR)
            yield from _documents(file, parts)
            if len(text) > LARGEST_DOCUMENT:
                raise too_large(file)
            raw = opened.read(_AT_ONCE)
        text += decoder.decode(b"", final=True)
    except UnicodeDecodeError as error:
        raise UserError(
            f"data.corpus: {file} is not UTF-8 near its byte {place:,}; convert it first"
        ) from error
    yield from _documents(file, [text])


def _hint(key: str, row: Any) -> str:
    """Return what to say of a row that lacks `key`: its keys, and what to do."""
    if not isinstance(row, dict):
        return f"; it is no object: {ROWS_WANTED}"
    keys = [name for name in row if isinstance(name, str)]
    if len(keys) == 1:
        for mark, name in ((";", "';'"), ("\t", "tabs"), ("|", "'|'")):
            if key in (name.strip() for name in keys[0].split(mark)):
                return f"; its fields are divided by {name}: give it as CSV with commas, or as TSV with tabs"
    near = near_format(row)
    if not near and (meant := did_you_mean(key, keys)):
        return meant
    if not keys:
        return f"; it has no keys: {ROWS_WANTED}"
    instead = _instead(row)
    if near:
        has_text = any(isinstance(value, str) for value in row.values())
        instead = f"{near}; to train on text alone, {instead}" if has_text else near
    return f"; its keys are {', '.join(keys)}; {instead}"


def _instead(row: dict[str, Any]) -> str:
    """Return what to do about a row whose keys are others."""
    texts = [name for name, value in row.items() if isinstance(value, str)]
    if len(texts) == 1:
        return f"give data.text_key = '{texts[0]}'"
    if len(texts) > 1:
        return "give data.text_key = one of them, or write what belongs together as one text first"
    if tables := [name for name, value in row.items() if isinstance(value, list)]:
        return f"if its rows are in '{tables[0]}', give that array alone: {ROWS_WANTED}"
    return "none of them is text; give data.text_key = one that is text in all rows, or write the text first"


def _may_have_rows(file: StoredFile) -> bool:
    return file.suffix in ALWAYS_ROWS or file.suffix in NAMED_ROWS


def _bounded(file: StoredFile, texts: Iterator[_T], size_of: Callable[[_T], int]) -> Iterator[_T]:
    """Yield the texts of a compressed file, unless they are far more than a file of its size has to tell."""
    size, found = file.size(), 0
    most = max(UNPACKED_FREELY, MOST_UNPACKED * size)
    for text in texts:
        found += size_of(text)
        if found > most:
            raise UserError(
                f"data.corpus: {file} has {gigabytes(size)} and unpacks to more than {gigabytes(most)} of "
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
