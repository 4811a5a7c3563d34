"""One forward, one backward: 1F1B (Narayanan et al. 2019, 2021) and its interleaved form (2021).

After a warm-up of forwards each rank takes turns, so that it holds the activations of p - r microbatches
rather than of all. 1F1B with a flush at the end of a step is PipeDream-Flush (Narayanan et al. 2021,
memory-efficient pipeline-parallel training), and what Megatron-LM calls non-interleaved.
"""

from __future__ import annotations

from itertools import chain, pairwise

from meshwright.schedule.actions import Action, Kind, Lists
from meshwright.schedule.builder import ScheduleBuilder


def one_f_one_b(ranks: int, microbatches: int) -> Lists:
    """One stage a rank; rank r warms up with p - r - 1 forwards."""
    lists = []
    for rank in range(ranks):
        warm = min(microbatches, ranks - rank - 1)
        tape = ScheduleBuilder([rank], microbatches)
        tape.write("F0", warm)
        tape.write("F0 B0", microbatches - warm)
        tape.write("B0", warm)
        lists.append(tape.actions)
    return lists


def interleaved(ranks: int, virtual: int, microbatches: int) -> Lists:
    """v stages a rank; a round of microbatches passes through all of them before the next round begins.

    Narayanan et al. (2021) take rounds of p microbatches and so need m to be a multiple of p. Here the
    microbatches are dealt to max(1, m // p) rounds as evenly as can be, the larger ones first, so that any m
    works; where m is a multiple of p the lists are the published ones. v=1 is 1F1B.
    """
    if virtual == 1:
        return one_f_one_b(ranks, microbatches)
    order = list(_rounds(ranks, microbatches))
    down = [(chunk, i) for each in order for chunk in range(virtual) for i in each]
    up = [(virtual - 1 - chunk, i) for chunk, i in down]
    lists = []
    for rank in range(ranks):
        forward = [Action(Kind.F, chunk * ranks + rank, i) for chunk, i in down]
        backward = [Action(Kind.B, chunk * ranks + rank, i) for chunk, i in up]
        # Until a round's first microbatch is in the last chunk, and the way down to rank p - 1 and back.
        warm = min(len(down), (virtual - 1) * len(order[0]) + 2 * (ranks - 1 - rank))
        pairs = zip(forward[warm:], backward, strict=False)
        lists.append(forward[:warm] + list(chain(*pairs)) + backward[len(down) - warm :])
    return lists


def _rounds(ranks: int, microbatches: int) -> list[range]:
    """The microbatches of each round: at least p, where there are as many."""
    rounds = max(1, microbatches // ranks)
    size, larger = divmod(microbatches, rounds)
    starts = [i * size + min(i, larger) for i in range(rounds + 1)]
    return [range(start, stop) for start, stop in pairwise(starts)]
