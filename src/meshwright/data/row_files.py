"""Rows of files that hold a table: JSON lines, JSON, CSV, TSV, parquet and Arrow, each row with its place."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain, count, zip_longest
from typing import Any

from meshwright.data.publish import readable
from meshwright.spec.errors import UserError
from meshwright.storage.stored_file import StoredFile
from meshwright.units import gigabytes

LARGEST_DOCUMENT = 2**28
"""Most characters of one document, or bytes of the line that it is in: tokenizing it takes ten times that."""
READABLE = "give text that this user may read"
MEND = "mend or remove that line"

_BLOCK = 2**20
"""Characters of a JSON file that are read at once at least."""

_NUMBER = frozenset("0123456789.eE+-")
"""Characters that a number may go on with."""
_ARRAY = re.compile(rb"(\xef\xbb\xbf)?\s*\[\s*[{\"\]]")
_END_OF_TABLE = "\x1a end of the table \x1a"
"""A line after the last one of a table, which is a row of its own unless a quote is open there."""

Rows = Iterator[tuple[str, Any]]
"""(place, row): the place is the file with the number of a line or row, for messages."""


def rows_of(file: StoredFile) -> Rows:
    """Yield the rows of a file whose suffix is one of `ALWAYS_ROWS` or `NAMED_ROWS`. Raises `UserError`."""
    yield from (ALWAYS_ROWS | NAMED_ROWS)[file.suffix](file)


def too_large(place: StoredFile | str) -> UserError:
    """Return the error to raise for a document of more than `LARGEST_DOCUMENT`."""
    return UserError(
        f"data.corpus: the document in {place} has more than {gigabytes(LARGEST_DOCUMENT)}, and tokenizing "
        f"it takes ten times its size in memory; divide it into several documents"
    )


def load_dataset(source: StoredFile | str, path: str, **options: Any) -> Rows:
    """Yield the rows that datasets reads of a parquet or Arrow file, or of a data set, which messages call
    `source`."""
    try:
        import datasets
    except ImportError as error:
        raise UserError(
            "data.corpus: parquet, Arrow and hub data sets need the package datasets; pip install "
            "'meshwright[hf]'"
        ) from error
    try:
        rows = datasets.load_dataset(path, split="train", streaming=True, **options)
        for number, row in enumerate(rows, start=1):
            yield f"{source} row {number}", row
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(f"data.corpus: {source} cannot be read by datasets ({reason})") from error


def _parquet_rows(file: StoredFile) -> Rows:
    if not _is_empty_parquet(file):  # which datasets refuses
        yield from load_dataset(file, "parquet", data_files=file.name)


def _arrow_rows(file: StoredFile) -> Rows:
    yield from load_dataset(file, "arrow", data_files=file.name)


def _is_empty_parquet(file: StoredFile) -> bool:
    try:
        from pyarrow import ArrowException, parquet
    except ImportError:
        return False
    try:
        with file.open() as opened:
            return bool(parquet.ParquetFile(opened).metadata.num_rows == 0)
    except (OSError, ArrowException):
        return False


def _json_lines(file: StoredFile) -> Rows:
    """Yield the value of each line that is not blank; the objects of an array, if the file is one.

    From a line that is not one value on, values are read one after the other, as in a .json file.
    """
    with readable(f"data.corpus: {file}", READABLE):
        if _ARRAY.match(file.head(_BLOCK)):
            yield from _json_values(file)
            return
    with readable(f"data.corpus: {file}", READABLE), file.open() as opened:
        lines = iter(partial(opened.readline, LARGEST_DOCUMENT + 1), b"")
        start = rows = 0
        for number, line in enumerate(lines, start=1):
            place = f"{file} line {number}"
            if line.strip():
                try:
                    row = _one_value(line, place)
                except UserError as error:
                    yield from _values_from(file, start, rows, error)
                    return
                rows += 1
                yield place, row
            start += len(line)


def _one_value(line: bytes, place: str) -> Any:
    """Return the JSON value of a line. Raises `UserError`."""
    if len(line) > LARGEST_DOCUMENT:
        raise too_large(place)
    try:
        return json.loads(line)
    except UnicodeDecodeError as error:
        raise UserError(f"data.corpus: {place} is not UTF-8 ({error}); convert the file first") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"data.corpus: {place} is not JSON ({error}); {MEND}") from error


def _values_from(file: StoredFile, start: int, rows: int, error: UserError) -> Rows:
    """Yield the values from the byte `start` on, which `rows` values precede; raise `error` if the first one
    is wrong."""
    values = _json_values(file, start, rows)
    try:
        first = next(values)
    except UserError:
        raise error from error.__cause__
    yield first
    yield from values


def _json_values(stored: StoredFile, offset: int = 0, number: int = 0) -> Rows:
    """Yield the values of a JSON file: those of one array, or else values one after the other.

    From a byte `offset` on, which `number` values precede, the file is no array.
    """
    decoder, text, start = json.JSONDecoder(), "", 0
    array: bool | None = False if offset else None
    with readable(f"data.corpus: {stored}", READABLE), stored.open(offset) as raw:
        file = io.TextIOWrapper(raw, encoding="utf-8-sig")
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
                place = f"{stored} row {number}"
                value, text, start = _value(decoder, text, start, file, place)
                yield place, value
        except UnicodeDecodeError as error:
            raise UserError(
                f"data.corpus: {stored} is not UTF-8 ({error}); convert the file first"
            ) from error
        except (ValueError, RecursionError) as error:
            raise UserError(
                f"data.corpus: {stored} is not JSON at row {max(number, 1)} ({error}); give an array of "
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


def _table_rows(file: StoredFile, delimiter: str) -> Rows:
    """Yield the rows of a CSV file with a header (RFC 4180), as objects of text; blank lines are no rows.

    Text behind a closing quote belongs to the field, as in pandas, whose reader datasets uses.
    """
    csv.field_size_limit(LARGEST_DOCUMENT)
    with readable(f"data.corpus: {file}", READABLE), file.open() as raw:
        lines = io.TextIOWrapper(raw, encoding="utf-8-sig", newline="")
        table = csv.reader(chain(lines, [_END_OF_TABLE]), delimiter=delimiter)
        try:
            filled = (row for row in table if row)
            names: list[str] | None = None
            for number, row in enumerate(filled):
                if row == [_END_OF_TABLE]:
                    return
                if row[-1].endswith(_END_OF_TABLE):
                    place = f"row {number}" if number else "the header"
                    raise UserError(
                        f"data.corpus: {file} is not CSV: {place} opens a quote and does not close it; {MEND}"
                    )
                if names is None:
                    names = _columns(row)
                    continue
                if len(row) > len(names):
                    raise UserError(
                        f"data.corpus: {file} row {number} has {len(row)} fields, and its header has "
                        f"{len(names)}; put fields with {delimiter!r} in quotes"
                    )
                yield f"{file} row {number}", dict(zip_longest(names, row))
        except csv.Error as error:
            if "field limit" in str(error):
                raise too_large(f"{file} line {table.line_num}") from error
            raise UserError(
                f"data.corpus: {file} line {table.line_num} is not CSV ({error}); {MEND}"
            ) from error
        except UnicodeDecodeError as error:
            raise UserError(f"data.corpus: {file} is not UTF-8; convert it first") from error


def _columns(header: list[str]) -> list[str]:
    """Return the names of columns; the second one of a name is NAME.1, as in pandas."""
    names: list[str] = []
    for name in header:
        again = (f"{name}.{number}" for number in count(1))
        names.append(name if name not in names else next(other for other in again if other not in names))
    return names


ALWAYS_ROWS: dict[str, Callable[[StoredFile], Rows]] = {
    ".jsonl": _json_lines,
    ".jsonlines": _json_lines,
    ".ndjson": _json_lines,
    ".parquet": _parquet_rows,
    ".arrow": _arrow_rows,
}
"""Readers of files that hold rows wherever they are, by suffix."""
NAMED_ROWS: dict[str, Callable[[StoredFile], Rows]] = {
    ".json": _json_values,
    ".jl": _json_lines,
    ".csv": partial(_table_rows, delimiter=","),
    ".tsv": partial(_table_rows, delimiter="\t"),
}
"""Readers of files that hold rows if they are named; in a folder they may be sources, too."""
SOURCES = (".jl",)
"""Suffixes of `NAMED_ROWS` whose files may be sources if they are named, too, as those of Julia."""
