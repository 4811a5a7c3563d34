"""Writes documents into a folder of token shards."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from meshwright.data.manifest import (
    DOCUMENT,
    MANIFEST,
    VERSION,
    FileEntry,
    ShardEntry,
    Targets,
    TokenManifest,
    documents_file,
    tokens_file,
    trained_file,
)
from meshwright.data.tokenizer import TOKENIZER_FILES, IDs, Tokenizer
from meshwright.data.verified import BESIDE, BlockHashes, write_record

TOKENS_PER_SHARD = 2**28

Marks = NDArray[np.bool_] | NDArray[np.uint8]
_WRITE_BUFFER = 2**22  # tokens


class ShardWriter:
    """Writes documents into a folder of shards, in bounded memory; `finish` writes the manifest.

    Those with `targets` are chats, with a mark for each token, as in `TokenManifest`. The caller makes the
    folder appear in one step (`publish.publishing`).
    """

    def __init__(
        self,
        folder: Path,
        tokenizer: Tokenizer,
        tokens_per_shard: int = TOKENS_PER_SHARD,
        *,
        targets: Targets | None = None,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder, self._targets = folder, targets
        self._tokenizer = tokenizer
        self._tokens_per_shard = tokens_per_shard
        self._dtype = np.dtype(f"<u{tokenizer.id_bytes}")
        self._end = np.full(1, tokenizer.end_id, dtype=self._dtype)
        self._shards: list[ShardEntry] = []
        self._files: dict[str, FileEntry] = {}
        self._hashes: dict[str, bytes] = {}
        self._utf8_bytes = 0
        self._open_shard()

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._open_files():
            file.close()

    def add(self, ids: IDs, utf8_bytes: int, content_hash: int) -> None:
        """Append one document of n >= 0 token ids, without its END.

        What stands around each document is not written again where special tokens are read and its text
        spells it, as a chat that was rendered by a template may.
        """
        if self._tokenizer.reads_special:
            ids = ids[1:] if len(ids) and ids[0] == self._tokenizer.begin_id else ids
            ids = ids[:-1] if len(ids) and ids[-1] == self._tokenizer.end_id else ids
        self._append(np.concatenate([self._end, ids]), utf8_bytes, content_hash)

    def add_marked(self, ids: IDs, trained: Marks, utf8_bytes: int, content_hash: int) -> None:
        """Append one chat of n > 0 token ids, with the marks of those that are trained on.

        `utf8_bytes` are those that the trained ones spell.
        """
        if ids.shape != trained.shape:
            raise ValueError(f"{len(ids)} tokens have {len(trained)} marks")
        self._append(ids, utf8_bytes, content_hash, trained)

    def _append(self, ids: IDs, utf8_bytes: int, content_hash: int, trained: Marks | None = None) -> None:
        """Append the tokens of one document, and their marks."""
        if self._length and self._length + len(ids) > self._tokens_per_shard:
            self._close_shard()
            self._open_shard()
        if len(ids) and int(ids.max()) >= self._tokenizer.vocab_size:
            raise ValueError(f"token id {ids.max()} is beyond the vocabulary of {self._tokenizer.vocab_size}")
        self._records.append((self._length, utf8_bytes, content_hash))
        self._pending.append(ids.astype(self._dtype, copy=False))
        if trained is not None:
            self._marks.append(trained)
        self._length += len(ids)
        self._pending_length += len(ids)
        self._utf8_bytes += utf8_bytes
        if self._pending_length >= _WRITE_BUFFER:
            self._flush()

    def finish(self) -> TokenManifest:
        """Write the rest, the tokenizer, the manifest, and the record of the blocks' hashes.

        The files need not be hashed again, as their content was hashed when it was written.
        """
        self._close_shard()
        self._tokenizer.save(self._folder)
        for name in TOKENIZER_FILES:
            hashes = BlockHashes()
            hashes.update((self._folder / name).read_bytes())
            self._note(name, hashes)
        manifest = TokenManifest(
            version=VERSION,
            dtype="uint16" if self._dtype.itemsize == 2 else "uint32",
            vocab_size=self._tokenizer.vocab_size,
            end_id=self._tokenizer.end_id,
            begin_id=None if self._tokenizer.begin_id == self._tokenizer.end_id else self._tokenizer.begin_id,
            special_tokens="read" if self._tokenizer.reads_special else None,
            targets=self._targets,
            tokenizer=self._tokenizer.digest,
            utf8_bytes=self._utf8_bytes,
            shards=tuple(self._shards),
            files=self._files,
        )
        (self._folder / MANIFEST).write_bytes(manifest.render())
        write_record(self._folder / BESIDE, manifest, self._hashes)
        return manifest

    def _open_shard(self) -> None:
        number = len(self._shards)
        self._tokens = _HashedFile(self._folder / tokens_file(number))
        self._table = _HashedFile(self._folder / documents_file(number))
        self._trained = (
            _HashedFile(self._folder / trained_file(number)) if self._targets is not None else None
        )
        self._length = self._pending_length = 0
        self._pending: list[np.ndarray] = []
        self._marks: list[Marks] = []
        self._records: list[tuple[int, int, int]] = []

    def _flush(self) -> None:
        self._tokens.write(np.concatenate([np.empty(0, self._dtype), *self._pending]).tobytes())
        self._table.write(np.array(self._records, dtype=DOCUMENT).tobytes())
        if self._trained is not None:
            self._trained.write(b"".join(marks.astype(np.uint8).tobytes() for marks in self._marks))
        self._pending, self._pending_length, self._marks, self._records = [], 0, [], []

    def _close_shard(self) -> None:
        self._flush()
        for file in self._open_files():
            file.close()
            self._note(file.name, file.hashes)
        documents = self._files[self._table.name].bytes // DOCUMENT.itemsize
        self._shards.append(ShardEntry(tokens=self._length, documents=documents))

    def _open_files(self) -> list[_HashedFile]:
        """Return the files of the shard that is written."""
        return [self._tokens, self._table, *([self._trained] if self._trained is not None else [])]

    def _note(self, name: str, hashes: BlockHashes) -> None:
        self._files[name] = FileEntry(bytes=hashes.size, sha256=hashes.hexdigest())
        self._hashes[name] = hashes.blocks()


class _HashedFile:
    """A file that is hashed as it is written."""

    def __init__(self, path: Path) -> None:
        self.name = path.name
        self.hashes = BlockHashes()
        self._file = path.open("wb")

    def write(self, data: bytes) -> None:
        self._file.write(data)
        self.hashes.update(data)

    def close(self) -> None:
        self._file.close()
