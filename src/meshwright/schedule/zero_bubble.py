"""ZB-H1 and ZB-H2: 1F1B with the backward split, so that weight-backwards fill the bubble (Qi et al. 2023).

These are the hand-made schedules of that paper, written as one rule with two numbers. A rank warms up with
`warm` forwards, then repeats I, W, F. Beside each of its last `held` forwards it holds the W back, so that
these I leave in quick succession for the ranks before it, which have no forward left to do; the W held back
are its work while those finish.
"""

from __future__ import annotations

from meshwright.schedule.actions import Action, Lists
from meshwright.schedule.builder import ScheduleBuilder


def zb_h1(ranks: int, microbatches: int) -> Lists:
    """No rank holds more than p activations, as rank 0 of 1F1B; a third of its bubble where F = I = W.

    The bubble of a step is (p - 1)(F + I - W) seconds, where I >= W.
    """
    return [_rank(rank, microbatches, warm=ranks - rank, held=rank) for rank in range(ranks)]


def zb_h2(ranks: int, microbatches: int) -> Lists:
    """Up to 2p - 1 activations on every rank; no bubble at all where F = I = W and m >= 2p - 1.

    That is: each rank computes from its first action to its last without a pause. It begins r forwards after
    rank 0 and ends as much later, so the optimiser must not wait for all ranks (Qi et al. 2023, §4); where it
    does, the p - 1 forwards of the slant are idle time again.
    """
    return [_rank(rank, microbatches, warm=2 * (ranks - rank) - 1, held=2 * rank) for rank in range(ranks)]


def _rank(rank: int, microbatches: int, warm: int, held: int) -> list[Action]:
    warm = min(warm, microbatches)
    left = microbatches - warm  # forwards after the warm-up
    tape = ScheduleBuilder([rank], microbatches)
    tape.write("F0", warm)
    tape.write("I0 W0 F0", left - held)
    tape.write("I0 F0", min(left, held))
    tape.write("I0 W0", warm)
    tape.finish(0)
    return tape.actions
