"""Samples of synthetic chats, token by token in Python integers, written apart from `meshwright.data`."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

from meshwright.spec import RunSpec
from meshwright.verify.reference.hashes import hash64, mix64, uniform

_TURN = 4
_LENGTH, _TOKEN, _TRAINED = 1, 3, 4  # streams of the corpus
_NOT_PREDICTED = -100

Sample = tuple[list[int], list[int], list[int], list[int]]
"""Tokens, targets, positions and documents of one sample, each of `data.seq_len`."""


def chats(spec: RunSpec, numbers: Sequence[int]) -> list[tuple[int, Callable[[], Sample]]]:
    """Return the samples of the chats with these numbers, each with the places of it that are read.

    A chat that is longer than a sample loses its end, and is left out if nothing before is trained on.
    Without packing each has a sample of its own. Else the longest come first, of equal ones the first; each
    goes to the sample that it leaves the least room in, of several the one that took a chat last, or begins a
    new one.
    """
    size, seed = spec.data.seq_len, spec.train.seed
    whole = {number: _length(seed, size, number) for number in numbers}
    read = {
        number: min(length, size)
        for number, length in whole.items()
        if length <= size or any(_trained(seed, number, position) for position in range(size))
    }
    numbers = list(read)
    if not spec.data.pack:
        return [(read[number], partial(_sample, spec, [(number, read[number])])) for number in numbers]
    members: list[list[int]] = []
    room: list[int] = []
    changed: list[int] = []
    for turn, number in enumerate(sorted(numbers, key=lambda number: -read[number])):
        fits = [sample for sample, left in enumerate(room) if left >= read[number]]
        if fits:
            sample = min(fits, key=lambda sample: (room[sample], -changed[sample]))
        else:
            sample = len(members)
            members.append([])
            room.append(size)
            changed.append(turn)
        members[sample].append(number)
        room[sample] -= read[number]
        changed[sample] = turn
    return [
        (
            sum(read[number] for number in own),
            partial(_sample, spec, [(number, read[number]) for number in own]),
        )
        for own in members
    ]


def _length(seed: int, size: int, chat: int) -> int:
    """Return how many tokens a chat has: log-uniform around the length of a sample."""
    shortest, longest = max(2, size // 8), 5 * size // 4 + 1
    return int(shortest * math.exp(math.log(longest / shortest) * uniform(hash64(seed, _LENGTH, chat))))


def _token(spec: RunSpec, chat: int, position: int) -> int:
    """Return a token of a chat: END, then others by the law of the synthetic corpus."""
    end = spec.model.vocab_size - 1
    if position == 0:
        return end
    return int(end * uniform(mix64(hash64(spec.train.seed, _TOKEN, chat) ^ position)) ** 3)


def _trained(seed: int, chat: int, position: int) -> bool:
    """Return True for a token that is trained on: not the first, and by the top bit of its turn's hash."""
    return position > 0 and hash64(seed, _TRAINED, chat, position // _TURN) >> 63 == 1


def _sample(spec: RunSpec, chats: Sequence[tuple[int, int]]) -> Sample:
    """Return the sample of chats, each with the tokens of it that are read; padding belongs to the last."""
    size, seed = spec.data.seq_len, spec.train.seed
    tokens, targets, positions, documents = list[int](), list[int](), list[int](), list[int]()
    for document, (chat, length) in enumerate(chats):
        for position in range(length):
            tokens.append(_token(spec, chat, position))
            followed = position + 1 < length and _trained(seed, chat, position + 1)
            targets.append(_token(spec, chat, position + 1) if followed else _NOT_PREDICTED)
            positions.append(position)
            documents.append(document)
    while len(tokens) < size:
        tokens.append(spec.model.vocab_size - 1)
        targets.append(_NOT_PREDICTED)
        positions.append(positions[-1] + 1)
        documents.append(documents[-1])
    return tokens, targets, positions, documents
