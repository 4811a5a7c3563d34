"""A rank's list as it is written down: patterns, repeated."""

from __future__ import annotations

from collections.abc import Sequence

from meshwright.schedule.actions import Action, Kind


class ScheduleBuilder:
    """Writes a rank's list from patterns such as ``"F0 I1 W1"``: a kind, and a chunk of the rank.

    Chunk c is the rank's c-th stage. Each kind on each chunk takes its microbatches in order, 0 to m - 1, and
    a whole backward counts as I and W. A ``W`` without a chunk is the oldest that is owed: the rank has done
    its I.

    What would go beyond the last microbatch is left out, which is how a schedule for few microbatches comes
    about: it is the one for more of them, without what is not there. No action needs another microbatch's
    result, so what is left still fits together.
    """

    def __init__(self, stages: Sequence[int], microbatches: int) -> None:
        self.actions: list[Action] = []
        self._stages = stages
        self._microbatches = microbatches
        self._next = [[0] * len(stages) for _ in Kind]
        self._owed: list[int] = []

    def write(self, pattern: str, times: int = 1) -> None:
        """Append the pattern `times` times; not at all where `times` is negative."""
        words = [(Kind[word[0]], int(word[1:] or -1)) for word in pattern.split()]
        for _ in range(times):
            for kind, chunk in words:
                self._append(kind, self._owed[0] if chunk < 0 else chunk)

    def finish(self, chunk: int) -> None:
        """Append the weight-backwards that a chunk still owes."""
        self.write(f"W{chunk}", self._owed.count(chunk))

    def _append(self, kind: Kind, chunk: int) -> None:
        counters = self._next
        microbatch = counters[kind][chunk]
        if kind is Kind.B:
            microbatch = counters[Kind.I][chunk]
            counters[Kind.I][chunk] += 1
            counters[Kind.W][chunk] += 1
        else:
            counters[kind][chunk] += 1
            if kind is Kind.I:
                self._owed.append(chunk)
            elif kind is Kind.W:
                self._owed.remove(chunk)
        if microbatch < self._microbatches:
            self.actions.append(Action(kind, self._stages[chunk], microbatch))
