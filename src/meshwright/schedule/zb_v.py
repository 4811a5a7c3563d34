"""ZB-V: zero bubble with the memory of 1F1B, by two chunks a rank in a V (Qi et al. 2023, §6; 2024, V-ZB).

Chunk 0 of rank r is stage r, chunk 1 is stage 2p - 1 - r. As the forward comes back to the rank that it left
from, the last backward of a microbatch starts where its first forward did, and every rank has a whole
backward to do soon.
"""

from __future__ import annotations

from meshwright.schedule.actions import Action, Lists
from meshwright.schedule.builder import ScheduleBuilder


def zb_v(ranks: int, microbatches: int) -> Lists:
    """At most 2p activations of a chunk, half a rank's layers each: as much memory as 1F1B's rank 0.

    Where F = I = W and m >= 2p - 1 each rank computes from its first action to its last without a pause, as
    with `zb_h2`.
    """
    return [_rank(rank, ranks, microbatches) for rank in range(ranks)]


def _rank(rank: int, ranks: int, microbatches: int) -> list[Action]:
    above = ranks - rank
    full = max(
        microbatches, 2 * ranks - 1
    )  # the pattern needs as many; the tape leaves out what is not there
    tape = ScheduleBuilder([rank, 2 * ranks - 1 - rank], microbatches)
    tape.write("F0", 2 * above - 1)  # until the first microbatch is back
    tape.write("F1 F0", rank)
    tape.write("F1 I1 W1", above)
    tape.write("F0 I0 W0 F1 I1 W1", full - (2 * ranks - 1 - rank))
    tape.write("I0 W0 F1 I1 W1", above - 1)
    tape.write("I0 I1", rank)  # W is held back as in ZB-H1: others wait for I
    tape.write("I0 W0", above)
    tape.finish(1)
    tape.finish(0)
    return tape.actions
