"""Uneven numbers of targets in the batches of `meshwright verify`.

Packed samples have a target at each token, so a mean over ranks or microbatches of their own means is right
by luck. With other numbers of targets in each sample, and none in some ranks and microbatches, it is wrong.
"""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import torch

from meshwright.data.loader import Batch
from meshwright.data.permutation import hash64
from meshwright.spec import RunSpec

MOST_DROPPED = 0.9
"""Share of a sample's targets that is dropped at most, unless all of them are."""

EMPTY_STEP = 2
"""The step in which some slots lose all targets."""

_SHARE, _TARGET = 1, 2  # streams of hashes
_NOT_PREDICTED = -100


def thin(batch: Batch, step: int, spec: RunSpec) -> Batch:
    """Return the batch of step `step` (from 1), whole or a rank's part, without some of its targets.

    The first step keeps all. In others a slot loses between none and `MOST_DROPPED` of its targets, and never
    its first; in step `EMPTY_STEP` the `empty_slots` lose all. Which ones depends on the step, the slots and
    the tokens' places only, so a part of a batch loses the targets that it loses in the whole.
    """
    if step == 1:
        return batch
    slots = batch.slots.numpy()
    places = np.arange(batch.targets.shape[1])
    share = MOST_DROPPED * (hash64(step, _SHARE, slots) / 2.0**64)
    drawn = hash64(step, _TARGET, slots[:, None], places) / 2.0**64
    dropped = (drawn < share[:, None]) & (places > 0)
    if step == EMPTY_STEP:
        dropped |= np.isin(slots, empty_slots(spec))[:, None]
    return replace(batch, targets=batch.targets.masked_fill(torch.from_numpy(dropped), _NOT_PREDICTED))


def empty_slots(spec: RunSpec) -> list[int]:
    """Return the slots that have no target at all in step `EMPTY_STEP`, a part of them only.

    They are those of a whole data rank, where there are several, and those of a microbatch of another rank
    (or of the only one), where a rank has several microbatches. The numbers of ranks and microbatches choose
    these. Layouts with equal empty slots have equal batches.
    """
    ranks, sequences, micros = spec.layout.data_ranks, spec.rank_sequences, spec.microbatches
    draw = random.Random(f"{ranks} ranks of {micros} microbatches")
    order = draw.sample(range(ranks), ranks)
    empty = list(range(order[0] * sequences, (order[0] + 1) * sequences)) if ranks > 1 else []
    if micros > 1:
        first = order[-1] * sequences + draw.randrange(micros) * spec.micro_batch
        empty += range(first, first + spec.micro_batch)
    return empty
