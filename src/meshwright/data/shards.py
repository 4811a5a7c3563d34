"""Token shards: a folder of memory-mapped token files, every file of it under a SHA-256.

    meshwright-tokens.json     the manifest: sizes and hashes of the files below, counts, and its own hash
    tokenizer.json, tokenizer_config.json
    00000.tokens.bin           little-endian uint16 or uint32; each document is [END, t1..tn]
    00000.documents.bin        one record per document, see `DOCUMENT`

A document lies in one shard. UTF-8 bytes are kept per document, so bits per byte are exact for any tokenizer.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
from pydantic import Field, ValidationError

from meshwright.data.files import sha256_file
from meshwright.data.order import I64, U64
from meshwright.data.tokenizer import TOKENIZER_FILES, IDs, Tokenizer
from meshwright.spec.base import Part
from meshwright.spec.errors import UserError

MANIFEST = "meshwright-tokens.json"
TOKENS_FILE = re.compile(r"\d{5,}\.tokens\.bin")
VERSION = 2
TOKENS_PER_SHARD = 2**28
DOCUMENT = np.dtype([("start", "<u8"), ("bytes", "<u8"), ("hash", "<u8")])
"""Place of the document's END within its shard, UTF-8 bytes of its text, 64-bit hash of its text."""

_WRITE_BUFFER = 2**22  # tokens


class TokenSource(Protocol):
    """A stream of documents [END, t1..tn], one after the other, that can be read at any place."""

    starts: I64
    """(documents + 1,) places of the documents' ENDs in the stream, and the stream's length."""
    bytes: I64
    """(documents,) UTF-8 bytes of each document's text."""
    hashes: U64
    """(documents,) hash of each document's content, the same under every tokenizer."""
    digest: str
    """SHA-256 of everything in the source."""

    def take(self, place: I64) -> I64:
        """Token ids at these places of the stream, in the shape of `place`."""
        ...


class FileEntry(Part):
    """What a file must be."""

    bytes: int = Field(ge=0)
    sha256: str


class ShardEntry(Part):
    """What a pair of files `NNNNN.tokens.bin` and `NNNNN.documents.bin` holds."""

    tokens: int = Field(ge=0)
    documents: int = Field(ge=0)


class Manifest(Part):
    """The manifest's content, but for its own hash."""

    version: int
    dtype: Literal["uint16", "uint32"]
    vocab_size: int = Field(ge=1)
    end_id: int = Field(ge=0)
    tokenizer: str
    utf8_bytes: int
    shards: tuple[ShardEntry, ...]
    files: dict[str, FileEntry]

    @property
    def documents(self) -> int:
        """Documents in all shards."""
        return sum(shard.documents for shard in self.shards)

    @property
    def tokens(self) -> int:
        """Tokens in all shards, ENDs included."""
        return sum(shard.tokens for shard in self.shards)

    @property
    def digest(self) -> str:
        """SHA-256 of the manifest, and through its entries of every file."""
        return _sha256(self.model_dump())

    def render(self) -> bytes:
        """The file's bytes; no other bytes are read back."""
        return _canonical({**self.model_dump(), "sha256": self.digest})

    def expected(self) -> dict[str, int]:
        """Bytes of the files that the shards must have."""
        token = np.dtype(self.dtype).itemsize
        sizes = {_tokens_file(i): shard.tokens * token for i, shard in enumerate(self.shards)}
        return sizes | {
            _documents_file(i): shard.documents * DOCUMENT.itemsize for i, shard in enumerate(self.shards)
        }


