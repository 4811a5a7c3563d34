"""Rows of files that hold a table: JSON lines, JSON, CSV, TSV and parquet, each row with its place."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Callable, Iterator
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any

from meshwright.data.publish import readable
from meshwright.spec.errors import UserError
from meshwright.units import gigabytes

LARGEST_DOCUMENT = 2**28
"""Most characters of one document, or bytes of the line that it is in: tokenizing it takes ten times that."""
READABLE = "give text that this user may read"

_BLOCK = 2**20
"""Characters of a JSON file that are read at once at least."""

_NUMBER = frozenset("0123456789.eE+-")
"""Characters that a number may go on with."""
_ARRAY = re.compile(rb"(\xef\xbb\xbf)?\s*\[\s*\{")

Rows = Iterator[tuple[str, Any]]
"""(place, row): the place is the file with the number of a line or row, for messages."""


def rows_of(path: Path) -> Rows:
    """Yield the rows of a file whose suffix is one of `ALWAYS_ROWS` or `NAMED_ROWS`. Raises `UserError`."""
    yield from (ALWAYS_ROWS | NAMED_ROWS)[path.suffix.lower()](path)


def too_large(place: Path | str) -> UserError:
    """Return the error to raise for a document of more than `LARGEST_DOCUMENT`."""
    return UserError(
        f"data.corpus: the document in {place} has more than {gigabytes(LARGEST_DOCUMENT)}, and tokenizing "
        f"it takes ten times its size in memory; divide it into several documents"
    )


def load_dataset(source: Path | str, path: str, **options: Any) -> Rows:
    """Yield the rows that datasets reads of a parquet file or a data set, which messages call `source`."""
    try:
        import datasets
    except ImportError as error:
        raise UserError(
            "data.corpus: parquet and hub data sets need the package datasets; pip install 'meshwright[hf]'"
        ) from error
    try:
        rows = datasets.load_dataset(path, split="train", streaming=True, **options)
        for number, row in enumerate(rows, start=1):
            yield f"{source} row {number}", row
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(f"data.corpus: {source} cannot be read by datasets ({reason})") from error


def _parquet_rows(path: Path) -> Rows:
    if not _is_empty_parquet(path):  # which datasets refuses
        yield from load_dataset(path, "parquet", data_files=str(path))


def _is_empty_parquet(path: Path) -> bool:
    try:
        from pyarrow import ArrowException, parquet
    except ImportError:
        return False
    try:
        return bool(parquet.ParquetFile(path).metadata.num_rows == 0)
    except (OSError, ArrowException):
        return False


def _json_lines(path: Path) -> Rows:
    """Yield the value of each line that is not blank; the objects of an array, if the file is one."""
    with readable(f"data.corpus: {path}", READABLE), path.open("rb") as file:
        if _ARRAY.match(file.read(_BLOCK)):
            yield from _json_values(path)
            return
        file.seek(0)
        lines = iter(partial(file.readline, LARGEST_DOCUMENT + 1), b"")
        for number, line in enumerate(lines, start=1):
            place = f"{path} line {number}"
            if len(line) > LARGEST_DOCUMENT:
                raise too_large(place)
            if line.strip():
                try:
                    row = json.loads(line)
                except (ValueError, RecursionError) as error:
                    raise UserError(f"data.corpus: {place} is not JSON ({error})") from error
                yield place, row


def _json_values(path: Path) -> Rows:
    """Yield the values of a JSON file: those of one array, or else values one after the other."""
    decoder, text, start, number = json.JSONDecoder(), "", 0, 0
    array: bool | None = None
    with readable(f"data.corpus: {path}", READABLE), path.open(encoding="utf-8-sig") as file:
        try:
            while True:
                text, start = _ahead(text, start, file)
                if array is None:
                    array = text.startswith("[", start)
                    start += array
                    continue
                if array and number and text[start : start + 1] == ",":
                    text, start = _ahead(text, start + 1, file)
                elif array and text[start : start + 1] == "]":
                    text, start = _ahead(text, start + 1, file)
                    array = False  # nothing may follow
                    if start < len(text):
                        raise ValueError(f"there is more after its array: {text[start : start + 20]!r}")
                if start == len(text) and not array:
                    return
                number += 1
                place = f"{path} row {number}"
                value, text, start = _value(decoder, text, start, file, place)
                yield place, value
        except (ValueError, RecursionError) as error:
            raise UserError(
                f"data.corpus: {path} is not JSON at row {max(number, 1)} ({error}); give an array of "
                "objects, or objects one after the other"
            ) from error


def _ahead(text: str, start: int, file: Any) -> tuple[str, int]:
    """Return the text, and the place of its next character that is no space, having read on if need be."""
    while True:
        rest = text[start:].lstrip() if start < len(text) else ""
        if rest:
            return text, len(text) - len(rest)
        text, start = file.read(_BLOCK), 0
        if not text:
            return "", 0


def _value(decoder: json.JSONDecoder, text: str, start: int, file: Any, place: str) -> tuple[Any, str, int]:
    """Return a value that begins at `start`, the text that was read, and where the value ends in it."""
    while True:
        try:
            value, stop = decoder.raw_decode(text, start)
            if stop < len(text) and text[stop] not in _NUMBER:
                return value, text, stop
        except ValueError:  # it goes on in the next block, or is wrong, as the last try says
            pass
        more = file.read(max(_BLOCK, len(text) - start))  # doubles, so that long values are tried seldom
        if not more:
            value, stop = decoder.raw_decode(text, start)
            return value, text, stop
        text, start = text[start:] + more, 0
        if len(text) > LARGEST_DOCUMENT + _BLOCK:
            raise too_large(place)


def _table_rows(path: Path, delimiter: str) -> Rows:
    """Yield the rows of a CSV file with a header (RFC 4180), as objects of text; blank lines are no rows."""
    csv.field_size_limit(LARGEST_DOCUMENT)
    with readable(f"data.corpus: {path}", READABLE), path.open(encoding="utf-8-sig", newline="") as file:
        table = csv.reader(file, delimiter=delimiter, strict=True)
        try:
            filled = (row for row in table if row)
            header = next(filled, [])
            for number, row in enumerate(filled, start=1):
                if len(row) > len(header):
                    raise UserError(
                        f"data.corpus: {path} row {number} has {len(row)} fields, and its header has "
                        f"{len(header)}; put fields with {delimiter!r} in quotes"
                    )
                yield f"{path} row {number}", dict(zip_longest(header, row))
        except csv.Error as error:
            if "field limit" in str(error):
                raise too_large(f"{path} line {table.line_num}") from error
            raise UserError(f"data.corpus: {path} line {table.line_num} is not CSV ({error})") from error
        except UnicodeDecodeError as error:
            raise UserError(f"data.corpus: {path} is not UTF-8; convert it first") from error


ALWAYS_ROWS: dict[str, Callable[[Path], Rows]] = {
    ".jsonl": _json_lines,
    ".ndjson": _json_lines,
    ".parquet": _parquet_rows,
}
"""Readers of files that hold rows wherever they are, by suffix."""
NAMED_ROWS: dict[str, Callable[[Path], Rows]] = {
    ".json": _json_values,
    ".csv": partial(_table_rows, delimiter=","),
    ".tsv": partial(_table_rows, delimiter="\t"),
}
"""Readers of files that hold rows if they are named; in a folder they may be sources, too."""
