"""The format of a folder of token shards: memory-mapped token files, every file of it under a SHA-256.

    meshwright-tokens.json     the manifest: sizes and hashes of the files below, counts, and its own hash
    tokenizer.json, tokenizer_config.json
    00000.tokens.bin           little-endian uint16 or uint32; each document is [END, t1..tn], whatever
                               token is read in front of it (`begin_id`)
    00000.documents.bin        one record per document, see `DOCUMENT`
    00000.trained.bin          of chats and pairs of answers alone: a byte per token, 1 for those
                               trained on, 2 for those of unwanted completions
    .meshwright/               derived files: the record of a verification, indices (may be deleted)

A document lies in one shard. UTF-8 bytes are kept per document, so bits per byte are exact for any tokenizer.
Documents of chats are [t1..tn] as they were rendered, with nothing in front; their bytes are those that the
trained tokens spell. Of pairs document 2k is the chosen answer of pair k behind its prompt, and 2k + 1 the
rejected one.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import Field

from meshwright.spec.base import FrozenModel
from meshwright.spec.files import user_path
from meshwright.spec.hf.text_tokens import TextTokens
from meshwright.storage.remote import is_url, without_scheme

MANIFEST = "meshwright-tokens.json"
TOKENS_FILE = re.compile(r"\d{5,}\.tokens\.bin")
VERSION = 2
DOCUMENT = np.dtype([("start", "<u8"), ("bytes", "<u8"), ("hash", "<u8")])
"""Place of the document's END within its shard, UTF-8 bytes of its text, 64-bit hash of its text."""


Targets = Literal["marked", "pairs", "judged"]
WANTED, UNWANTED = 1, 2
"""Marks of the trained tokens of completions that are wanted, and of those that are not."""


class FileEntry(FrozenModel):
    """Expected size and hash of a file."""

    bytes: int = Field(ge=0)
    sha256: str


class ShardEntry(FrozenModel):
    """Content of a pair of files `NNNNN.tokens.bin` and `NNNNN.documents.bin`."""

    tokens: int = Field(ge=0)
    documents: int = Field(ge=0)


class TokenManifest(FrozenModel):
    """The manifest's content, without its own hash."""

    version: int
    dtype: Literal["uint16", "uint32"]
    vocab_size: int = Field(ge=1)
    end_id: int = Field(ge=0)
    begin_id: int | None = Field(None, ge=0)
    """The token that is read in front of a document in END's place; None for END itself."""
    special_tokens: Literal["read"] | None = None
    """"read" where special tokens that texts spell were read as those tokens."""
    targets: Targets | None = None
    """"marked" where not every token is trained on, but those that the trained files mark; "pairs" where
    these are of chosen and rejected answers in turn, "judged" where the marks are `WANTED` or `UNWANTED`."""
    tokenizer: str
    utf8_bytes: int
    shards: tuple[ShardEntry, ...]
    files: dict[str, FileEntry]

    @property
    def token_dtype(self) -> np.dtype[Any]:
        """Dtype of the token files: `dtype`, little-endian."""
        return np.dtype(self.dtype).newbyteorder("<")

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
        """SHA-256 of the manifest, which covers every file through its hashes."""
        return _sha256(self._fields())

    def render(self) -> bytes:
        """Return the bytes of the manifest's file, the only ones that are accepted as it."""
        return _canonical({**self._fields(), "sha256": self.digest})

    def _fields(self) -> dict[str, Any]:
        """Return the fields that say something; earlier versions wrote no others."""
        return self.model_dump(exclude_none=True)

    @property
    def text_tokens(self) -> TextTokens:
        """The tokens around the documents."""
        begin = self.end_id if self.begin_id is None else self.begin_id
        return TextTokens(self.end_id, before=(begin,), bos=begin)

    def expected(self) -> dict[str, int]:
        """Return the bytes of each file that the shards must have, by name."""
        sizes: dict[str, int] = {}
        for number, shard in enumerate(self.shards):
            sizes[tokens_file(number)] = shard.tokens * self.token_dtype.itemsize
            sizes[documents_file(number)] = shard.documents * DOCUMENT.itemsize
            if self.targets is not None:
                sizes[trained_file(number)] = shard.tokens
        return sizes


def is_shards(path: Path) -> bool:
    """Return True if `path` is a folder of shards."""
    return (path / MANIFEST).is_file()


def shards_of(corpus: str) -> Path | None:
    """Return the folder of shards that `data.corpus` names; None where it names text, or a URL.

    Raises `UserError` as `user_path` does.
    """
    if is_url(corpus) or not corpus:
        return None
    path = user_path(without_scheme(corpus), "data.corpus")
    return path if is_shards(path) else None


def digest_of(sources: Sequence[str], **settings: Any) -> str:
    """Return the SHA-256 of sources' digests and of the settings that turn their tokens into samples."""
    return _sha256({"sources": list(sources), **settings})


def tokens_file(number: int) -> str:
    """Return the name of the file with the tokens of shard `number`."""
    return f"{number:05d}.tokens.bin"


def documents_file(number: int) -> str:
    """Return the name of the file with the documents of shard `number`."""
    return f"{number:05d}.documents.bin"


def trained_file(number: int) -> str:
    """Return the name of the file with the marks of the tokens of shard `number` that are trained on."""
    return f"{number:05d}.trained.bin"


def _canonical(value: dict[str, Any]) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode() + b"\n"


def _sha256(body: dict[str, Any]) -> str:
    return hashlib.sha256(_canonical(body)).hexdigest()
