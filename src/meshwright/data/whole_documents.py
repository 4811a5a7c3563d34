"""Samples of whole documents, of which some tokens are trained on: chats.

A document [t1..tn] is read from t1 on, and a token that is marked is predicted from the one before it; t1 and
what follows tn never are. One of more than T tokens is cut behind the first T.

packed      documents share samples of T tokens by `best_fit`
unpacked    a sample is one document
pairs       of answers are arranged in the place of single documents (`pairs.py`)

The rest of a sample is padding: END with the target `IGNORE`, which belongs to the last document.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from meshwright.data.best_fit import best_fit
from meshwright.data.document_index import DocumentIndex, TokenSource
from meshwright.data.packing import IGNORE, Samples
from meshwright.data.pairs import both_or_none, cut_pairs, fit_pairs, whole_pairs
from meshwright.data.permutation import I64
from meshwright.data.publish import build_once
from meshwright.data.tokenizer import Tokenizer
from meshwright.spec.sections import DataSpec

FORMAT = 3
"""Version of the files of `WholeSamples`."""
_SAMPLES = "samples.npz"
_NONE = np.empty(0, dtype=np.int64)


class MarkedSource(TokenSource, Protocol):
    """A stream of documents with marks."""

    @property
    def home(self) -> Path | None:
        """The folder for what is derived from it; None for a source that is made up."""
        ...

    def trained(self, place: I64) -> NDArray[np.bool_]:
        """Return True for the tokens at these places of the stream that are trained on."""
        ...


class WholeSamples(NamedTuple):
    """The documents of one side of a source's split, by sample."""

    start: I64
    """(documents,) place of each in the source's stream, in the order of the samples."""
    length: I64
    """(documents,) tokens of it that are read."""
    bytes: I64
    """(documents,) UTF-8 bytes that its trained tokens spell."""
    first: I64
    """(samples + 1,) documents before each sample."""
    cut: I64
    """(4,) documents that were cut, the tokens, and trained tokens, that they lost, and documents that were
    left out, as nothing was left to train on of one of their pair."""
    head: I64 = _NONE
    """(documents,) tokens that are read from `start` on, before those from `rest` on; this and the next two
    are of judged answers (`judged.py`) alone."""
    rest: I64 = _NONE
    """(documents,) place in the stream of what follows the head."""
    unwanted: I64 = _NONE
    """(documents,) 1 for those of an answer that is not wanted, else 0."""


@dataclass(frozen=True)
class TrainedTokens:
    """Reads the trained tokens of documents."""

    source: MarkedSource
    tokenizer: Tokenizer

    def trained(self, start: int, stop: int) -> I64:
        """Return the ids of the trained tokens from a place up to another one."""
        place = np.arange(start, stop)
        return self.source.take(place)[self.source.trained(place)]

    def bytes(self, start: int, stop: int) -> int:
        """Return the bytes that they spell."""
        return trained_bytes(self.tokenizer, self.trained(start, stop))


def trained_bytes(tokenizer: Tokenizer, ids: I64) -> int:
    """Return the UTF-8 bytes that these tokens spell; special ones spell nothing."""
    return len(tokenizer.decode_bytes([number for number in ids.tolist() if number not in tokenizer.special]))


def whole_samples(reader: TrainedTokens, index: DocumentIndex, data: DataSpec, held: bool) -> WholeSamples:
    """Arrange the documents of a side in samples."""
    rows = reader.source.rows(0, reader.source.documents)
    here, pairs = index.held_out.mask(rows.hashes) == held, reader.source.pairs
    here = both_or_none(here) if pairs else here
    start, whole, size = rows.starts[:-1][here], np.diff(rows.starts)[here], rows.bytes[here].copy()
    length = cut_pairs(whole, data.seq_len) if pairs else np.minimum(whole, data.seq_len)
    lost, trains = np.zeros_like(length), np.ones(len(length), dtype=bool)
    for number in np.flatnonzero(whole > length).tolist():
        first, end = int(start[number]), int(start[number] + length[number])
        lost[number] = len(reader.trained(end, first + int(whole[number])))
        size[number] = reader.bytes(first, end)
        trains[number] = len(reader.trained(first, end)) > 0
    kept = whole_pairs(trains) if pairs else trains
    start, whole, length, size, lost = (each[kept] for each in (start, whole, length, size, lost))
    counts = np.array([(whole > length).sum(), (whole - length).sum(), lost.sum(), (~kept).sum()])
    order, behind = _arranged(length, data, pairs)
    return WholeSamples(start[order], length[order], size[order], behind, counts)


def _arranged(length_D: I64, data: DataSpec, pairs: bool) -> tuple[I64, I64]:
    """Documents of these lengths in the order of samples, and where each sample begins in it."""
    if pairs:
        return fit_pairs(length_D, data.seq_len, data.pack)
    if data.pack:
        return best_fit(length_D, data.seq_len)
    return np.arange(len(length_D)), np.arange(len(length_D) + 1)


