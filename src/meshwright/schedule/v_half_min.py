"""V-Half and V-Min: pipelines with a half and a third of 1F1B's activations (Qi et al. 2024, §3).

A schedule is the *block* of one microbatch, repeated every 6 units, the time of F, I and W of its two chunks
if each takes 1. The lifespan of the activations in the block decides how many there are at a time. In a V,
chunk 0 of a rank holds its activations long if chunk 1 holds them briefly, so that all ranks hold equally
many; the more compact the block, the fewer.

The blocks are those of the code that the authors published. Repeated without changes they leave gaps while
the pipeline fills and drains. The authors close these by squeezing and reordering; here `_repeat` does both.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Sequence
from itertools import accumulate, chain

from meshwright.schedule.actions import Action, Kind, Lists, Schedule, v_shape

PERIOD = 6
Block = tuple[int, int, int, int]
"""The units in which a rank computes F of chunk 0, F of chunk 1, I of chunk 1 and I of chunk 0."""

_F, _I, _W = Kind.F, Kind.I, Kind.W
_CHANGE = (1, 0, -1)
"""Change of a rank's activations in flight by F, I and W."""

_NEVER = sys.maxsize

MOST_HELD: dict[str, Callable[[int], int]] = {
    "v-half": lambda ranks: 2 * ((ranks + 2) // 2),
    "v-min": lambda ranks: 2 * ((ranks + 4) // 3),
}
"""Name -> ranks -> most activations of a chunk, half the layers of a rank, that a rank holds (ibid.)."""


def v_half(ranks: int, microbatches: int) -> Lists:
    """At most about p + 2 activations of a chunk: 1F1B holds 2p such."""
    gap = 3 if ranks % 2 == 0 else 0  # else two actions of a rank would be in one unit
    up, down = 3 * ranks - 2, 6 * ranks - 2 + gap
    blocks = [(2 * rank, up - rank, up + 1 + gap + 2 * rank, down - rank) for rank in range(ranks)]
    return _repeat(blocks, microbatches)


def v_min(ranks: int, microbatches: int) -> Lists:
    """At most 2 (p + 4) / 3 activations of a chunk: the fewest of the paper's blocks."""
    gap = 2 if ranks % 3 == 0 else 0  # else two actions of a rank would be in one unit
    up, down = 2 * ranks - 1, 4 * ranks - 1 + gap
    blocks = [(rank, up - rank, up + 1 + gap + rank, down - rank) for rank in range(ranks)]
    return _repeat(blocks, microbatches)


def _pattern(block: Block, stages: tuple[int, int], microbatches: int) -> list[Action]:
    """Return the repeated block of a rank, with a pending W in each unit that is free."""
    kinds = ((_F, stages[0]), (_F, stages[1]), (_I, stages[1]), (_I, stages[0]))
    slots = {at % PERIOD: (at, *kind) for at, kind in zip(block, kinds, strict=True)}
    assert len(slots) == len(block), "no two actions at one time"
    listed: list[Action] = []
    pending: deque[Action] = deque()
    for now in range(block[-1] + PERIOD * (microbatches - 1) + 1):
        first, kind, stage = slots.get(now % PERIOD, (now + 1, _F, 0))
        microbatch = (now - first) // PERIOD
        if 0 <= microbatch < microbatches:
            listed.append(Action(kind, stage, microbatch))
            if kind is _I:
                pending.append(Action(_W, stage, microbatch))
        elif pending:
            listed.append(pending.popleft())
    return [*listed, *pending]


class _RankList:
    """The list of a rank while it is reordered: what is left of it, and how many activations it then holds.

    Positions count in the original list. `needs` is position -> the action, over all ranks, that it waits
    for; `cap` is the most activations that the rank may hold.
    """

    def __init__(self, listed: list[Action], needs: list[int], cap: int) -> None:
        self.listed, self.needs, self.cap = listed, needs, cap
        self.result: list[Action] = []
        self.level = 0  # activations held now
        self.held = list(accumulate(_CHANGE[action.kind] for action in listed))  # after each position left
        self.taken = bytearray(len(listed) + 1)
        self.head = 0
        self.weights: deque[int] = deque()
        streams: dict[tuple[Kind, int], deque[int]] = {}
        self.stream_of: list[deque[int]] = []
        for at, (kind, stage, _) in enumerate(listed):
            stream = self.weights if kind is _W else streams.setdefault((kind, stage), deque())
            stream.append(at)
            self.stream_of.append(stream)
        self.streams = list(streams.values())

    def take(self, now: int, done: list[int]) -> int:
        """Compute the first action that can run in unit `now`, W last; return its position, or -1 if none."""
        heads = sorted([stream[0] for stream in self.streams if stream])
        if self.weights:
            heads.append(self.weights[0])
        for at in heads:
            if done[self.needs[at]] < now and self._fits(at):
                self._pull(self.stream_of[at].popleft())
                return at
        return -1

    def _fits(self, at: int) -> bool:
        """True if the rank stays within its memory when it computes position `at` before the earlier ones."""
        if self.listed[at].kind is not _F or at == self.head:
            return True
        return max(self.level, *self.held[self.head : at]) < self.cap

    def _pull(self, at: int) -> None:
        """Compute position `at` now, before the earlier ones that are left."""
        change = _CHANGE[self.listed[at].kind]
        self.level += change
        for i in range(self.head, at):
            self.held[i] += change
        self.taken[at] = 1
        self.result.append(self.listed[at])
        while self.taken[self.head]:
            self.head += 1


def _repeat(blocks: Sequence[Block], microbatches: int) -> Lists:
    """Repeat the block of each rank, and close the gaps at both ends of the step.

    The lists are run in units, and a rank that would wait takes the next action that can run and fits its
    memory. F fits if the rank then never holds more activations than the most that the lists themselves
    hold. W waits for a unit in which nothing else can run. As each action is taken when its dependencies are
    done, and the others keep their order, the result runs to its end.
    """
    ranks = len(blocks)
    stages = [(rank, 2 * ranks - 1 - rank) for rank in range(ranks)]
    lists = [_pattern(block, own, microbatches) for block, own in zip(blocks, stages, strict=True)]
    flow = Schedule("", ranks, 2, microbatches, v_shape(ranks), tuple(map(tuple, lists))).flow
    needs = _needs(lists, flow.source, microbatches)
    cap = max(max(accumulate(_CHANGE[action.kind] for action in listed)) for listed in lists)
    starts = flow.starts[:-1]
    lines = [
        _RankList(listed, needs[start : start + len(listed)], cap)
        for listed, start in zip(lists, starts, strict=True)
    ]
    # The unit in which each action is computed; the last entry, at -1, is for actions without dependencies.
    done = [*[_NEVER] * len(needs), -1]
    now, left = 0, len(needs)
    while left:
        for line, start in zip(lines, starts, strict=True):
            at = line.take(now, done)
            if at >= 0:
                done[start + at] = now
                left -= 1
        now += 1
    return [line.result for line in lines]


def _needs(lists: list[list[Action]], source: list[int], microbatches: int) -> list[int]:
    """Return the action that each one waits for, W for its I and the last stage's I for its F; else -1."""
    needs = source.copy()
    last = 2 * len(lists) - 1
    own = [-1] * (2 * len(lists) * microbatches)  # the latest of each stage and microbatch
    for at, (kind, stage, microbatch) in enumerate(chain.from_iterable(lists)):
        place = stage * microbatches + microbatch
        if kind is _W or (kind is _I and stage == last):
            needs[at] = own[place]
        own[place] = at
    return needs