class ShardWriter:
    """Write documents into a folder of shards, in bounded memory; `finish` writes the manifest.

    The caller makes the folder appear at once (`files.publishing`).
    """

    def __init__(self, folder: Path, tokenizer: Tokenizer, tokens_per_shard: int = TOKENS_PER_SHARD) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._tokenizer = tokenizer
        self._tokens_per_shard = tokens_per_shard
        self._dtype = np.dtype("<u2" if tokenizer.vocab_size <= 2**16 else "<u4")
        self._end = np.full(1, tokenizer.end_id, dtype=self._dtype)
        self._shards: list[ShardEntry] = []
        self._files: dict[str, FileEntry] = {}
        self._utf8_bytes = 0
        self._open_shard()

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def add(self, ids: IDs, utf8_bytes: int, content_hash: int) -> None:
        """Append one document of n >= 0 token ids, without its END."""
        if self._length and self._length + len(ids) + 1 > self._tokens_per_shard:
            self._close_shard()
            self._open_shard()
        if len(ids) and int(ids.max()) >= self._tokenizer.vocab_size:
            raise ValueError(f"token id {ids.max()} is beyond the vocabulary of {self._tokenizer.vocab_size}")
        self._records.append((self._length, utf8_bytes, content_hash))
        self._pending += [self._end, ids.astype(self._dtype)]
        self._length += len(ids) + 1
        self._pending_length += len(ids) + 1
        self._utf8_bytes += utf8_bytes
        if self._pending_length >= _WRITE_BUFFER:
            self._flush()

    def finish(self) -> Manifest:
        """Write what is left, the tokenizer and the manifest."""
        self._close_shard()
        self._tokenizer.save(self._folder)
        for name in TOKENIZER_FILES:
            path = self._folder / name
            self._files[name] = FileEntry(bytes=path.stat().st_size, sha256=sha256_file(path))
        manifest = Manifest(
            version=VERSION,
            dtype="uint16" if self._dtype.itemsize == 2 else "uint32",
            vocab_size=self._tokenizer.vocab_size,
            end_id=self._tokenizer.end_id,
            tokenizer=self._tokenizer.digest,
            utf8_bytes=self._utf8_bytes,
            shards=tuple(self._shards),
            files=self._files,
        )
        (self._folder / MANIFEST).write_bytes(manifest.render())
        return manifest

    def _open_shard(self) -> None:
        self._file = (self._folder / _tokens_file(len(self._shards))).open("wb")
        self._hash = hashlib.sha256()
        self._length = self._pending_length = 0
        self._pending: list[np.ndarray] = []
        self._records: list[tuple[int, int, int]] = []

    def _flush(self) -> None:
        data = np.concatenate([np.empty(0, self._dtype), *self._pending]).tobytes()
        self._file.write(data)
        self._hash.update(data)
        self._pending, self._pending_length = [], 0

    def _close_shard(self) -> None:
        self._flush()
        self._file.close()
        number = len(self._shards)
        size = self._length * self._dtype.itemsize
        self._files[_tokens_file(number)] = FileEntry(bytes=size, sha256=self._hash.hexdigest())
        records = np.array(self._records, dtype=DOCUMENT).tobytes()
        (self._folder / _documents_file(number)).write_bytes(records)
        digest = hashlib.sha256(records).hexdigest()
        self._files[_documents_file(number)] = FileEntry(bytes=len(records), sha256=digest)
        self._shards.append(ShardEntry(tokens=self._length, documents=len(self._records)))


