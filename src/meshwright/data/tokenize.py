"""Tokenizes text into a folder of shards, in memory bounded by a chunk of text and the largest document."""

from __future__ import annotations

import json
import warnings
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import accumulate, groupby, pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from meshwright.data.chat_source import ChatSource, with_chats
from meshwright.data.permutation import mix64
from meshwright.data.publish import publishing, write_atomically
from meshwright.data.readers import Encoded, TextSource
from meshwright.data.shard_writer import ShardWriter
from meshwright.data.sources import open_source
from meshwright.data.split import SplitSurvey, content_hash
from meshwright.data.text_processes import TextPiece, TextProcesses, batches
from meshwright.data.tokenizer import (
    SMALLEST_BPE,
    ByteTokenizer,
    IDs,
    Tokenizer,
    bpe_of_counts,
    byte_tokenizer,
)
from meshwright.data.verified import BESIDE
from meshwright.data.word_rule import CUTS, GPT2, WordRule
from meshwright.spec.errors import UserError
from meshwright.spec.files import user_path
from meshwright.spec.sections import DataSpec
from meshwright.units import counted

PIECE = 2**20  # characters that are encoded at once at most, a multiple of TRAIN_PIECE
TRAIN_PIECE = 2**11  # characters that a BPE is trained on at once: time grows with the square of a word
TRIALS, TRIAL = 32, 64  # places tried for a cut, and characters on each side of it
CHUNK = 2**22  # characters that the library encodes side by side
LITERALS = "literals.json"  # in the folder BESIDE
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
    split_literals: int = 0
    """Special tokens that texts spell, read as characters."""
    trained_tokens: int | None = None
    """Tokens of chats that are trained on; None for text, all of which is."""

    def to_json(self) -> dict[str, Any]:
        """Return the counts as plain JSON."""
        return {key: value for key, value in asdict(self).items() if value is not None}


def tokenize(
    corpus: str,
    tokenizer: str,
    out: Path,
    *,
    vocab_size: int,
    text_key: str = "text",
    val_fraction: float = 0.0,
    special_tokens: str = "text",
    format: str = "auto",
    chat_template: str | None = None,
    columns: Mapping[str, str] = MappingProxyType({}),
) -> Counts:
    """Tokenize `corpus` (as in `data.corpus`) into the folder `out`, a `data.corpus` from then on.

    `tokenizer`, `special_tokens`, `format`, `columns` and `chat_template` are as in `data`; a BPE is trained
    to `vocab_size` entries, without looking at the documents that `val_fraction` holds out. Raises
    `UserError`; `out` appears whole or not at all.
    """
    data = DataSpec.model_validate({
        "corpus": corpus, "tokenizer": tokenizer, "text_key": text_key, "format": format,
        "chat_template": chat_template, "columns": dict(columns),
    })  # fmt: skip
    source = with_chats(open_source(corpus, text_key), data)
    reads = special_tokens == "read" or isinstance(source, ChatSource)
    with publishing(out, "out") as folder, TextProcesses() as processes:
        found = build_tokenizer(tokenizer, vocab_size, [source], val_fraction, processes, reads)
        tell_remarks(found)
        counts = write_shards(source, found, folder, processes)
        warn_of_literals(source.name, folder)
    return counts


def write_shards(source: TextSource, tokenizer: Tokenizer, folder: Path, processes: TextProcesses) -> Counts:
    """Encode every document of `source` into shards in `folder`. Raises `UserError` for an empty corpus."""
    split: Counter[str] = Counter()
    trained = 0
    targets = source.targets if isinstance(source, ChatSource) else None
    with ShardWriter(folder, tokenizer, targets=targets) as writer:
        if isinstance(source, ChatSource):
            for chat in source.chats(tokenizer):
                writer.add_marked(*chat)
                trained += int(np.count_nonzero(chat.trained))
        else:
            encode = partial(_encode, tokenizer=tokenizer, processes=processes, split=split)
            for ids, utf8_bytes, content in source.encoded(tokenizer, encode):
                writer.add(ids, utf8_bytes, content)
        manifest = writer.finish()
    if not manifest.documents:
        reasons = ", ".join(counted(count, reason) for reason, count in sorted(source.skipped.items()))
        left_out = f" ({source.skipped.total()} left out: {reasons})" if reasons else ""
        what = "chat to train on" if isinstance(source, ChatSource) else "text"
        raise UserError(f"data.corpus: {source.name} holds no {what}{left_out}; give another corpus")
    if isinstance(source, ChatSource):
        source.tell(manifest.documents)
    else:
        warn_of_left_out(source)
    return Counts(
        documents=manifest.documents,
        tokens=manifest.tokens,
        utf8_bytes=manifest.utf8_bytes,
        vocab_size=manifest.vocab_size,
        sha256=manifest.digest,
        skipped=dict(source.skipped),
        split_literals=note_literals(folder, split),
        trained_tokens=trained if isinstance(source, ChatSource) else None,
    )


