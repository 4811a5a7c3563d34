"""Tokenizes text into a folder of shards, in memory bounded by a chunk of text and the largest document."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from hashlib import blake2b
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np

from meshwright.data.permutation import U64, mix64
from meshwright.data.publish import publishing
from meshwright.data.readers import TextSource, open_source
from meshwright.data.shard_writer import ShardWriter
from meshwright.data.split import HeldOut, SplitSurvey
from meshwright.data.tokenizer import SMALLEST_BPE, IDs, Tokenizer, byte_tokenizer, train_bpe
from meshwright.spec.errors import UserError
from meshwright.spec.files import user_path

PIECE = 2**20  # characters that are encoded at once at most: the library needs ~100 bytes for each token
TRAIN_PIECE = 2**11  # characters that a BPE is trained on at once: time grows with the square of a word
TRIALS, TRIAL = 32, 64  # places tried for a cut, and characters on each side of it
CHUNK = 2**22  # characters that are encoded side by side
BPE_BYTES = 2**28  # a BPE is trained on a sample of about this size; more changes few merges


@dataclass(frozen=True)
class Counts:
    """Result of `tokenize`: counts of what was written, and `skipped`, what was left out by reason."""

    documents: int
    tokens: int
    utf8_bytes: int
    vocab_size: int
    sha256: str
    skipped: dict[str, int] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return the counts as plain JSON."""
        return asdict(self)


def tokenize(
    corpus: str,
    tokenizer: str,
    out: Path,
    *,
    vocab_size: int,
    text_key: str = "text",
    val_fraction: float = 0.0,
) -> Counts:
    """Tokenize `corpus` (as in `data.corpus`) into the folder `out`, a `data.corpus` from then on.

    `tokenizer` is as in `data.tokenizer`; a BPE is trained to `vocab_size` entries, without looking at the
    documents that `val_fraction` holds out. Raises `UserError`; `out` appears whole or not at all.
    """
    source = open_source(corpus, text_key)
    with publishing(out, "out") as folder:
        return write_shards(source, build_tokenizer(tokenizer, vocab_size, [source], val_fraction), folder)


def write_shards(source: TextSource, tokenizer: Tokenizer, folder: Path) -> Counts:
    """Encode every document of `source` into shards in `folder`. Raises `UserError` for an empty corpus."""
    with ShardWriter(folder, tokenizer) as writer:
        for ids, utf8_bytes, content in _encode(source.documents(), tokenizer):
            writer.add(ids, utf8_bytes, content)
        manifest = writer.finish()
    if not manifest.documents:
        reasons = ", ".join(f"{count} {reason}" for reason, count in sorted(source.skipped.items()))
        left_out = f" ({source.skipped.total()} left out: {reasons})" if reasons else ""
        raise UserError(f"data.corpus: {source.name} holds no text{left_out}; give another corpus")
    return Counts(
        documents=manifest.documents,
        tokens=manifest.tokens,
        utf8_bytes=manifest.utf8_bytes,
        vocab_size=manifest.vocab_size,
        sha256=manifest.digest,
        skipped=dict(source.skipped),
    )


def build_tokenizer(
    setting: str, vocab_size: int, sources: Sequence[TextSource], val_fraction: float
) -> Tokenizer:
    """Return the tokenizer of `data.tokenizer`; a BPE is trained on the sources' training documents."""
    check_tokenizer(setting, vocab_size)
    if setting == "byte":
        return byte_tokenizer()
    size = bpe_size(setting, vocab_size)
    if size is None:
        return Tokenizer.open(user_path(setting, "data.tokenizer"))
    surveys = [_survey(source, val_fraction) for source in sources]
    total = sum(utf8_bytes for _, utf8_bytes in surveys)
    keep = min(1.0, BPE_BYTES / total) if total else 1.0

    def texts() -> Iterator[str]:
        for source, (split, _) in zip(sources, surveys, strict=True):
            for number, text in enumerate(source.documents()):
                hashed = content_hash(text)
                sampled = keep == 1 or mix64(hashed)[0] < np.uint64(keep * 2.0**64)
                if sampled and not split.mask(hashed, number)[0]:
                    yield from _pieces(text, TRAIN_PIECE)

    return train_bpe(texts(), size)


def bpe_size(setting: str, vocab_size: int) -> int | None:
    """Return the entries of the BPE that 'bpe' or 'bpe:N' asks for; None for other tokenizers."""
    name, _, number = setting.partition(":")
    if name != "bpe":
        return None
    if not number and setting != "bpe":
        raise UserError(
            f"data.tokenizer: {setting!r} lacks its number of entries; give 'bpe' or 'bpe:{vocab_size}'"
        )
    if number and not number.isdecimal():
        raise UserError(f"data.tokenizer: {number!r} in {setting!r} is not a number; try 'bpe:{vocab_size}'")
    return int(number) if number else vocab_size


