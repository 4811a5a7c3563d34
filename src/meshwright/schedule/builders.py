"""Schedules whose ranks' lists follow a fixed pattern, each as a function that writes the list of one rank.

- GPipe (Huang et al. 2019) and breadth-first (Lamy-Poirier 2023): all forwards, then all backwards. A rank
  holds the activations of all m microbatches in all its stages. In return the work of a stage is contiguous,
  so that with ZeRO-3 its parameters are gathered once for all microbatches.
- 1F1B: PipeDream-Flush (Narayanan et al. 2019; 2021, memory-efficient pipeline-parallel training), which
  Megatron-LM calls non-interleaved, and its interleaved form (Narayanan et al. 2021). After a warm-up of
  forwards a rank alternates, so that it holds the activations of p - r microbatches rather than of all.
- ZB-H1 and ZB-H2 (Qi et al. 2023, handcrafted schedules): 1F1B with the backward split, so that backwards for
  weights fill the bubble.
- ZB-V (Qi et al. 2023, §6; 2024, V-ZB): zero bubble with the memory of 1F1B, by two chunks per rank in a V.
  Since the forward returns to the rank where it started, the last backward of a microbatch begins where its
  first forward did, and every rank soon has a backward to compute.
- DualPipeV: DualPipe (DeepSeek-AI 2024, V3 §3.2.1) cut in half (Qi et al. 2025), also in a V. DualPipe runs
  both directions of a pipeline at once, to compute one microbatch's forward while another's backward waits
  for its links and vice versa. Its second half mirrors the first, so that one half, folded into a V, does the
  same without the second copy of the parameters. Where DualPipe overlaps a forward with a backward, the list
  has them next to each other: F0 B1, F1 B0.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import chain

from meshwright.schedule.actions import Action, Kind

_I, _W = Kind.I, Kind.W
_HALVES = ((0,), (1,), (2,), (1, 2))
"""Kind -> the numbers of the kinds that it counts as: a whole backward as both its halves."""


@cache
def _parsed(word: str) -> tuple[Kind, int]:
    """A word of a pattern: its kind, and its chunk or -1."""
    return Kind[word[0]], int(word[1:] or -1)


class ScheduleBuilder:
    """Writes the list of a rank as patterns such as ``"F0 I1 W1"``: a kind, and a chunk of the rank.

    Chunk c is the c-th stage of the rank. Each kind on each chunk takes its microbatches in order, 0 to
    m - 1, and a whole backward counts as I and W. A ``W`` without a chunk is the oldest one that is pending,
    that is, whose I the rank has computed.

    Actions beyond the last microbatch are omitted. A schedule for few microbatches is thus the one for more
    of them without the missing ones; it is valid, as no action needs the result of another microbatch.
    """

    def __init__(self, rank: int, rank_of: Sequence[int], microbatches: int) -> None:
        self.rank, self.ranks, self.microbatches = rank, max(rank_of) + 1, microbatches
        self.stages = [stage for stage, owner in enumerate(rank_of) if owner == rank]
        self.actions: list[Action] = []
        self._next = [[0] * len(_HALVES) for _ in self.stages]
        """Chunk -> how many of each kind it has."""
        self._pending: list[int] = []

    def write(self, pattern: str, times: int = 1) -> None:
        """Append the pattern `times` times; not at all if `times` is negative."""
        words = list(map(_parsed, pattern.split()))
        for _ in range(times):
            for kind, chunk in words:
                self._append(kind, self._pending[0] if chunk < 0 else chunk)

    def finish(self, chunk: int) -> None:
        """Append the pending weight-backwards of a chunk."""
        self.write(f"W{chunk}", self._pending.count(chunk))

    def _append(self, kind: Kind, chunk: int) -> None:
        done = self._next[chunk]
        first, *second = _HALVES[kind]
        microbatch = done[first]
        done[first] += 1
        for half in second:
            done[half] += 1
        if kind is _I:
            self._pending.append(chunk)
        elif kind is _W:
            self._pending.remove(chunk)
        if microbatch < self.microbatches:
            self.actions.append(Action(kind, self.stages[chunk], microbatch))


def gpipe(tape: ScheduleBuilder) -> None:
    """One stage per rank; backwards in the order of the forwards."""
    tape.write("F0", tape.microbatches)
    tape.write("B0", tape.microbatches)


def breadth_first(tape: ScheduleBuilder) -> None:
    """Any number of stages per rank; each takes all microbatches before the next stage begins.

    Backwards go in the opposite order, newest activations first, so v = 1 is `gpipe` except for that.
    """
    for chunk in range(len(tape.stages)):
        tape.write(f"F{chunk}", tape.microbatches)
    tape.actions += [action._replace(kind=Kind.B) for action in reversed(tape.actions)]


def one_f_one_b(tape: ScheduleBuilder) -> None:
    """One stage per rank; rank r warms up with p - r - 1 forwards."""
    warm = min(tape.microbatches, tape.ranks - tape.rank - 1)
    tape.write("F0", warm)
    tape.write("F0 B0", tape.microbatches - warm)
    tape.write("B0", warm)


def interleaved(tape: ScheduleBuilder) -> None:
    """Any number of stages per rank; a round of microbatches passes all of them before the next begins.

    Narayanan et al. (2021) take rounds of p microbatches and so need m to be a multiple of p. Here the
    microbatches are divided into max(1, m // p) rounds as evenly as possible, the larger ones first, so that
    any m works; for multiples of p the lists are the published ones. With v = 1 this is 1F1B.
    """
    virtual = len(tape.stages)
    if virtual == 1:
        one_f_one_b(tape)
        return
    rounds = max(1, tape.microbatches // tape.ranks)
    size, larger = divmod(tape.microbatches, rounds)
    sizes = [size + (index < larger) for index in range(rounds)]
    chunks = [chunk for size in sizes for chunk in range(virtual) for _ in range(size)]
    # Until a round's first microbatch is in the last chunk, and the way down to rank p - 1 and back.
    warm = min(len(chunks), (virtual - 1) * sizes[0] + 2 * (tape.ranks - 1 - tape.rank))
    forwards = [f"F{chunk}" for chunk in chunks]
    backwards = [f"B{virtual - 1 - chunk}" for chunk in chunks]
    pairs = zip(forwards[warm:], backwards, strict=False)
    tape.write(" ".join([*forwards[:warm], *chain(*pairs), *backwards[len(chunks) - warm :]]))


def zb_h1(tape: ScheduleBuilder) -> None:
    """One stage per rank; no rank holds more than p activations, as rank 0 of 1F1B.

    The bubble of a step is (p - 1)(F + I - W) seconds if I >= W: a third of 1F1B's if F = I = W.
    """
    _split_backward(tape, warm=tape.ranks - tape.rank, held=tape.rank)


def zb_h2(tape: ScheduleBuilder) -> None:
    """One stage per rank; up to 2p - 1 activations on every rank, and no bubble if F = I = W and m >= 2p - 1.

    That is, each rank computes from its first action to its last without a pause. It begins r forwards after
    rank 0 and ends as much later, so the optimiser must not wait for all ranks (Qi et al. 2023, §4); if it
    does, the p - 1 forwards of this skew are idle time.
    """
    _split_backward(tape, warm=2 * (tape.ranks - tape.rank) - 1, held=2 * tape.rank)


def _split_backward(tape: ScheduleBuilder, warm: int, held: int) -> None:
    """Write `warm` forwards, then repeat I, W, F, with the W of the last `held` forwards held back.

    The I next to these forwards thus leave in quick succession for the ranks before, which have no forward
    left to compute; the W held back are the work of this rank while those finish.
    """
    warm = min(warm, tape.microbatches)
    left = tape.microbatches - warm  # forwards after the warm-up
    tape.write("F0", warm)
    tape.write("I0 W0 F0", left - held)
    tape.write("I0 F0", min(left, held))
    tape.write("I0 W0", warm)
    tape.finish(0)


def zb_v(tape: ScheduleBuilder) -> None:
    """Two stages per rank in a V; at most 2p activations of a chunk, as much memory as on rank 0 of 1F1B.

    With F = I = W and m >= 2p - 1 each rank computes from its first action to its last without a pause, as
    with `zb_h2`.
    """
    rank, above = tape.rank, tape.ranks - tape.rank
    full = max(tape.microbatches, 2 * tape.ranks - 1)  # the pattern needs as many; the tape omits the rest
    tape.write("F0", 2 * above - 1)  # until the first microbatch is back
    tape.write("F1 F0", rank)
    tape.write("F1 I1 W1", above)
    tape.write("F0 I0 W0 F1 I1 W1", full - (2 * tape.ranks - 1 - rank))
    tape.write("I0 W0 F1 I1 W1", above - 1)
    tape.write("I0 I1", rank)  # W is held back as in ZB-H1: others wait for I
    tape.write("I0 W0", above)
    tape.finish(1)
    tape.finish(0)


def dualpipe_v(tape: ScheduleBuilder) -> None:
    """Two stages per rank in a V; at most 2p + 1 activations of a chunk. Made for m >= 2p."""
    above = tape.ranks - tape.rank - 1
    full = max(tape.microbatches, 2 * tape.ranks)  # the pattern needs as many; the tape omits the rest
    tape.write("F0", 2 * above)
    tape.write("F0 F1", tape.rank + 1)
    tape.write("I1 W1 F1", above)
    tape.write("F0 B1 F1 B0", full - 2 * tape.ranks + tape.rank + 1)
    tape.write("B1 F1 B0", above)
    # The last backwards: whole ones for the first half, then I alone, and their pending W at the end.
    whole, odd = divmod(tape.rank + 1, 2)
    tape.write("B1 B0", whole)
    tape.write("B1 I0", odd)
    tape.write("I1 I0", tape.rank + 1 - whole - odd)
    tape.write("W I0", above)
    tape.write("W", tape.rank + 1)