def warn_of_left_out(source: TextSource) -> None:
    """Warn of files and rows of a corpus that look like text, and are not read."""
    kinds = {
        "compressed": ("compressed files", "unpack"),
        "link": ("links", "copy"),
        "pointer of Git LFS": ("pointers of Git LFS", "fetch with git lfs pull"),
        "not UTF-8": ("texts not in UTF-8", "convert"),
    }
    for reason, (what, remedy) in kinds.items():
        if count := source.skipped[reason]:
            warnings.warn(
                f"data.corpus: {source.name}: left out {counted(count, what)}; {remedy} what is to be read",
                stacklevel=3,
            )


def note_literals(folder: Path, split: Counter[str]) -> int:
    """Keep in a folder of tokens how many special tokens were read as characters, and return that."""
    if split:
        facts = {"count": split.total(), "example": split.most_common(1)[0][0]}
        write_atomically(folder / BESIDE / LITERALS, json.dumps(facts))
    return split.total()


def warn_of_literals(name: str, folder: Path) -> None:
    """Warn if the tokens in a folder are of a text that spells special tokens, read as characters."""
    with suppress(OSError, ValueError, KeyError, TypeError):  # without the file there is nothing to tell
        facts = json.loads((folder / BESIDE / LITERALS).read_text(encoding="utf-8"))
        warnings.warn(f"{name}: {literals_sentence(facts['count'], facts['example'])}", stacklevel=2)


def literals_sentence(count: int, example: str, switch: str = "data.special_tokens = 'read'") -> str:
    """Return what to tell of special tokens that texts spell, read as characters."""
    literals, were = ("literals", "were") if count > 1 else ("literal", "was")
    return (
        f"{count:,} {literals} of special tokens such as {example} {were} read as plain characters; {switch} "
        f"reads them as tokens"
    )


def build_tokenizer(
    setting: str,
    vocab_size: int,
    sources: Sequence[TextSource],
    val_fraction: float,
    processes: TextProcesses | None = None,
    reads_special: bool = False,
) -> Tokenizer:
    """Return the tokenizer of `data.tokenizer`; a BPE is trained on the sources' training documents.

    The `processes` that trained it encode those documents faster than others. `reads_special` is the
    tokenizer's.
    """
    check_tokenizer(setting, vocab_size)
    if setting == "byte":
        return byte_tokenizer(reads_special)
    size = bpe_size(setting, vocab_size)
    if size is None:
        return Tokenizer.open(user_path(setting, "data.tokenizer"), reads_special=reads_special)
    with ExitStack() as stack:
        processes = processes or stack.enter_context(TextProcesses())
        return bpe_of_counts(_count(sources, val_fraction, processes), size, reads_special)


def tell_remarks(tokenizer: Tokenizer) -> None:
    """Warn of what the files of a published tokenizer say against each other."""
    for remark in tokenizer.published.remarks if tokenizer.published else ():
        warnings.warn(remark, stacklevel=3)


