"""Data sets that Megatron-LM has tokenized: pairs of a `.idx` and a `.bin` (MMapIndexedDataset, version 1).

    PREFIX.idx   "MMIDIDX\\0\\0", version (u64), code of the ids' type (u8), sequences s (u64), entries d
                 (u64), lengths (s int32), places in bytes (s int64), first sequence of each document (d
                 int64, from 0 to s), and for multimodal data a mode of each sequence (s int8)
    PREFIX.bin   token ids, sequence after sequence

All numbers are little-endian. Both files are streamed.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import IO, NamedTuple

import numpy as np

from meshwright.data.permutation import I64
from meshwright.data.publish import readable
from meshwright.data.readers import Encoded, TextSource, fingerprint_of
from meshwright.data.row_files import LARGEST_DOCUMENT, READABLE, too_large
from meshwright.data.split import content_hash
from meshwright.data.tokenizer import Tokenizer
from meshwright.spec.errors import UserError
from meshwright.storage.stored_file import StoredFile

INDEX, TOKENS = ".idx", ".bin"
_MAGIC = b"MMIDIDX\0\0"
_HEADER = struct.Struct("<9sQBQQ")
_IDS = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
_NOT_IDS = {6: "float64", 7: "float32"}
_AT_ONCE = 2**16
"""Numbers of the index that are read at once."""
_REMEDY = "copy or preprocess it again"

Pair = tuple[StoredFile, StoredFile]
"""The index and the tokens of a data set."""


def is_index(file: StoredFile) -> bool:
    """Return True for a file that begins as an index of Megatron's does. Raises `UserError`."""
    with readable(f"data.corpus: {file}", READABLE):
        return file.head(len(_MAGIC)) == _MAGIC


class MegatronSource(TextSource):
    """Documents that are token ids already; they need the tokenizer that they were made with.

    Their bounds are those of the index. The tokens that stand around every document here are taken from one
    that has them, as `--append-eod` gives it: an END at its end, and a token in front of texts at its start.
    """

    is_text = False

    def __init__(self, name: str, pairs: Sequence[Pair]) -> None:
        super().__init__(name, text_key="")
        self._pairs = pairs

    def fingerprint(self) -> str:
        """Return the SHA-256 of the names and versions of all files."""
        return fingerprint_of([file for pair in self._pairs for file in pair])

    def documents(self) -> Iterator[str]:
        """Raise `UserError`: there is no text."""
        self.check_text()
        yield from ()

    def encoded(
        self, tokenizer: Tokenizer, encode: Callable[[Iterator[str]], Iterator[Encoded]]
    ) -> Iterator[Encoded]:
        """Yield each document's ids, with the length and the hash of the text that they spell."""
        self.skipped.clear()
        for index, tokens in self._pairs:
            with readable(f"data.corpus: {index}", READABLE):
                for number, ids in enumerate(_documents(index, tokens)):
                    inner = _within(ids, tokenizer)
                    if not len(inner):
                        self.skipped["empty"] += 1
                        continue
                    _check_ids(inner, tokenizer, f"document {number} of {tokens}")
                    text = tokenizer.decode_bytes(inner.tolist())
                    yield inner.astype(np.uint32), len(text), int(content_hash(text)[0])


def _within(ids: I64, tokenizer: Tokenizer) -> I64:
    """Return a document's ids without those that stand around every document."""
    if tokenizer.reads_special:
        return ids  # `ShardWriter` leaves them out
    if len(ids) and ids[-1] == tokenizer.end_id:
        ids = ids[:-1]
    if len(ids) and tokenizer.begin_id != tokenizer.end_id and ids[0] == tokenizer.begin_id:
        ids = ids[1:]
    return ids


def _check_ids(ids: I64, tokenizer: Tokenizer, place: str) -> None:
    wrong = ids[(ids < 0) | (ids >= tokenizer.vocab_size)]
    if len(wrong):
        raise UserError(
            f"data.tokenizer: {place} has the token id {wrong[0]}, and the tokenizer has "
            f"{tokenizer.vocab_size} entries; give the tokenizer that the data set was made with"
        )


