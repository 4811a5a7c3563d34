"""Texts counted and encoded on all cores, by tokenizers that split them into words."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from typing import NamedTuple, Self, TypeVar

import numpy as np

from meshwright.data.processes import Processes, WorkError
from meshwright.data.tokenizer import UNKNOWN_TEXT, IDs, Tokenizer
from meshwright.data.word_rule import GPT2
from meshwright.data.words import Words
from meshwright.spec.errors import UserError
from meshwright.spec.files import shortened

BATCH = 2**20
"""Characters of a request, at least."""

T = TypeVar("T")


class TextPiece(NamedTuple):
    """A part of a document that is encoded by itself."""

    document: int
    """The whole document's hash."""
    text: str
    number: tuple[int, int] = (0, 0)
    """Numbers of the source, and of the document in it."""
    learnt: Sequence[str] | None = None
    """Texts that a BPE learns from; None stands for the piece."""


class _Kept(NamedTuple):
    """Pieces, without their texts, the process that has their words, and its number for them."""

    pieces: list[TextPiece]
    process: int
    number: int


class TextProcesses:
    """Processes that count the words of pieces, and encode pieces; those that were counted with less work."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._processes: Processes | None = None
        self._tokenizer: Tokenizer | None = None
        self._kept: dict[int, _Kept] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def keep(self, sources: Iterable[Iterable[TextPiece]]) -> None:
        """Remember the words of the pieces of all sources, by GPT-2's rule.

        `encode` makes use of them where it comes upon the same pieces in the same order.
        """
        if self._processes is None:
            self._processes = self._stack.enter_context(Processes(Words(GPT2)))
        sent: deque[list[TextPiece]] = deque()

        def requests() -> Iterator[tuple[None, tuple[object, ...]]]:
            for pieces in sources:
                for batch in batches(pieces, _length):
                    sent.append([piece._replace(text="", learnt=None) for piece in batch])
                    keys.append(_key(batch))
                    yield None, ("keep", [(piece.text, piece.learnt) for piece in batch])

        keys: deque[int] = deque()
        for process, number in self._processes.each(requests()):
            self._kept[keys.popleft()] = _Kept(sent.popleft(), process, number)

    def drop(self) -> None:
        """Forget all pieces."""
        self._kept.clear()
        if self._processes:
            self._processes.everyone(("drop",))

    def word_counts(self, learnt: Callable[[TextPiece], bool]) -> Counter[str]:
        """Return how often each word is in the kept pieces of which `learnt`, without their text, is true."""
        left_out: defaultdict[int, set[tuple[int, int]]] = defaultdict(set)
        for pieces, process, number in self._kept.values():
            left_out[process].update(
                (number, place) for place, piece in enumerate(pieces) if not learnt(piece)
            )
        total: Counter[str] = Counter()
        if self._processes:
            requests = (
                (number, ("word_counts", left_out[number])) for number in range(self._processes.number)
            )
            for _, counts in self._processes.each(requests):
                total.update(counts)
        return total

    def encode(self, pieces: Iterable[TextPiece], tokenizer: Tokenizer) -> Iterator[IDs]:
        """Yield the ids of each piece, by a tokenizer with a rule. Raises `UserError` for unknown text."""
        dtype = f"<u{tokenizer.id_bytes}"
        if self._processes is None:
            assert tokenizer.rule is not None
            self._processes = self._stack.enter_context(
                Processes(Words(tokenizer.rule, tokenizer.json, dtype, tokenizer.reads_special))
            )
        elif self._tokenizer is not tokenizer:
            self._processes.everyone(("load", tokenizer.json, dtype, tokenizer.reads_special))
        self._tokenizer = tokenizer

        def requests() -> Iterator[tuple[int | None, tuple[object, ...]]]:
            for batch in batches(pieces, _length):
                kept = self._kept.get(_key(batch)) if self._kept else None
                if tokenizer.reads_special and any(tokenizer.literals.found(piece.text) for piece in batch):
                    kept = None  # its words are those of plain text
                if kept and [piece.document for piece in kept.pieces] == [piece.document for piece in batch]:
                    yield kept.process, ("kept", kept.number)
                else:
                    yield None, ("encode", [piece.text for piece in batch])

        try:
            for _, encoded in self._processes.each(requests()):
                yield from (np.frombuffer(ids, dtype) for ids in encoded)
        except WorkError as error:
            before, after = UNKNOWN_TEXT
            raise UserError(f"{before} ({shortened(str(error))}){after}") from error


def batches(items: Iterable[T], size: Callable[[T], int], least: int = BATCH) -> Iterator[list[T]]:
    """Yield all items in order, as lists of at least this size together."""
    batch: list[T] = []
    length = 0
    for item in items:
        batch.append(item)
        length += size(item)
        if length >= least:
            yield batch
            batch, length = [], 0
    if batch:
        yield batch


def _length(piece: TextPiece) -> int:
    return len(piece.text)


def _key(batch: Sequence[TextPiece]) -> int:
    return hash(tuple(piece.text for piece in batch))
