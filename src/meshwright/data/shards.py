"""A folder of token shards, opened for reading."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from meshwright.data.document_index import FORMAT, DocumentIndex, Rows, index_on_disk
from meshwright.data.manifest import DOCUMENT, MANIFEST, VERSION, Manifest, documents_file, tokens_file
from meshwright.data.permutation import I64
from meshwright.data.publish import readable
from meshwright.data.tokenizer import TOKENIZER_FILES, Tokenizer
from meshwright.data.verification import Check, Verification
from meshwright.data.verified import FileState, cache_folder, record_folders, state_of
from meshwright.spec.errors import UserError

_MAPPED = 2**14  # documents


class TokenShards:
    """A folder of shards opened for reading: a `TokenSource`.

    The first opening checks the SHA-256 of every file, that every token id lies within the vocabulary, and
    that the documents fill the token files; it leaves a record of that. Later ones compare files with the
    record as `check` says. Of many processes that open at once, one hashes and the others wait for it.
    Documents and tokens stay on disk, memory-mapped when they are first read. Raises `UserError` that names
    the file; `remedy` ends that sentence.
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
        self.manifest = manifest = read_manifest(folder, remedy)
        self.digest: str = manifest.digest
        self._check_list()
        self._verified = Verification(folder, manifest, self._homes, remedy).run(check)
        for name in TOKENIZER_FILES:
            self._check_unchanged(name, state_of(folder / name))
        self.tokenizer = Tokenizer.open(folder / TOKENIZER_FILES[0], end_id=manifest.end_id)
        self._bounds: I64 = np.cumsum([0, *(shard.tokens for shard in manifest.shards)], dtype=np.int64)
        self._first: I64 = np.cumsum([0, *(shard.documents for shard in manifest.shards)], dtype=np.int64)
        self.documents = int(self._first[-1])
        self._maps: dict[str, np.ndarray] = {}

    def take(self, place: I64) -> I64:
        """Return the token ids at these places of the stream, in the shape of `place`."""
        flat = place.reshape(-1)
        ids = np.empty(flat.shape, dtype=np.int64)
        shard = np.searchsorted(self._bounds, flat, side="right") - 1
        cuts = [0, *(np.flatnonzero(np.diff(shard)) + 1).tolist(), len(flat)]
        for start, stop in pairwise(cuts):
            if start < stop:
                number = int(shard[start])
                tokens = self._map(tokens_file(number), self.manifest.token_dtype)
                ids[start:stop] = tokens[flat[start:stop] - self._bounds[number]]
        return ids.reshape(place.shape)

    def rows(self, first: int, last: int) -> Rows:
        """Return the documents from number `first` up to `last`."""
        number = int(np.searchsorted(self._first, first, side="right")) - 1
        tables, starts = [np.empty(0, DOCUMENT)], []
        end = self._bounds[-1:]
        while first < last:
            begin, size = self._first[number], int(self._first[number + 1] - self._first[number])
            stop = min(last - begin, size)
            table = self._records(number, first - begin, min(stop + 1, size))
            places = table["start"].astype(np.int64) + self._bounds[number]
            count = stop - (first - begin)
            tables.append(table[:count])
            starts.append(places[:count])
            # A shard's first document begins where the shard does, so the next shard need not be read.
            end = places[count:] if len(places) > count else self._bounds[number + 1 : number + 2]
            first, number = int(begin + stop), number + 1
        table = np.concatenate(tables)
        return Rows(
            np.concatenate([*starts, end]),
            table["bytes"].astype(np.int64),
            table["hash"].astype(np.uint64),
        )

    def _records(self, number: int, first: int, last: int) -> np.ndarray:
        """Return records of one shard: few from the map, many by reading, so that no table stays resident."""
        if last - first <= _MAPPED:
            return self._map(documents_file(number), DOCUMENT)[first:last]
        with self._open(documents_file(number)) as file:
            return np.fromfile(file, DOCUMENT, last - first, offset=first * DOCUMENT.itemsize)

    def index(self, val_fraction: float, window: int) -> DocumentIndex:
        """Return its documents split in two; built once, in the folder of tokens or in the cache."""
        recipe = json.dumps([FORMAT, self.digest, val_fraction, window])
        name = f"index-{hashlib.sha256(recipe.encode()).hexdigest()[:16]}"
        home = next((home for home in self._homes if (home / name).is_dir()), self._homes[0])
        return index_on_disk(home / name, self, val_fraction, window, check=self._check != "lazy")

    def _map(self, name: str, dtype: np.dtype[Any]) -> np.ndarray:
        """Return a file's content, mapped once."""
        if name not in self._maps:
            with self._open(name) as file:
                empty = not self.manifest.files[name].bytes
                self._maps[name] = (
                    np.empty(0, dtype) if empty else np.memmap(file, dtype, mode="r").view(np.ndarray)
                )
        return self._maps[name]

    @contextmanager
    def _open(self, name: str) -> Iterator[BinaryIO]:
        """Yield a file opened for reading, which is in the state in which it was verified."""
        path = self._folder / name
        with readable(f"{path}:", self._remedy), path.open("rb") as file:
            self._check_unchanged(name, FileState.of(os.fstat(file.fileno())))
            yield file

    def _check_list(self) -> None:
        """Raise `UserError` unless the manifest lists the files of its shards, with their sizes."""
        files, shards = self.manifest.files, self.manifest.expected()
        for name in [*shards, *TOKENIZER_FILES]:
            if name not in files or files[name].bytes != shards.get(name, files[name].bytes):
                raise UserError(
                    f"{self._folder / MANIFEST}: does not list {name} as it should; {self._remedy}"
                )

    def _check_unchanged(self, name: str, state: FileState | None) -> None:
        if state != self._verified[name]:
            raise UserError(
                f"{self._folder / name}: was changed after it was verified; start again, or {self._remedy}"
            )


def read_manifest(folder: Path, remedy: str) -> Manifest:
    """Return the manifest of a folder of tokens. Raises `UserError` for one that was altered."""
    path = folder / MANIFEST
    with readable(f"{path}:", remedy):
        content = path.read_bytes()
    manifest = None
    with suppress(ValueError, AttributeError, RecursionError):
        fields = json.loads(content)
        if fields.get("version") != VERSION:
            raise UserError(f"{path}: has version {fields.get('version')!r}, and {VERSION} is read; {remedy}")
        fields.pop("sha256", None)
        manifest = Manifest.model_validate(fields)
    if manifest is None or manifest.render() != content:
        raise UserError(f"{path}: does not match its own SHA-256, so it was altered; {remedy}")
    return manifest
