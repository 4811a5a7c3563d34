"""Whole documents are packed as the rule says, and close to as tightly as can be."""

from __future__ import annotations

import random

import numpy as np
import pytest
from trl.data_utils import pack_dataset

from meshwright.data.best_fit import best_fit


def plainly(lengths: list[int], size: int) -> list[list[int]]:
    """Documents by sample, by the same rule, looking at all samples for each document."""
    samples: list[list[int]] = []
    room: list[int] = []
    changed: list[int] = []
    for turn, document in enumerate(sorted(range(len(lengths)), key=lambda each: -lengths[each])):
        fits = [place for place, left in enumerate(room) if left >= lengths[document]]
        place = min(fits, key=lambda each: (room[each], -changed[each]), default=len(samples))
        if place == len(samples):
            samples.append([])
            room.append(size)
            changed.append(0)
        samples[place].append(document)
        room[place] -= lengths[document]
        changed[place] = turn
    return samples


def packed(lengths: list[int], size: int) -> list[list[int]]:
    order, first = best_fit(np.array(lengths, dtype=np.int64), size)
    return [part.tolist() for part in np.split(order, first[1:-1])]


@pytest.mark.parametrize("number", range(40))
def test_documents_are_packed_as_by_a_search_over_all_samples(number: int) -> None:
    draw = random.Random(number)
    size = draw.choice([1, 2, 7, 64, 200])
    lengths = [draw.randint(1, size) for _ in range(draw.randint(1, 120))]
    assert packed(lengths, size) == plainly(lengths, size)


def test_no_document_gives_no_sample() -> None:
    order, first = best_fit(np.array([], dtype=np.int64), 8)
    assert (order.tolist(), first.tolist()) == ([], [0])


def test_as_many_samples_as_trl_makes() -> None:
    """TRL's "bfd" is the same rule but for ties, so it needs as many samples."""
    datasets = pytest.importorskip("datasets")
    draw = random.Random(0)
    lengths = [int(32 * 1.2 ** draw.uniform(0, 12)) for _ in range(400)]
    rows = datasets.Dataset.from_dict({"input_ids": [list(range(length)) for length in lengths]})
    theirs = pack_dataset(rows, seq_length=512, strategy="bfd")
    assert len(packed([min(length, 512) for length in lengths], 512)) == len(theirs)
