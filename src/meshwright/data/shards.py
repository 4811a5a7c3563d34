"""A folder of token shards, opened for reading."""

from __future__ import annotations

import hashlib
import json
import os
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from pydantic import ValidationError

from meshwright.data.document_index import FORMAT, DocumentIndex, DocumentTable, Rows, index_on_disk
from meshwright.data.manifest import DOCUMENT, MANIFEST, VERSION, Manifest, documents_file, tokens_file
from meshwright.data.order import I64
from meshwright.data.tokenizer import TOKENIZER_FILES, Tokenizer
from meshwright.data.verification import Check, Verification
from meshwright.data.verified import FileState, cache_folder, record_folders, state_of
from meshwright.spec.errors import UserError


class TokenSource(DocumentTable, Protocol):
    """A stream of documents [END, t1..tn], one after the other, that can be read at any place."""

    digest: str
    """SHA-256 of everything in the source."""

    def take(self, place: I64) -> I64:
        """Token ids at these places of the stream, in the shape of `place`."""
        ...

    def index(self, val_fraction: float, window: int) -> DocumentIndex:
        """Its documents split in two. `window` is the length of unpacked samples, 0 for packed ones."""
        ...


class TokenShards:
    """A folder of shards opened for reading: a `TokenSource`.

    The first opening checks the SHA-256 of every file, that every token id lies within the vocabulary, and
    that the documents fill the token files; it leaves a record of that. Later ones compare with the record
    what `check` says. Of many processes that open at once, one hashes and the others wait for it. Documents
    and tokens stay on disk, memory-mapped when they are first read. Raises `UserError` that names the file;
    `remedy` ends that sentence.
    """

    def __init__(
        self,
        folder: Path,
        remedy: str = "tokenize the corpus again",
        *,
        cache: Path | None = None,
        check: Check = "files",
    ) -> None:
        self._folder = folder
        self._remedy = remedy
        self._check = check
        self._homes = record_folders(folder, cache or cache_folder(None))
        self.manifest = manifest = self._read_manifest()
        self._dtype = np.dtype("<u2" if manifest.dtype == "uint16" else "<u4")
        self.vocab_size = manifest.vocab_size
        self.digest: str = manifest.digest
        self._check_list()
        self._verified = Verification(folder, manifest, self._homes, remedy).run(check)
        self.tokenizer = self._open_tokenizer()
        self._bounds = _bounds([shard.tokens for shard in manifest.shards])
        self._first = _bounds([shard.documents for shard in manifest.shards])
        self.documents = int(self._first[-1])
        self._maps: dict[str, np.ndarray] = {}

    def take(self, place: I64) -> I64:
        """Token ids at these places of the stream, in the shape of `place`."""
        flat = place.reshape(-1)
        ids = np.empty(flat.shape, dtype=np.int64)
        shard = np.searchsorted(self._bounds, flat, side="right") - 1
        cuts = [0, *(np.flatnonzero(np.diff(shard)) + 1).tolist(), len(flat)]
        for start, stop in pairwise(cuts):
            if start < stop:
                number = int(shard[start])
                tokens = self._map(tokens_file(number), self._dtype)
                ids[start:stop] = tokens[flat[start:stop] - self._bounds[number]]
        return ids.reshape(place.shape)

    def rows(self, first: int, last: int) -> Rows:
        """The documents from number `first` up to `last`."""
        tables, number = [], int(np.searchsorted(self._first, first, side="right")) - 1
        starts = []
        while first < last:
            stop = min(last, int(self._first[number + 1]))
            table = self._map(documents_file(number), DOCUMENT)
            table = table[first - self._first[number] : stop - self._first[number]]
            tables.append(table)
            starts.append(table["start"].astype(np.int64) + self._bounds[number])
            first, number = stop, number + 1
        end = self._start_of(last)
        table = np.concatenate([np.empty(0, DOCUMENT), *tables])
        return Rows(
            np.append(np.concatenate([np.empty(0, np.int64), *starts]), end),
            table["bytes"].astype(np.int64),
            table["hash"].astype(np.uint64),
        )

    def index(self, val_fraction: float, window: int) -> DocumentIndex:
        """Its documents split in two; built once, beside the tokens or in the cache."""
        recipe = json.dumps([FORMAT, self.digest, val_fraction, window])
        name = f"index-{hashlib.sha256(recipe.encode()).hexdigest()[:16]}"
        home = next((home for home in self._homes if (home / name).is_dir()), self._homes[0])
        whole = self._check != "lazy"
        return index_on_disk(home / name, self, val_fraction, window, check=whole)

    def _start_of(self, document: int) -> int:
        """The place of a document's END in the stream; behind the last document, the stream's length."""
        if document == self.documents:
            return int(self._bounds[-1])
        number = int(np.searchsorted(self._first, document, side="right")) - 1
        table = self._map(documents_file(number), DOCUMENT)
        return int(table["start"][document - self._first[number]]) + int(self._bounds[number])

    def _map(self, name: str, dtype: np.dtype[Any]) -> np.ndarray:
        """A file's content; the first call checks that it is as it was verified."""
        if name not in self._maps:
            path = self._folder / name
            try:
                with path.open("rb") as file:
                    self._check_unchanged(name, FileState.of(os.fstat(file.fileno())))
                    size = self.manifest.files[name].bytes
                    found = np.memmap(file, dtype, mode="r").view(np.ndarray) if size else np.empty(0, dtype)
            except OSError as error:
                raise UserError(f"{path}: cannot be read ({error.strerror}); {self._remedy}") from error
            self._maps[name] = found
        return self._maps[name]

    def _read_manifest(self) -> Manifest:
        path = self._folder / MANIFEST
        try:
            raw = path.read_bytes()
        except OSError as error:
            raise UserError(f"{path}: cannot be read ({error.strerror}); {self._remedy}") from error
        try:
            fields = json.loads(raw)
            if fields.get("version") == VERSION:
                fields.pop("sha256", None)
                manifest = Manifest.model_validate(fields)
                whole = raw == manifest.render()
            else:
                found = fields.get("version")
                raise UserError(f"{path}: has version {found!r}, and {VERSION} is read; {self._remedy}")
        except (ValueError, AttributeError, RecursionError, ValidationError):
            whole = False
        if not whole:
            raise UserError(f"{path}: does not match its own SHA-256, so it was altered; {self._remedy}")
        return manifest

    def _check_list(self) -> None:
        files, shards = self.manifest.files, self.manifest.expected()
        for name in [*shards, *TOKENIZER_FILES]:
            if name not in files or files[name].bytes != shards.get(name, files[name].bytes):
                raise UserError(
                    f"{self._folder / MANIFEST}: does not list {name} as it should; {self._remedy}"
                )

    def _open_tokenizer(self) -> Tokenizer:
        for name in TOKENIZER_FILES:
            self._check_unchanged(name, state_of(self._folder / name))
        return Tokenizer.open(self._folder / TOKENIZER_FILES[0], end_id=self.manifest.end_id)

    def _check_unchanged(self, name: str, state: FileState | None) -> None:
        if state != self._verified[name].state:
            raise UserError(
                f"{self._folder / name}: was changed after it was verified; start again, or {self._remedy}"
            )


def _bounds(counts: list[int]) -> I64:
    """Places of the shards' beginnings, and the end of the last."""
    return np.cumsum([0, *counts], dtype=np.int64)
