"""A folder of token shards, opened for reading."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from contextlib import suppress
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshwright.data.block_reader import BlockReader
from meshwright.data.document_index import FORMAT, DocumentIndex, Documents, index_on_disk
from meshwright.data.manifest import (
    DOCUMENT,
    MANIFEST,
    VERSION,
    TokenManifest,
    documents_file,
    tokens_file,
    trained_file,
)
from meshwright.data.permutation import I64
from meshwright.data.publish import readable
from meshwright.data.tokenizer import TOKENIZER_FILES, Tokenizer
from meshwright.data.verification import Check, Verification
from meshwright.data.verified import cache_folder, record_folders
from meshwright.spec.errors import UserError


class TokenShards:
    """A folder of shards opened for reading: a `TokenSource`.

    A folder without a record of its blocks' hashes, as a copy may be, is verified in whole: the SHA-256 of
    every file, that every token id lies within the vocabulary, and that the documents fill the token files.
    Of many processes that open at once, one does it and the others wait. With a record, which `tokenize`
    writes too, that is left out, and blocks are compared when they are first read. Documents and tokens stay
    on disk. Raises `UserError` that names the file, `DataError` for files that are not as recorded; `remedy`
    ends that sentence.
    """

    def __init__(
        self,
        folder: Path,
        remedy: str = "tokenize the corpus again",
        *,
        cache: Path | None = None,
        check: Check = "files",
    ) -> None:
        self.folder = folder
        self._remedy = remedy
        self._check = check
        self._homes = record_folders(folder, cache or cache_folder(None))
        self.manifest = manifest = read_manifest(folder, remedy)
        self.digest: str = manifest.digest
        self._check_list()
        record = Verification(folder, manifest, self._homes, remedy).run(check)
        self._reader = BlockReader(folder, manifest, record, remedy)
        for name in TOKENIZER_FILES:
            self._reader.read(name, [(0, manifest.files[name].bytes)])
        self.tokenizer = tokenizer_of(folder, manifest)
        self._bounds: I64 = np.cumsum([0, *(shard.tokens for shard in manifest.shards)], dtype=np.int64)
        self._first: I64 = np.cumsum([0, *(shard.documents for shard in manifest.shards)], dtype=np.int64)
        self.documents, self.tokens = int(self._first[-1]), int(self._bounds[-1])

    @property
    def home(self) -> Path:
        """The folder for what is derived from the tokens."""
        return self._homes[0]

    @property
    def marked(self) -> bool:
        """True for chats, of which the tokens that `trained` marks are trained on."""
        return self.manifest.targets is not None

    @property
    def pairs(self) -> bool:
        """True for marked documents that are a chosen and a rejected answer in turn."""
        return self.manifest.targets == "pairs"

    def take(self, place: I64) -> I64:
        """Return the token ids at these places of the stream, in the shape of `place`."""
        return self._take(place, self.manifest.token_dtype, tokens_file)

    @property
    def judged(self) -> bool:
        """True for marked documents that are completions with a label, which their marks tell."""
        return self.manifest.targets == "judged"

    def trained(self, place: I64) -> NDArray[np.bool_]:
        """Return True for the tokens at these places that are trained on; of marked documents only."""
        return self.marks(place).astype(np.bool_)

    def marks(self, place: I64) -> I64:
        """Return the marks of the tokens at these places: 0, `WANTED` or `UNWANTED`; of marked documents
        only."""
        return self._take(place, np.dtype(np.uint8), trained_file)

    def _take(self, place: I64, kind: np.dtype[Any], file: Callable[[int], str]) -> I64:
        """Return the numbers of this kind at these places, which the shards have in files of that name."""
        flat = place.reshape(-1)
        ids = np.empty(flat.shape, dtype=np.int64)
        shard = np.searchsorted(self._bounds, flat, side="right") - 1
        breaks = np.flatnonzero((np.diff(flat) != 1) | (np.diff(shard) != 0)) + 1
        runs = [(a, b) for a, b in pairwise([0, *breaks.tolist(), len(flat)]) if a < b]
        for number, here in groupby(runs, key=lambda run: int(shard[run[0]])):
            of_shard = list(here)
            firsts = [kind.itemsize * int(flat[a] - self._bounds[number]) for a, _ in of_shard]
            spans = [
                (first, first + kind.itemsize * (b - a))
                for first, (a, b) in zip(firsts, of_shard, strict=True)
            ]
            data = b"".join(self._reader.read(file(number), spans))
            ids[of_shard[0][0] : of_shard[-1][1]] = np.frombuffer(data, kind)
        return ids.reshape(place.shape)

    def rows(self, first: int, last: int) -> Documents:
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
        return Documents(
            np.concatenate([*starts, end]),
            table["bytes"].astype(np.int64),
            table["hash"].astype(np.uint64),
        )

    def _records(self, number: int, first: int, last: int) -> np.ndarray:
        """Return records of one shard."""
        span = DOCUMENT.itemsize * int(first), DOCUMENT.itemsize * int(last)
        return np.frombuffer(self._reader.read(documents_file(number), [span])[0], DOCUMENT)

    def index(self, val_fraction: float, window: int) -> DocumentIndex:
        """Return its documents split in two; built once, in the folder of tokens or in the cache."""
        recipe = json.dumps([FORMAT, self.digest, val_fraction, window])
        name = f"index-{hashlib.sha256(recipe.encode()).hexdigest()[:16]}"
        home = next((home for home in self._homes if (home / name).is_dir()), self._homes[0])
        return index_on_disk(home / name, self, val_fraction, window, check=self._check != "lazy")

    def _check_list(self) -> None:
        """Raise `UserError` unless the manifest lists the files of its shards, with their sizes."""
        files, shards = self.manifest.files, self.manifest.expected()
        for name in [*shards, *TOKENIZER_FILES]:
            if name not in files or files[name].bytes != shards.get(name, files[name].bytes):
                raise UserError(
                    f"{self.folder / MANIFEST}: does not list {name} as it should; {self._remedy}"
                )


def tokenizer_of(folder: Path, manifest: TokenManifest) -> Tokenizer:
    """Return the tokenizer of a folder of tokens. Raises `UserError`."""
    reads_special = manifest.special_tokens == "read"
    return Tokenizer.open(folder / TOKENIZER_FILES[0], manifest.text_tokens, reads_special)


def read_manifest(folder: Path, remedy: str) -> TokenManifest:
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
        manifest = TokenManifest.model_validate(fields)
    if manifest is None or manifest.render() != content:
        raise UserError(f"{path}: does not match its own SHA-256, so it was altered; {remedy}")
    return manifest