def check_tokenizer(setting: str, vocab_size: int) -> None:
    """Raise `UserError` for settings that can be refused before any text is read."""
    size = bpe_size(setting, vocab_size)
    if setting == "byte" or size is None:
        return
    if size > vocab_size:
        raise UserError(
            f"data.tokenizer: {setting!r} has more entries than model.vocab_size {vocab_size}; "
            f"give at most 'bpe:{vocab_size}', or set model.vocab_size = {size}"
        )
    if size < SMALLEST_BPE:
        raise UserError(
            f"data.tokenizer: a BPE of {size} entries cannot hold the 256 bytes and the end of document; "
            f"set model.vocab_size and the BPE's size to {SMALLEST_BPE} or more"
        )


def content_hash(text: str) -> U64:
    """Return the 64-bit hash (1,) of a document's text that decides its side of the validation split."""
    return np.frombuffer(blake2b(text.encode(), digest_size=8).digest(), dtype="<u8").astype(np.uint64)


def _survey(source: TextSource, val_fraction: float) -> tuple[HeldOut, int]:
    """Return the split of all documents, and their UTF-8 bytes in all."""
    survey = SplitSurvey(val_fraction)
    total = 0
    for text in source.documents():
        survey.add(content_hash(text))
        total += len(text.encode())
    return survey.rule(), total


def _encode(texts: Iterator[str], tokenizer: Tokenizer) -> Iterator[tuple[IDs, int, int]]:
    """Yield (token ids, UTF-8 bytes, content hash) of each document, encoded in chunks of pieces."""
    facts: deque[tuple[int, int]] = deque()

    def chunks() -> Iterator[list[tuple[int, str]]]:
        chunk: list[tuple[int, str]] = []
        size = 0
        for number, text in enumerate(texts):
            facts.append((len(text.encode()), int(content_hash(text)[0])))
            for piece in _long_pieces(text, tokenizer):
                chunk.append((number, piece))
                size += len(piece)
                if size >= CHUNK:
                    yield chunk
                    chunk, size = [], 0
        yield chunk

    encoded = (
        (number, ids)
        for chunk in chunks()
        for (number, _), ids in zip(chunk, tokenizer.encode_batch([text for _, text in chunk]), strict=True)
    )
    for _, group in groupby(encoded, key=itemgetter(0)):
        ids = np.concatenate([ids for _, ids in group])
        yield ids, *facts.popleft()


def _long_pieces(text: str, tokenizer: Tokenizer) -> Iterator[str]:
    """Cut a document into pieces whose tokens, encoded one by one, are those of the whole.

    A tokenizer that is not byte-level may mark the start of a text as a word's, and may lose spaces; so its
    text is cut only at spaces around which a trial shows no difference, and else stays whole.
    """
    if tokenizer.is_byte_level:
        yield from _pieces(text, PIECE)
        return
    start = 0
    while len(text) - start > PIECE and (cut := _cut(text, start, tokenizer)):
        yield text[start : cut[0]]
        start = cut[1]
    yield text[start:]


def _cut(text: str, start: int, tokenizer: Tokenizer) -> tuple[int, int] | None:
    """Return (end of a piece, start of the next) within PIECE characters of `start`; None where no trial
    succeeds. The space between belongs to the next piece or to neither."""
    place = start + PIECE
    for _ in range(TRIALS):
        place = text.rfind(" ", start + 1, place)
        if place < 0:
            return None
        before, after = text[max(start, place - TRIAL) : place], text[place : place + TRIAL]
        for rest in (after, after[1:]):
            whole, *parts = tokenizer.encode_batch([before + after, before, rest])
            if rest and np.array_equal(whole, np.concatenate(parts)):
                return place, place + len(after) - len(rest)
    return None


def _pieces(text: str, limit: int) -> Iterator[str]:
    """Cut a long text into at most `limit` characters, before a newline, space or tab after a visible one.

    GPT-2's rule never merges across such a place; text without one is cut at `limit`.
    """
    start = 0
    while len(text) - start > limit:
        stop = start + limit
        for char in "\n \t":
            place = text.rfind(char, start + 1, stop)
            while place > start and text[place - 1].isspace():
                place = text.rfind(char, start + 1, place)
            if place > start:
                stop = place
                break
        yield text[start:stop]
        start = stop
    yield text[start:]