class _Header(NamedTuple):
    """The first bytes of an index: the type of ids, and the numbers of sequences and of entries."""

    kind: np.dtype[np.signedinteger]
    sequences: int
    entries: int


def _header(index: StoredFile) -> _Header:
    """Return the header of an index. Raises `UserError` unless the file has as many bytes as it says."""
    raw = index.head(_HEADER.size)
    if len(raw) < _HEADER.size or not raw.startswith(_MAGIC):
        raise _wrong(index, f"does not begin with the {_HEADER.size} bytes of an index of Megatron: {raw!r}")
    _, version, code, sequences, entries = _HEADER.unpack(raw)
    if version != 1:
        raise UserError(f"data.corpus: {index} has version {version}, and version 1 is read; {_REMEDY}")
    if code not in _IDS:
        kind = _NOT_IDS.get(code, f"numbers of the unknown code {code}")
        raise UserError(f"data.corpus: {index} says that its data are {kind}, not token ids; give token ids")
    size, wanted = index.size(), _HEADER.size + 12 * sequences + 8 * entries
    if size not in (wanted, wanted + sequences):
        raise _wrong(
            index, f"has {size:,} bytes, and {sequences:,} sequences in {entries:,} entries take {wanted:,}"
        )
    return _Header(np.dtype(_IDS[code]), sequences, entries)


def _documents(index: StoredFile, tokens: StoredFile) -> Iterator[I64]:
    """Yield the ids of each document, its sequences joined. Raises `UserError` for an index that errs."""
    kind, sequences, entries = _header(index)
    size = tokens.size()
    places = _HEADER.size + 4 * sequences
    lengths = _column(index, _HEADER.size, sequences, "<i4")
    starts = _column(index, places, sequences, "<i8")
    bounds = _column(index, places + 8 * sequences, entries, "<i8")
    first = next(bounds, 0)
    if first != 0:
        raise _wrong(index, f"begins its documents at sequence {first}, not 0")
    read = 0
    with tokens.open() as file:
        for number, (begin, end) in enumerate(pairwise(_chained(first, bounds))):
            if not begin <= end <= sequences:
                raise _wrong(
                    index,
                    f"has document {number} from sequence {begin} to {end}, of {sequences:,} sequences",
                )
            parts, count = [], 0
            for sequence in range(begin, end):
                length, start = next(lengths), next(starts)
                if length < 0 or start < 0 or start + length * kind.itemsize > size:
                    raise _wrong(
                        index,
                        f"has sequence {sequence} at byte {start} with {length} ids, and {tokens} has "
                        f"{size:,} bytes",
                    )
                count += length
                if count > LARGEST_DOCUMENT:
                    raise too_large(f"document {number} of {tokens}")
                parts.append(_read(file, tokens, start, length * kind.itemsize))
            read = end
            yield np.frombuffer(b"".join(parts), kind).astype(np.int64)
    if read != sequences:
        raise _wrong(index, f"has {sequences:,} sequences, and its documents end at {read:,}")


def _chained(first: int, rest: Iterator[int]) -> Iterator[int]:
    yield first
    yield from rest


def _column(file: StoredFile, offset: int, count: int, kind: str) -> Iterator[int]:
    """Yield the numbers of one array of the index."""
    width = np.dtype(kind).itemsize
    with file.open(offset) as opened:
        while count:
            some = min(count, _AT_ONCE)
            raw = opened.read(some * width)
            if len(raw) < some * width:
                raise _wrong(file, "ends while it is read")
            yield from np.frombuffer(raw, kind).tolist()
            count -= some


def _read(file: IO[bytes], tokens: StoredFile, start: int, count: int) -> bytes:
    """Return bytes of the tokens; those behind the last ones need no seek."""
    if file.tell() != start:
        file.seek(start)
    data = file.read(count)
    if len(data) < count:
        raise _wrong(tokens, f"ends at byte {start + len(data):,}, while it is read")
    return data


def _wrong(file: StoredFile, fault: str) -> UserError:
    return UserError(f"data.corpus: {file} {fault}; {_REMEDY}")