def _count(sources: Sequence[TextSource], val_fraction: float, processes: TextProcesses) -> Counter[str]:
    """Return the counts of words in the training documents of all sources, or of a sample of BPE_BYTES."""
    surveys = [SplitSurvey(val_fraction) for _ in sources]
    total = 0

    def pieces(place: int, share: float) -> Iterator[TextPiece]:
        nonlocal total
        for number, text in enumerate(sources[place].documents()):
            utf8 = text.encode()
            hashed = content_hash(utf8)
            if share == 1:
                surveys[place].add(hashed)
                total += len(utf8)
            if total <= BPE_BYTES if share == 1 else mix64(hashed)[0] < np.uint64(share * 2.0**64):
                yield from _learnt(text, int(hashed[0]), (place, number))

    processes.keep(pieces(place, 1) for place in range(len(sources)))
    if sampled := total > BPE_BYTES:
        processes.drop()
        processes.keep(pieces(place, BPE_BYTES / total) for place in range(len(sources)))
    splits = [survey.rule() for survey in surveys]

    def learnt(piece: TextPiece) -> bool:
        source, number = piece.number
        return not splits[source].mask(np.array([piece.document], np.uint64), number)[0]

    counts = processes.word_counts(learnt)
    if sampled:  # other pieces come between them when they are encoded
        processes.drop()
    return counts


def _learnt(text: str, document: int, number: tuple[int, int]) -> Iterator[TextPiece]:
    """Yield the pieces of a document, as they are encoded, with what a BPE learns from each.

    It learns from the words of the document cut into shorter pieces; most of these cuts are where a word ends
    anyway. PIECE is a multiple of TRAIN_PIECE, so where neither finds such a place both cut.
    """
    cuts = accumulate(map(len, _pieces(text, TRAIN_PIECE, GPT2)))
    inside = [cut for cut in cuts if cut < len(text) and not GPT2.may_cut(text[cut - 1], text[cut])]
    start = 0
    for piece in _pieces(text, PIECE, GPT2):
        stop = start + len(piece)
        own = [0, *(cut - start for cut in inside if start < cut < stop), len(piece)]
        parts = [piece[first:last] for first, last in pairwise(own)]
        yield TextPiece(document, piece, number, parts if len(parts) > 1 else None)
        start = stop


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


def _encode(
    texts: Iterator[str], tokenizer: Tokenizer, processes: TextProcesses, split: Counter[str] | None = None
) -> Iterator[Encoded]:
    """Yield each document, encoded in pieces.

    The special tokens that are read as characters are counted in `split`.
    """
    facts: deque[tuple[int, int]] = deque()
    documents: deque[int] = deque()  # of each piece

    def pieces() -> Iterator[TextPiece]:
        for document, text in enumerate(texts):
            utf8 = text.encode()
            facts.append((len(utf8), hashed := int(content_hash(utf8)[0])))
            if split is not None and not tokenizer.reads_special:
                split.update(tokenizer.literals.of(text))
            for piece in _long_pieces(text, tokenizer):
                documents.append(document)
                yield TextPiece(hashed, piece)

    def by_library() -> Iterator[IDs]:
        for chunk in batches(pieces(), lambda piece: len(piece.text), CHUNK):
            yield from tokenizer.encode_batch([piece.text for piece in chunk])

    encoded = processes.encode(pieces(), tokenizer) if tokenizer.rule else by_library()
    for _, group in groupby(encoded, key=lambda _: documents.popleft()):
        yield np.concatenate(list(group)), *facts.popleft()


def _long_pieces(text: str, tokenizer: Tokenizer) -> Iterator[str]:
    """Cut a document into pieces whose tokens, encoded one by one, are those of the whole.

    A tokenizer whose rule is unknown may mark the start of a text as a word's, and may lose spaces; so its
    text is cut only at spaces around which a trial shows no difference, and else stays whole.
    """
    if isinstance(tokenizer, ByteTokenizer) or tokenizer.rule:
        yield from _pieces(text, PIECE, tokenizer.rule or GPT2)
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


def _pieces(text: str, limit: int, rule: WordRule) -> Iterator[str]:
    """Cut a long text into at most `limit` characters, before a newline, space or tab where a word ends.

    Text without such a place is cut at `limit`.
    """
    start = 0
    while len(text) - start > limit:
        stop = start + limit
        for char in CUTS:
            place = text.rfind(char, start + 1, stop)
            while place > start and not rule.may_cut(text[place - 1], char):
                place = text.rfind(char, start + 1, place)
            if place > start:
                stop = place
                break
        yield text[start:stop]
        start = stop
    yield text[start:]
