"""Rows that a program has in memory, such as a `datasets.Dataset`, as a file that `data.corpus` can name."""

from __future__ import annotations

import hashlib
import json
import os
import secrets
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from meshwright.data.verified import cache_folder
from meshwright.spec.errors import StorageError, UserError
from meshwright.spec.records import show

FOLDER = "rows"
"""Folder of such files in `data.cache`."""


def write_rows(rows: Iterable[Mapping[str, Any]], cache: str | None = None, key: str = "dataset") -> Path:
    """Write rows as JSON lines into the folder `cache`, and return the file.

    Its name is the SHA-256 of its content, so that the same rows are one file, however often and by however
    many processes they are written. Messages name the rows `key`. Raises `UserError` for what holds no rows
    or values that are not JSON.
    """
    if isinstance(rows, Mapping):
        splits = ", ".join(map(str, rows))
        raise UserError(f"{key}: has the splits {splits or 'none'}; give one of them, as {key}['train']")
    folder = cache_folder(cache) / FOLDER
    unfinished = folder / f".{secrets.token_hex(8)}.tmp"
    digest = hashlib.sha256()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with unfinished.open("wb") as file:
            for number, row in enumerate(rows):
                line = _line(row, number, key)
                digest.update(line)
                file.write(line)
            if not file.tell():
                raise UserError(f"{key}: has no rows; give some")
        target = folder / f"{digest.hexdigest()[:32]}.jsonl"
        os.replace(unfinished, target)
    except OSError as error:
        raise StorageError(
            f"data.cache: {folder} cannot be written ({error.strerror}); give another"
        ) from error
    finally:
        unfinished.unlink(missing_ok=True)
    return target


def _line(row: Any, number: int, key: str) -> bytes:
    if not isinstance(row, Mapping):
        raise UserError(f"{key}: row {number} is {show(row)}; give objects with the keys of a chat or a text")
    try:
        return (json.dumps(dict(row), ensure_ascii=False, allow_nan=False) + "\n").encode()
    except (TypeError, ValueError) as error:
        raise UserError(
            f"{key}: row {number} is not JSON ({error}); keep the columns with the text or the messages"
        ) from None
