"""Samples of synthetic answers in twos, token by token in Python integers, written apart from
`meshwright.data`: of pairs, and of answers that are judged one by one, each with its prompt before another's
answer."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from meshwright.spec import RunSpec
from meshwright.verify.reference.chats import Sample
from meshwright.verify.reference.hashes import hash64, mix64, uniform

_LENGTH, _TOKEN, _PROMPT = 1, 3, 5  # streams of the corpus
_NOT_PREDICTED = -100


@dataclass(frozen=True)
class Document:
    """The prompt of one answer of the corpus before the answer proper of one."""

    prompted: int
    answered: int
    kind: int
    """Its number among the documents that belong together."""


@dataclass(frozen=True)
class TwoDocuments:
    """Two documents that are in one sample, with the tokens of each that are read."""

    documents: tuple[Document, Document]
    lengths: tuple[int, int]


def pairs(spec: RunSpec, numbers: Sequence[int]) -> list[tuple[int, Callable[[], Sample]]]:
    """Return the samples of the pairs with these numbers, each with the places of it that are read."""
    wanted = [
        (Document(2 * number, 2 * number, 0), Document(2 * number + 1, 2 * number + 1, 1))
        for number in numbers
    ]
    return _samples(spec, wanted, group=2)


def judged(spec: RunSpec, numbers: Sequence[int]) -> list[tuple[int, Callable[[], Sample]]]:
    """Return the samples of both answers of the pairs with these numbers, each with its prompt before the
    answer of the one before it, where all chosen answers come first, and before the first comes the last."""
    turn = [2 * number for number in numbers] + [2 * number + 1 for number in numbers]
    earlier = {answer: turn[place - 1] for place, answer in enumerate(turn)}
    wanted = [
        (Document(answer, answer, 2 * (answer % 2)), Document(answer, earlier[answer], 2 * (answer % 2) + 1))
        for number in numbers
        for answer in (2 * number, 2 * number + 1)
    ]
    return _samples(spec, wanted, group=4)


def _samples(
    spec: RunSpec, wanted: Sequence[tuple[Document, Document]], group: int
) -> list[tuple[int, Callable[[], Sample]]]:
    """Samples of twos of documents.

    A two is in one sample. Where it is longer, the longer document loses its end, until it is no longer than
    the other one, and then both do; a two is left out if the prompt is all that is left of one. Packing is
    that of chats, by the length of twos.
    """
    size = spec.data.seq_len
    read: list[TwoDocuments] = []
    for one, other in wanted:
        first, second = _whole(spec, one), _whole(spec, other)
        while first + second > size:
            if first == second:
                first = second = size // 2
            elif first > second:
                first -= 1
            else:
                second -= 1
        if first > _prompt(spec, one.prompted // 2) and second > _prompt(spec, other.prompted // 2):
            read.append(TwoDocuments((one, other), (first, second)))
    members: list[list[TwoDocuments]] = []
    room: list[int] = []
    changed: list[int] = []
    if not spec.data.pack:
        members = [[two] for two in read]
    else:
        for turn, two in enumerate(sorted(read, key=lambda two: -sum(two.lengths))):
            fits = [sample for sample, left in enumerate(room) if left >= sum(two.lengths)]
            sample = min(fits, key=lambda sample: (room[sample], -changed[sample]), default=len(members))
            if sample == len(members):
                members.append([])
                room.append(size)
                changed.append(turn)
            members[sample].append(two)
            room[sample] -= sum(two.lengths)
            changed[sample] = turn
    return [(sum(sum(two.lengths) for two in own), partial(_sample, spec, own, group)) for own in members]


def _whole(spec: RunSpec, document: Document) -> int:
    """Return how many tokens a document has."""
    answer = _length(spec, document.answered) - _prompt(spec, document.answered // 2)
    return _prompt(spec, document.prompted // 2) + answer


def _length(spec: RunSpec, answer: int) -> int:
    """Return how many tokens an answer and its prompt have: log-uniform around half a sample."""
    size = spec.data.seq_len
    shortest, longest = max(2, size // 16), 5 * size // 8 + 1
    drawn = uniform(hash64(spec.train.seed, _LENGTH, answer))
    return int(shortest * math.exp(math.log(longest / shortest) * drawn))


def _prompt(spec: RunSpec, pair: int) -> int:
    """Return how many tokens both answers of a pair begin with: fewer than the shorter one has."""
    room = min(_length(spec, 2 * pair), _length(spec, 2 * pair + 1)) - 1
    return 1 + int(uniform(hash64(spec.train.seed, _PROMPT, 2 * pair)) * room)


def _token(spec: RunSpec, document: Document, position: int) -> int:
    """Return a token of a document."""
    prompt = _prompt(spec, document.prompted // 2)
    if position < prompt:
        return _of_answer(spec, document.prompted, position)
    own = _prompt(spec, document.answered // 2)
    return _of_answer(spec, document.answered, own + position - prompt)


def _of_answer(spec: RunSpec, answer: int, position: int) -> int:
    """Return a token of an answer: END, then others by the law of the synthetic corpus."""
    end = spec.model.vocab_size - 1
    if position == 0:
        return end
    source = answer - answer % 2 if position < _prompt(spec, answer // 2) else answer
    return int(end * uniform(mix64(hash64(spec.train.seed, _TOKEN, source) ^ position)) ** 3)


def _sample(spec: RunSpec, twos: Sequence[TwoDocuments], group: int) -> Sample:
    """Return the sample of twos, each with `group` numbers for its documents."""
    size, end = spec.data.seq_len, spec.model.vocab_size - 1
    tokens, targets, positions, documents = list[int](), list[int](), list[int](), list[int]()
    for number, two in enumerate(twos):
        for document, length in zip(two.documents, two.lengths, strict=True):
            for position in range(length):
                tokens.append(_token(spec, document, position))
                learned = _prompt(spec, document.prompted // 2) <= position + 1 < length
                targets.append(_token(spec, document, position + 1) if learned else _NOT_PREDICTED)
                positions.append(position)
                documents.append(group * number + document.kind)
    while len(tokens) < size:
        tokens.append(end)
        targets.append(_NOT_PREDICTED)
        positions.append(positions[-1] + 1)
        documents.append(documents[-1])
    return tokens, targets, positions, documents
