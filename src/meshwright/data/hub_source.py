"""Data sets of the Hugging Face hub as documents and rows."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from typing import Any

from meshwright.data.readers import TextSource
from meshwright.data.row_files import Rows, load_dataset
from meshwright.spec.errors import UserError

HUB = "hf:"


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
        yield from self._texts(self.rows())

    def rows(self) -> Rows:
        """Yield the rows."""
        self.skipped.clear()
        yield from load_dataset(self.name, self._path, name=self._config or None)

    def first_row(self) -> Any:
        """Return the first row; None where there is none."""
        return next((row for _, row in self.rows()), None)

    def fingerprint_of_rows(self) -> str:
        """Return the SHA-256 of all rows as JSON."""
        digest = hashlib.sha256()
        for _, row in self.rows():
            digest.update(hashlib.sha256(json.dumps(row, default=str).encode()).digest())
        return digest.hexdigest()
