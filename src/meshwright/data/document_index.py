"""An index over the documents of a source: in which document a place of the stream, a window or a byte lies.

Rows of all documents stay on disk. The index has cumulative sums at every `BLOCK`-th document, for each side
of the validation split: 64 bytes a block. A look-up is a binary search in one column and then a scan of a
block.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np

from meshwright.data.permutation import I64, U64
from meshwright.data.publish import build_once, sha256_file
from meshwright.data.split import HeldOut, SplitSurvey
from meshwright.spec.errors import DataError
from meshwright.spec.files import parse_json

BLOCK = 256
"""Documents of one block."""

FORMAT = 1
"""Version of the files of an index."""

_CHUNK = 2**12 * BLOCK  # documents that are read at once when an index is built
_TABLE, _FACTS = "sums.npy", "index.json"


class Documents(NamedTuple):
    """Some consecutive documents of a source."""

    starts: I64
    """(documents + 1,) places of the documents' ENDs in the stream, and the place after the last."""
    bytes: I64
    """(documents,) UTF-8 bytes of each document's text."""
    hashes: U64
    """(documents,) hash of each document's content, which does not depend on the tokenizer."""


class TokenSource(Protocol):
    """A stream of documents [END, t1..tn], one after the other, that can be read at any place.

    Those of a `marked` source are [t1..tn], with a mark for each token (`whole_documents.MarkedSource`). Of
    `pairs` each two documents are a chosen and a rejected answer.
    """

    digest: str
    """SHA-256 of everything in the source."""
    documents: int

    @property
    def marked(self) -> bool:
        """True for documents of which some tokens are trained on: chats."""
        ...

    @property
    def pairs(self) -> bool:
        """True for marked documents that are a chosen and a rejected answer in turn."""
        ...

    @property
    def judged(self) -> bool:
        """True for marked documents that are completions with a label."""
        ...

    def take(self, place: I64) -> I64:
        """Return the token ids at these places of the stream, in the shape of `place`."""
        ...

    def rows(self, first: int, last: int) -> Documents:
        """Return the documents from number `first` up to `last`."""
        ...

    def index(self, val_fraction: float, window: int) -> DocumentIndex:
        """Return its documents split in two; `window` is the length of unpacked samples, or 0."""
        ...


class Side(NamedTuple):
    """Sums over the training documents, or over the held-out ones, before each block and behind the last.

    Each is (blocks + 1,). A document of n tokens has n + 1 targets, its own and the END after it.
    """

    documents: I64
    targets: I64
    bytes: I64
    windows: I64
    """Samples of documents that are not packed; zeros without a length of a sample."""


@dataclass(frozen=True)
class DocumentIndex:
    """The split of a source's documents and their sums by block: `sums` is (2 sides, 4 columns, blocks + 1).

    With `file` it is that file memory-mapped, so that all processes of a host share one copy.
    """

    held_out: HeldOut
    sums: I64
    file: Path | None = None

    def side(self, held: bool) -> Side:
        """Return the held-out documents, or the others.

        Raises `DataError` where the file was cut: to touch it beyond its end would end the process by SIGBUS.
        """
        if self.file is not None:
            with suppress(FileNotFoundError):  # what is mapped outlives its name
                if self.file.stat().st_size < self.sums.nbytes:
                    raise DataError(
                        f"{self.file}: was cut while it was in use; remove its folder and start again"
                    )
        return Side(*self.sums[int(held)])


def index_in_memory(source: TokenSource, val_fraction: float, window: int) -> DocumentIndex:
    """Return the index of a small source. `window` is the length of unpacked samples, 0 for packed ones."""
    sums = np.zeros(_shape(source), dtype=np.int64)
    return DocumentIndex(_fill(sums, source, val_fraction, window), sums)


def index_on_disk(
    folder: Path, source: TokenSource, val_fraction: float, window: int, *, check: bool
) -> DocumentIndex:
    """Return the index in `folder`; when it is missing, one of many processes that ask at once builds it.

    `check` compares it with its own SHA-256; a damaged index is built again.
    """

    def build(temporary: Path) -> None:
        path = temporary / _TABLE
        sums = np.lib.format.open_memmap(path, mode="w+", dtype=np.int64, shape=_shape(source))
        rule = _fill(sums, source, val_fraction, window)
        sums.flush()
        facts = {"limit": rule.limit, "exception": rule.exception, "sha256": sha256_file(path)}
        (temporary / _FACTS).write_text(json.dumps(facts), encoding="utf-8")

    build_once(folder, "data.cache", build)
    index = _read(folder, source, check)
    if index is None:
        shutil.rmtree(folder, ignore_errors=True)
        build_once(folder, "data.cache", build)
        index = _read(folder, source, check)
        assert index is not None  # it was built just now
    return index


def _read(folder: Path, source: TokenSource, check: bool) -> DocumentIndex | None:
    """Return the index in a folder; None where it is damaged."""
    try:
        facts = parse_json((folder / _FACTS).read_bytes())
        rule = HeldOut(int(facts["limit"]), int(facts["exception"]))
        sums = np.lib.format.open_memmap(folder / _TABLE, mode="r").view(np.ndarray)
        whole = not check or sha256_file(folder / _TABLE) == facts["sha256"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    if not whole or sums.shape != _shape(source) or sums.dtype != np.int64:
        return None
    return DocumentIndex(rule, sums, folder / _TABLE)


def _shape(source: TokenSource) -> tuple[int, int, int]:
    """Return the shape of `DocumentIndex.sums`."""
    return 2, len(Side._fields), -(-source.documents // BLOCK) + 1


def _fill(sums: I64, source: TokenSource, val_fraction: float, window: int) -> HeldOut:
    """Sum up both sides in one pass over the documents, or in two where one document is an exception."""
    survey = SplitSurvey(val_fraction)
    guess = HeldOut(survey.limit)
    for block, rows in _chunks(source):
        survey.add(rows.hashes)
        _sum_up(sums, block, rows, guess, window)
    rule = survey.rule()
    if rule != guess:
        for block, rows in _chunks(source):
            _sum_up(sums, block, rows, rule, window)
    return rule


def _chunks(source: TokenSource) -> Iterator[tuple[int, Documents]]:
    """Yield (first block, rows) of runs of whole blocks."""
    for first in range(0, source.documents, _CHUNK):
        yield first // BLOCK, source.rows(first, min(first + _CHUNK, source.documents))


def _sum_up(sums: I64, block: int, rows: Documents, rule: HeldOut, window: int) -> None:
    """Write the sums behind each block of `rows`; those before `block` are known."""
    held = rule.mask(rows.hashes, block * BLOCK)
    lengths = np.diff(rows.starts)
    windows = -(-lengths // window) if window else np.zeros_like(lengths)
    cuts = np.arange(0, len(lengths), BLOCK)
    for side in range(2):
        here = held == bool(side)
        for column, values in enumerate(Side(np.ones_like(lengths), lengths, rows.bytes, windows)):
            of_block = np.add.reduceat(np.where(here, values, 0), cuts)
            behind = sums[side, column, block] + np.cumsum(of_block)
            sums[side, column, block + 1 : block + 1 + len(cuts)] = behind
