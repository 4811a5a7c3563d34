"""Samples of synthetic pairs of answers, token by token in Python integers, written apart from
`meshwright.data`."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

from meshwright.spec import RunSpec
from meshwright.verify.reference.chats import Sample
from meshwright.verify.reference.hashes import hash64, mix64, uniform

_LENGTH, _TOKEN, _PROMPT = 1, 3, 5  # streams of the corpus
_NOT_PREDICTED = -100


def pairs(spec: RunSpec, numbers: Sequence[int]) -> list[tuple[int, Callable[[], Sample]]]:
    """Return the samples of the pairs with these numbers, each with the places of it that are read.

    A pair is in one sample. Where it is longer, the longer answer loses its end, until it is no longer than
    the other one, and then both do; a pair whose prompt is all that is left of one is left out. Packing is
    that of chats, by the length of pairs.
    """
    size = spec.data.seq_len
    read: dict[int, tuple[int, int]] = {}
    for number in numbers:
        chosen, rejected = _length(spec, 2 * number), _length(spec, 2 * number + 1)
        while chosen + rejected > size:
            if chosen == rejected:
                chosen = rejected = size // 2
            elif chosen > rejected:
                chosen -= 1
            else:
                rejected -= 1
        if min(chosen, rejected) > _prompt(spec, number):
            read[number] = chosen, rejected
    members: list[list[int]] = []
    room: list[int] = []
    changed: list[int] = []
    if not spec.data.pack:
        members = [[number] for number in read]
    else:
        for turn, number in enumerate(sorted(read, key=lambda number: -sum(read[number]))):
            fits = [sample for sample, left in enumerate(room) if left >= sum(read[number])]
            sample = min(fits, key=lambda sample: (room[sample], -changed[sample]), default=len(members))
            if sample == len(members):
                members.append([])
                room.append(size)
                changed.append(turn)
            members[sample].append(number)
            room[sample] -= sum(read[number])
            changed[sample] = turn
    return [
        (
            sum(sum(read[number]) for number in own),
            partial(_sample, spec, [(number, *read[number]) for number in own]),
        )
        for own in members
    ]


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


def _token(spec: RunSpec, answer: int, position: int) -> int:
    """Return a token of an answer: END, then others by the law of the synthetic corpus."""
    end = spec.model.vocab_size - 1
    if position == 0:
        return end
    source = answer - answer % 2 if position < _prompt(spec, answer // 2) else answer
    return int(end * uniform(mix64(hash64(spec.train.seed, _TOKEN, source) ^ position)) ** 3)


def _sample(spec: RunSpec, pairs: Sequence[tuple[int, int, int]]) -> Sample:
    """Return the sample of pairs, each with the tokens of its two answers that are read."""
    size, end = spec.data.seq_len, spec.model.vocab_size - 1
    tokens, targets, positions, documents = list[int](), list[int](), list[int](), list[int]()
    for pair, *lengths in pairs:
        for answer, length in enumerate(lengths, 2 * pair):
            for position in range(length):
                tokens.append(_token(spec, answer, position))
                learned = _prompt(spec, pair) <= position + 1 < length
                targets.append(_token(spec, answer, position + 1) if learned else _NOT_PREDICTED)
                positions.append(position)
                documents.append(documents[-1] + (position == 0) if documents else 0)
    while len(tokens) < size:
        tokens.append(end)
        targets.append(_NOT_PREDICTED)
        positions.append(positions[-1] + 1)
        documents.append(documents[-1])
    return tokens, targets, positions, documents
