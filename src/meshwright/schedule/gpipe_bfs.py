"""All forwards, then all backwards: GPipe (Huang et al. 2019) and breadth-first (Lamy-Poirier 2023).

Every rank holds the activations of all m microbatches in all its stages. In return a stage's work lies in one
piece, so that with ZeRO-3 its parameters are gathered once for all microbatches.
"""

from __future__ import annotations

from meshwright.schedule.actions import Action, Kind, Lists
from meshwright.schedule.builder import ScheduleBuilder


def gpipe(ranks: int, microbatches: int) -> Lists:
    """One stage a rank; backwards in the order of the forwards."""
    lists = []
    for rank in range(ranks):
        tape = ScheduleBuilder([rank], microbatches)
        tape.write("F0", microbatches)
        tape.write("B0", microbatches)
        lists.append(tape.actions)
    return lists


def breadth_first(ranks: int, virtual: int, microbatches: int) -> Lists:
    """Each stage of the rank takes all microbatches before the next stage begins.

    Backwards go in the opposite order, newest activations first, so v=1 is `gpipe` but for that.
    """
    down = [(stage, microbatch) for stage in range(virtual) for microbatch in range(microbatches)]
    return [
        [Action(Kind.F, chunk * ranks + rank, microbatch) for chunk, microbatch in down]
        + [Action(Kind.B, chunk * ranks + rank, microbatch) for chunk, microbatch in reversed(down)]
        for rank in range(ranks)
    ]
