"""Batches of the synthetic corpus, token by token in Python integers, written apart from `meshwright.data`.

What is shared with the loader is its result's type, `Batch`, and the rules: which tokens a document has,
which documents are held out, how documents become samples, and in which order these are read.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import accumulate, pairwise

import torch

from meshwright.data.loader import Batch
from meshwright.spec import RunSpec
from meshwright.verify.reference.batches import batch_sizes
from meshwright.verify.reference.chats import Sample, chats
from meshwright.verify.reference.hashes import WORD, hash64, mix64, uniform
from meshwright.verify.reference.pairs import judged, pairs

_DOCUMENTS, _SHORTEST, _LONGEST = 4096, 16, 1024
_LENGTH, _CONTENT, _TOKEN = 1, 2, 3  # streams of the corpus
_SOURCE = 1, 0  # of a run's seed, the stream that orders the samples of its first corpus
_ROUNDS = 8
_NOT_PREDICTED = -100


def batches(spec: RunSpec) -> Iterator[Batch]:
    """Yield the global batch of each optimiser step, from the first and without end."""
    held_out = _held_out_documents(spec)
    samples = _samples(spec, sorted({*_documents(spec)} - {*held_out}))
    seed = hash64(spec.train.seed, *_SOURCE)
    read = 0
    for tokens in batch_sizes(spec.train):
        slots = range(tokens // spec.data.seq_len)
        places = [divmod(read + slot, len(samples)) for slot in slots]
        read += len(slots)
        ids = [_permuted(place, len(samples), hash64(seed, epoch)) for epoch, place in places]
        columns = zip(*(samples[number][1]() for number in ids), strict=True)
        yield Batch(*(torch.tensor(column) for column in (*columns, ids, slots)))


def held_out_batch(spec: RunSpec, targets: int) -> Batch | None:
    """The held-out samples in order up to the one with the last of so many targets, those behind it without
    a target, but for pairs, which count in whole; None where no text is held out."""
    held_out = _held_out_documents(spec)
    rows, left = list[Sample](), targets
    for used, sample in _samples(spec, held_out) if held_out else ():
        if left <= 0:
            break
        tokens, wanted, positions, documents = sample()
        if spec.preference is None:
            wanted[left:] = [_NOT_PREDICTED] * len(wanted[left:])
        rows.append((tokens, wanted, positions, documents))
        left -= used
    if not rows:
        return None
    numbers = list(range(len(rows)))
    return Batch(*(torch.tensor(column) for column in (*zip(*rows, strict=True), numbers, numbers)))


def _samples(spec: RunSpec, numbers: Sequence[int]) -> list[tuple[int, Callable[[], Sample]]]:
    """Return the samples of documents with these numbers, each with the places of it that are read."""
    if spec.preference is not None:
        return (judged if spec.preference.judged else pairs)(spec, [number // 2 for number in numbers])
    if spec.data.format not in ("auto", "text"):
        return chats(spec, numbers)
    text = _Text(spec, numbers)
    return [
        (last - first, partial(_sample, spec, text, first, last)) for first, last in _spans(spec, text.starts)
    ]


class _Text:
    """Documents of these numbers one after the other, each END and then its tokens, with END behind the last.

    `starts` are the places of all ENDs, END the last id of the vocabulary.
    """

    def __init__(self, spec: RunSpec, numbers: Sequence[int]) -> None:
        seed, self.end = spec.train.seed, spec.model.vocab_size - 1
        self._streams = [hash64(seed, _TOKEN, number) for number in numbers]
        self.starts = list(accumulate((1 + _length(seed, number) for number in numbers), initial=0))

    def document(self, place: int) -> int:
        """Return which of the documents, counted from 0, has the token at a place."""
        return bisect_right(self.starts, place) - 1

    def token(self, place: int) -> int:
        """Return the token at a place: floor(v * u^3) for u uniform in [0, 1) and v other ids than END."""
        document = self.document(place)
        position = place - self.starts[document]
        if position == 0:
            return self.end
        return int(self.end * uniform(mix64(self._streams[document] ^ position)) ** 3)


def _length(seed: int, document: int) -> int:
    """Return how many tokens a document has: log-uniform from `_SHORTEST` to `_LONGEST`."""
    ratio = math.log(_LONGEST / _SHORTEST)
    return int(_SHORTEST * math.exp(ratio * uniform(hash64(seed, _LENGTH, document))))


def _documents(spec: RunSpec) -> range:
    """Return the numbers of all documents, of pairs those of the first answers."""
    return range(0, _DOCUMENTS, 1 if spec.preference is None else 2)


def _held_out_documents(spec: RunSpec) -> list[int]:
    """Return those of `_documents` whose hash is below val_fraction * 2^64.

    With a fraction above 0, at least one document is held out, and at least one is left.
    """
    val_fraction = spec.data.val_fraction
    hashes = {document: hash64(spec.train.seed, _CONTENT, document) for document in _documents(spec)}
    held = [document for document, value in hashes.items() if value < val_fraction * 2**64]
    if val_fraction > 0 and not held:
        held = [min(hashes, key=hashes.__getitem__)]
    if len(held) == len(hashes):
        held.remove(max(hashes, key=hashes.__getitem__))
    return held


def _spans(spec: RunSpec, starts: list[int]) -> Iterator[tuple[int, int]]:
    """Yield the first place of each sample and the place behind its last.

    Packed samples cut the whole text into equal parts, others cut each document; the last part is shorter.
    """
    length = spec.data.seq_len
    texts = [(0, starts[-1])] if spec.data.pack else pairwise(starts)
    for first, last in texts:
        yield from ((place, min(place + length, last)) for place in range(first, last, length))


def _sample(spec: RunSpec, text: _Text, first: int, last: int) -> Sample:
    """Return the sample of the places [first, last), padded to its length by ENDs without a target.

    Without a mask of documents all of it is one document; padding belongs to the last one.
    """
    length = spec.data.seq_len
    read = [text.token(place) for place in range(first, last + 1)]
    padding = length - (last - first)
    tokens = read[:-1] + [text.end] * padding
    targets = read[1:] + [_NOT_PREDICTED] * padding
    if not spec.data.document_mask:
        return tokens, targets, list(range(length)), [0] * length
    documents = [text.document(min(place, last - 1)) for place in range(first, first + length)]
    positions = [
        place - max(text.starts[document], first)
        for place, document in zip(range(first, first + length), documents, strict=True)
    ]
    return tokens, targets, positions, [document - documents[0] for document in documents]


def _permuted(place: int, size: int, key: int) -> int:
    """Return the sample at a place of the epoch that has this key.

    A Feistel network over the next power of two, repeated until the result is below `size` (Black and Rogaway
    2002).
    """
    bits = (size - 1).bit_length()
    low_bits, high_bits = bits - bits // 2, bits // 2
    value = place
    while True:
        high, low = value >> low_bits, value % 2**low_bits
        for number in range(_ROUNDS):
            round_key = mix64((key + number) & WORD)
            if number % 2 == 0:
                high ^= mix64(low ^ round_key) % 2**high_bits
            else:
                low ^= mix64(high ^ round_key) % 2**low_bits
        value = (high << low_bits) + low
        if value < size:
            return value
