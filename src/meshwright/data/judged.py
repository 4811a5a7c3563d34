"""Answers that are judged one by one in samples: each with the same prompt before another row's answer.

The second gives the estimate of the KL divergence of KTO (Ethayarajh et al. 2024), whose answers y' are those
of the rows before, as TRL's KTOTrainer turns them: the answer of row i goes to the prompt of row i + 1, and
the last one to the first. Here the rows are all of a side of a corpus and not those of a microbatch, and
pairs are taken apart into all chosen answers and then all rejected ones, so that no prompt gets an answer to
itself.

Both of an example lie in one sample and are arranged as a pair of answers is (`pairs.py`). Of document
numbers in a sample, 4k and 4k + 1 are an answer that is wanted, and the same prompt before another's, 4k + 2
and 4k + 3 one that is not.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Protocol, cast

import numpy as np

from meshwright.data.document_index import DocumentIndex
from meshwright.data.manifest import WANTED
from meshwright.data.pairs import both_or_none, cut_pairs, fit_pairs, whole_pairs
from meshwright.data.permutation import I64
from meshwright.data.tokenizer import Tokenizer
from meshwright.data.whole_documents import MarkedSource, TrainedTokens, WholeDocuments, WholeSamples
from meshwright.spec.sections import DataSpec

_BLOCK = 4096
"""Documents whose marks are read at a time."""


class JudgedSource(MarkedSource, Protocol):
    """A marked source of pairs, or of documents whose marks say whether they are wanted."""

    def marks(self, place: I64) -> I64:
        """Return the marks of the tokens at these places of the stream."""
        ...


def judged_samples(reader: TrainedTokens, index: DocumentIndex, data: DataSpec, held: bool) -> WholeSamples:
    """Arrange the examples of a side in samples."""
    source = cast(JudgedSource, reader.source)
    rows = source.rows(0, source.documents)
    here = index.held_out.mask(rows.hashes) == held
    here = both_or_none(here) if source.pairs else here
    start, stop = rows.starts[:-1][here], rows.starts[1:][here]
    head = prompts(source, start, stop)
    wanted = np.arange(len(start)) % 2 == 0 if source.pairs else source.marks(stop - 1) == WANTED
    other = before(len(start), source.pairs)
    rest = start + head
    answer = stop - rest
    # Each example is two documents behind one prompt.
    starts, heads, unwanted = (np.repeat(each, 2) for each in (start, head, (~wanted).astype(np.int64)))
    rests, answers = (np.stack([own, own[other]], 1).reshape(-1) for own in (rest, answer))
    whole = heads + answers
    length = cut_pairs(whole, data.seq_len)
    kept = whole_pairs(length > heads)
    counts = [(whole > length)[kept].sum(), *[(whole - length)[kept].sum()] * 2, (~kept).sum()]
    starts, heads, rests, length, unwanted = (each[kept] for each in (starts, heads, rests, length, unwanted))
    order, behind = fit_pairs(length, data.seq_len, data.pack)
    starts, length, heads, rests, unwanted = (
        each[order] for each in (starts, length, heads, rests, unwanted)
    )
    spelt = np.zeros_like(length)  # the loss is not one of a text
    return WholeSamples(starts, length, spelt, behind, np.array(counts), heads, rests, unwanted)


def before(count: int, pairs: bool) -> I64:
    """Return for each of `count` documents the one whose answer its prompt gets; of pairs first the chosen
    ones are taken in turn, and then the rejected ones."""
    turn = np.arange(count).reshape(-1, 2).T.reshape(-1) if pairs else np.arange(count)
    found = np.empty(count, dtype=np.int64)
    found[turn] = np.roll(turn, 1)
    return found


def prompts(source: MarkedSource, start_D: I64, stop_D: I64) -> I64:
    """Return the tokens (documents,) in front of the first one that is trained on."""
    found = []
    for block in range(0, len(start_D), _BLOCK):
        starts, sizes = start_D[block : block + _BLOCK], (stop_D - start_D)[block : block + _BLOCK]
        behind = np.cumsum(sizes) - sizes
        place = np.repeat(starts - behind, sizes) + np.arange(int(sizes.sum()))
        trained = np.flatnonzero(source.trained(place))
        found.append(trained[np.searchsorted(trained, behind)] - behind)
    return np.concatenate([np.empty(0, dtype=np.int64), *found])


class JudgedDocuments(WholeDocuments):
    """The samples of one side of a source of judged answers, read in any order."""

    arrange = staticmethod(judged_samples)

    def __init__(self, source: JudgedSource, tokenizer: Tokenizer, data: DataSpec, held: bool) -> None:
        super().__init__(source, tokenizer, data, held)
        self.pairs = True  # what both documents of an example predict counts together

    @property
    def what(self) -> str:
        """Plural of what its documents are of."""
        return "examples"

    @property
    def labels(self) -> tuple[int, int]:
        """The number of answers that are wanted, and of those that are not."""
        unwanted = int(self._samples.unwanted[::2].sum())
        return self.documents // 2 - unwanted, unwanted

    def lost(self, index: int) -> list[int]:
        """Return how many tokens each document of a sample has behind the end that is read."""
        here = slice(*self._samples.first[index : index + 2])
        rest, head, length = (x[here] for x in (self._samples.rest, self._samples.head, self._samples.length))
        starts = self._source.rows(0, self._source.documents).starts
        ends = starts[np.searchsorted(starts, rest, side="right")]
        lost: list[int] = (head + ends - rest - length).tolist()
        return lost

    def role(self, number: int) -> str:
        """Return which answer the document of this number in its sample is."""
        return ("wanted", "of another prompt", "unwanted", "of another prompt")[number % 4]

    def _places_of(self, document: I64, within: I64) -> I64:
        head = self._samples.head[document]
        first, rest = self._samples.start[document], self._samples.rest[document]
        return np.where(within < head, first + within, rest + within - head)

    def _numbers_of(self, document: I64, number: I64) -> I64:
        return 4 * (number // 2) + 2 * self._samples.unwanted[document] + number % 2


def warn_of_one_label(sides: Sequence[object], names: Sequence[str]) -> None:
    """Warn of judged answers to train on, of corpora with these names, that all have one label."""
    labels = [side.labels for side in sides if isinstance(side, JudgedDocuments)]
    wanted, unwanted = (sum(each) for each in zip(*labels, strict=True)) if labels else (0, 0)
    if bool(wanted) == bool(unwanted):
        return
    label, others = ("true", "not wanted") if wanted else ("false", "wanted")
    other = "false" if wanted else "true"
    remedy = "" if not wanted else ", or learn from these alone with --data.format prompt --preference none"
    warnings.warn(
        f"data.corpus: all {wanted + unwanted:,} answers of {', '.join(names)} to train on have the label "
        f"{label}, so nothing is learned from answers that are {others}; add rows with the label {other}, or "
        f"pairs of chosen and rejected answers{remedy}",
        stacklevel=4,
    )
