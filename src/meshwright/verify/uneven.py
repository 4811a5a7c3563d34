"""Uneven numbers of targets in the batches of `meshwright verify`.

Packed samples have a target at each token, so a mean over ranks or microbatches of their own means is right
by luck. With other numbers of targets in each sample, and none in some ranks and microbatches, it is wrong.
A factor of one over their number that is rounded to a half format is off by more with some numbers than with
others: so these numbers are chosen.
"""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from meshwright.data.loader import Batch
from meshwright.data.permutation import hash64
from meshwright.parallel.precision import formats
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
    its first; in step `EMPTY_STEP` the `empty_slots` lose all. Where the run computes in a half format, more
    are dropped, evenly, until their number is that of `_hard_to_round`. Which ones depends on the step, the
    slots and the tokens' places only, so a part of a batch loses the targets that it loses in the whole.
    """
    spec = spec.at_step(step)
    # The slots of a broken loader may be beyond the batch: that is told where samples are compared.
    kept = np.take(_kept(step, spec), batch.slots.numpy(), axis=0, mode="wrap")
    return replace(batch, targets=batch.targets.masked_fill(torch.from_numpy(~kept), _NOT_PREDICTED))


def _kept(step: int, spec: RunSpec) -> NDArray[np.bool_]:
    """Return which targets of the whole batch are left in a step, by slot and place."""
    slots, places = np.arange(spec.batch_sequences)[:, None], np.arange(spec.data.seq_len)
    share = MOST_DROPPED * (hash64(step, _SHARE, slots) / 2.0**64) * (step > 1)
    kept = (hash64(step, _TARGET, slots, places) / 2.0**64 >= share) | (places == 0)
    if step == EMPTY_STEP:
        kept[empty_slots(spec)] = False
    compute = formats(spec.precision).compute
    left = int(kept.sum())
    if compute.itemsize == 2 and spec.data.pack and left:
        order = kept.cumsum().reshape(kept.shape)
        surplus = left - _hard_to_round(left, compute, spec.model.vocab_size if step % 2 else None)
        kept &= order * surplus % left >= surplus
    return kept


def _hard_to_round(most: int, compute: torch.dtype, vocabulary: int | None) -> int:
    """Return the number n of targets, above `most` / 2, for which rounding 1/n to a format errs most.

    So a factor that is rounded is as far off as it can be. With a `vocabulary` V it is (1 - p)/n instead, the
    logits' gradients at targets whose probability p is about 1/V, as before any training; their mean counts.
    """
    counts = torch.arange(most, most // 2, -1, dtype=torch.float64)
    likely = torch.linspace(0.7, 1.3, 7, dtype=torch.float64) / vocabulary if vocabulary else torch.zeros(1)
    exact = torch.frexp((1 - likely) / counts[:, None]).mantissa  # fp16's loss scale keeps small ones normal
    errors = (exact.to(compute).double() / exact - 1).mean(1)
    return int(counts[errors.abs().argmax()])


def empty_slots(spec: RunSpec) -> list[int]:
    """Return the slots that have no target at all in step `EMPTY_STEP`, a part of them only.

    They are those of a whole data rank, where there are several, and those of a microbatch of another rank
    (or of the only one), where a rank has several microbatches. The numbers of ranks and microbatches choose
    these. Layouts with equal empty slots have equal batches.
    """
    spec = spec.at_step(EMPTY_STEP)
    ranks, sequences, micros = spec.layout.data_ranks, spec.rank_sequences, spec.microbatches
    draw = random.Random(f"{ranks} ranks of {micros} microbatches")
    order = draw.sample(range(ranks), ranks)
    empty = list(range(order[0] * sequences, (order[0] + 1) * sequences)) if ranks > 1 else []
    if micros > 1:
        first = order[-1] * sequences + draw.randrange(micros) * spec.micro_batch
        empty += range(first, first + spec.micro_batch)
    return empty
