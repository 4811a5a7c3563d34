"""DualPipeV: DualPipe (DeepSeek-AI 2024, V3 §3.2.1) cut in half (Qi et al. 2025), two chunks a rank in a V.

DualPipe runs the two directions of a pipeline at once, to compute one microbatch's forward while another's
backward waits for its links and the reverse. Its second half mirrors the first, so one half, folded into a V,
does the same without the second copy of the parameters. Where DualPipe overlaps a forward with a backward,
the list has them side by side: F0 B1, F1 B0.
"""

from __future__ import annotations

from meshwright.schedule.actions import Action, Lists
from meshwright.schedule.builder import ScheduleBuilder


def dualpipe_v(ranks: int, microbatches: int) -> Lists:
    """At most 2p + 1 activations of a chunk, half a rank's layers each. Made for m >= 2p."""
    return [_rank(rank, ranks, microbatches) for rank in range(ranks)]


def _rank(rank: int, ranks: int, microbatches: int) -> list[Action]:
    above = ranks - rank - 1
    full = max(microbatches, 2 * ranks)  # the pattern needs as many; the tape leaves out what is not there
    tape = ScheduleBuilder([rank, 2 * ranks - 1 - rank], microbatches)
    tape.write("F0", 2 * above)
    tape.write("F0 F1", rank + 1)
    tape.write("I1 W1 F1", above)
    tape.write("F0 B1 F1 B0", full - 2 * ranks + rank + 1)
    tape.write("B1 F1 B0", above)
    # The last backwards: whole ones for the first half, then I alone, and the W that these owe at the end.
    whole, odd = divmod(rank + 1, 2)
    tape.write("B1 B0", whole)
    if odd:
        tape.write("B1 I0")
    tape.write("I1 I0", rank + 1 - whole - odd)
    tape.write("W I0", above)
    tape.write("W", rank + 1)
    return tape.actions