class WholeDocuments:
    """The samples of one side of a marked source's split, read in any order; with `held` the held-out side.

    Places that are read are numbered through all samples: `target_tokens` of them, trained on or not.
    """

    arrange: ClassVar[Callable[..., WholeSamples]] = staticmethod(whole_samples)
    """Makes samples of a side, as `whole_samples`."""

    def __init__(self, source: MarkedSource, tokenizer: Tokenizer, data: DataSpec, held: bool) -> None:
        index = source.index(data.val_fraction, 0)
        self._reader = TrainedTokens(source, tokenizer)
        self._source, self._end, self._seq_len = source, tokenizer.end_id, data.seq_len
        self.pairs = source.pairs

        def arranged() -> WholeSamples:
            return type(self).arrange(self._reader, index, data, held)

        recipe = [FORMAT, self.what, source.digest, data.val_fraction, data.seq_len, data.pack, held]
        self._samples = arranged() if source.home is None else _on_disk(source.home, recipe, arranged)
        self.documents = len(self._samples.start)
        self.count = len(self._samples.first) - 1
        self._behind: I64 = np.concatenate([[0], np.cumsum(self._samples.length)])
        self._places: I64 = self._behind[self._samples.first]
        self.target_tokens = int(self._places[-1])
        self.cut_documents, self.cut_tokens, self.cut_trained, self.left_out = self._samples.cut.tolist()

    @property
    def what(self) -> str:
        """Plural of what its documents are of."""
        return "pairs" if self.pairs else "chats"

    def targets_before(self, index_N: I64) -> I64:
        """Return the places in all samples before each of these, in [0, count]."""
        return self._places[index_N]

    def samples_for(self, targets: int) -> int:
        """Return how many samples hold the first so many places."""
        return int(np.searchsorted(self._places, targets))

    def gather(self, index_N: I64) -> Samples:
        """Return the samples with these numbers, in [0, count)."""
        shape = len(index_N), self._seq_len
        begin_N, end_N = self._samples.first[index_N], self._samples.first[index_N + 1]
        counts_N = end_N - begin_N
        row_D = np.repeat(np.arange(len(index_N)), counts_N)
        number_D = np.arange(len(row_D)) - np.repeat(np.cumsum(counts_N) - counts_N, counts_N)
        document_D = begin_N[row_D] + number_D
        length_D = self._samples.length[document_D]
        offset_D = self._behind[document_D] - self._places[index_N][row_D]

        within = np.arange(int(length_D.sum())) - np.repeat(np.cumsum(length_D) - length_D, length_D)
        place = self._places_of(np.repeat(document_D, length_D), within)
        spot = np.repeat(row_D * self._seq_len + offset_D, length_D) + within
        ids = self._source.take(place)
        wanted = np.where(self._source.trained(place), ids, IGNORE)

        last_N = offset_D[np.cumsum(counts_N) - 1]
        tokens = np.full(shape, self._end)
        targets = np.full(shape, IGNORE)
        positions = np.arange(self._seq_len) - last_N[:, None]
        shown_D = self._numbers_of(document_D, number_D)
        documents = np.repeat(shown_D[np.cumsum(counts_N) - 1][:, None], self._seq_len, axis=1)
        tokens.flat[spot], positions.flat[spot] = ids, within
        documents.flat[spot] = np.repeat(shown_D, length_D)
        inside = within > 0
        targets.flat[spot[inside] - 1] = wanted[inside]
        return Samples(tokens, targets, positions, documents)

    def lost(self, index: int) -> list[int]:
        """Return how many tokens each document of a sample has behind the end that is read."""
        begin, end = self._samples.first[index], self._samples.first[index + 1]
        starts = self._source.rows(0, self._source.documents).starts
        number_D = np.searchsorted(starts, self._samples.start[begin:end])
        lost: list[int] = (np.diff(starts)[number_D] - self._samples.length[begin:end]).tolist()
        return lost

    def role(self, number: int) -> str:
        """Return which answer the document of this number in its sample is; "" for none of several."""
        return ("chosen", "rejected")[number % 2] if self.pairs else ""

    def _places_of(self, document: I64, within: I64) -> I64:
        """Return the places in the stream of tokens of documents, `within` tokens behind their first ones."""
        return self._samples.start[document] + within

    def _numbers_of(self, document: I64, number: I64) -> I64:
        """Return the numbers by which documents are told apart, where they are these of their samples."""
        return number

    def byte_count(self, targets: int) -> int:
        """Return the UTF-8 bytes that the trained tokens among the first so many places' targets spell.

        Those of pairs are none: their loss is not one of a text.
        """
        if self.pairs:
            return 0
        whole = int(np.searchsorted(self._behind, targets, side="right")) - 1
        counted = int(self._samples.bytes[:whole].sum())
        if left := targets - int(self._behind[whole]):
            start = int(self._samples.start[whole])
            counted += self._reader.bytes(start, start + left + 1)
        return counted

    def text_bytes(self, targets: int) -> bytes:
        """Return what these tokens spell, special ones by their names."""
        text = []
        for number in range(int(np.searchsorted(self._behind, targets))):
            start, length = int(self._samples.start[number]), int(self._samples.length[number])
            read = min(length, targets - int(self._behind[number]) + 1)
            text.append(
                self._reader.tokenizer.decode_bytes(self._reader.trained(start, start + read).tolist())
            )
        return b"".join(text)

    def sample_text(self, targets: int, max_bytes: int) -> bytes | None:
        """Return None: what is trained on is no text by itself, which a compressor could be given."""
        return None


def _on_disk(home: Path, recipe: list[object], arrange: Callable[[], WholeSamples]) -> WholeSamples:
    """Return the samples that a folder of `home` has; one of many processes makes it.

    They are read and not mapped: a process that touches a mapped file that somebody cut is ended by SIGBUS.
    """
    folder = home / f"whole-{hashlib.sha256(json.dumps(recipe).encode()).hexdigest()[:16]}"

    def build(temporary: Path) -> None:
        np.savez(temporary / _SAMPLES, **arrange()._asdict())

    build_once(folder, "data.cache", build)
    try:
        return _read(folder)
    except (OSError, ValueError, KeyError, zipfile.BadZipFile):  # damaged, as its check sums say
        shutil.rmtree(folder, ignore_errors=True)
        build_once(folder, "data.cache", build)
        return _read(folder)


def _read(folder: Path) -> WholeSamples:
    with np.load(folder / _SAMPLES) as arrays:
        return WholeSamples(**{field: arrays[field] for field in WholeSamples._fields})