class TokenShards:
    """A folder of shards opened for reading: a `TokenSource`.

    Opening checks the size and the SHA-256 of every file and that every token id lies within the vocabulary.
    Raises `UserError` that names the file; `remedy` ends that sentence.
    """

    def __init__(self, folder: Path, remedy: str = "tokenize the corpus again") -> None:
        self._folder = folder
        self._remedy = remedy
        manifest = self._read_manifest()
        self._dtype = np.dtype("<u2" if manifest.dtype == "uint16" else "<u4")
        self.vocab_size = manifest.vocab_size
        self.digest: str = manifest.digest
        self._check_files(manifest)
        self.tokenizer = Tokenizer.open(folder / TOKENIZER_FILES[0], end_id=manifest.end_id)
        lengths = [shard.tokens for shard in manifest.shards]
        self._bounds: I64 = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        self._maps = [self._map(_tokens_file(i), self._dtype) for i in range(len(lengths))]
        self._read_documents(len(lengths))

    def take(self, place: I64) -> I64:
        """Token ids at these places of the stream, in the shape of `place`."""
        if len(self._maps) == 1:
            return self._maps[0][place].astype(np.int64)
        shard = np.searchsorted(self._bounds, place, side="right") - 1
        ids = np.empty(place.shape, dtype=np.int64)
        for number in np.unique(shard).tolist():
            here = shard == number
            ids[here] = self._maps[number][place[here] - self._bounds[number]]
        return ids

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

    def _check_files(self, manifest: Manifest) -> None:
        files, shards = manifest.files, manifest.expected()
        for name in [*shards, *TOKENIZER_FILES]:
            if name not in files or files[name].bytes != shards.get(name, files[name].bytes):
                raise UserError(
                    f"{self._folder / MANIFEST}: does not list {name} as it should; {self._remedy}"
                )
        for name, entry in files.items():
            path = self._folder / name
            if Path(name).name != name or path.is_symlink() or not path.is_file():
                raise UserError(f"{path}: the manifest lists it, but it is not a file there; {self._remedy}")
            size = path.stat().st_size
            if size != entry.bytes:
                raise UserError(f"{path}: has {size} bytes, its manifest says {entry.bytes}; {self._remedy}")
        with ThreadPoolExecutor() as pool:  # hashing releases the interpreter's lock: one file per core
            for name, found in zip(files, pool.map(self._hash_file, files), strict=True):
                if found != files[name].sha256:
                    raise UserError(
                        f"{self._folder / name}: has the SHA-256 {found[:12]}…, its manifest says "
                        f"{files[name].sha256[:12]}…, so the file was altered; {self._remedy}"
                    )

    def _hash_file(self, name: str) -> str:
        """SHA-256 of a file; of a token file, every id is looked at on the way."""
        path = self._folder / name
        highest = -1

        def look(chunk: bytes) -> None:
            nonlocal highest
            highest = max(highest, int(np.frombuffer(chunk, self._dtype).max()))

        try:
            found = sha256_file(path, look if name.endswith(".tokens.bin") else None)
        except OSError as error:
            raise UserError(f"{path}: cannot be read ({error.strerror}); {self._remedy}") from error
        if highest >= self.vocab_size:
            raise UserError(
                f"{path}: holds the token id {highest}, and its vocabulary has {self.vocab_size} entries; "
                f"{self._remedy}"
            )
        return found

    def _map(self, name: str, dtype: np.dtype[Any]) -> np.ndarray:
        path = self._folder / name
        if not path.stat().st_size:
            return np.empty(0, dtype)
        return np.memmap(path, dtype, mode="r").view(np.ndarray)

    def _read_documents(self, shards: int) -> None:
        tables = [self._map(_documents_file(number), DOCUMENT) for number in range(shards)]
        starts = [table["start"].astype(np.int64) + self._bounds[i] for i, table in enumerate(tables)]
        self.starts: I64 = np.concatenate([*starts, self._bounds[-1:]])
        self.bytes: I64 = np.concatenate([table["bytes"].astype(np.int64) for table in tables])
        self.hashes: U64 = np.concatenate([table["hash"].astype(np.uint64) for table in tables])
        if self.starts[0] != 0 or (np.diff(self.starts) < 1).any():
            raise UserError(f"{self._folder}: the documents do not fill the token files; {self._remedy}")


def is_shards(path: Path) -> bool:
    """Whether `path` is a folder of shards."""
    return (path / MANIFEST).is_file()


def digest_of(sources: Sequence[str], **settings: Any) -> str:
    """SHA-256 of several sources' digests and of the settings that turn their tokens into samples."""
    return _sha256({"sources": list(sources), **settings})


def _tokens_file(number: int) -> str:
    return f"{number:05d}.tokens.bin"


def _documents_file(number: int) -> str:
    return f"{number:05d}.documents.bin"


def _canonical(value: dict[str, Any]) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode() + b"\n"


def _sha256(body: dict[str, Any]) -> str:
    return hashlib.sha256(_canonical(body)).hexdigest()
