"""Which whole documents share a sample: best-fit decreasing (Johnson 1973, "Near-optimal bin packing
algorithms").

It needs at most 11/9 of the least possible number of samples, and 6/9 of one more (Dosa 2007). Truncation is
what it spares: documents that are joined and cut lose their beginnings (Ding et al. 2024, "Fewer truncations
improve language modeling").
"""

from __future__ import annotations

import numpy as np

from meshwright.data.permutation import I64


def best_fit(lengths: I64, size: int) -> tuple[I64, I64]:
    """Pack documents of 1 to `size` tokens into samples of `size`.

    Returns the documents' numbers in the order of the samples, and where each sample begins in it, (samples +
    1,). Documents are taken by falling length, of equal ones the first first; each goes to the sample with
    the least room that takes it, of equal ones to the one that was changed last, or to a new one.
    """
    falling = np.argsort(-lengths, kind="stable")
    with_room: list[list[int]] = [[] for _ in range(size + 1)]
    rooms = 0
    """Bit r is set where `with_room[r]` has a sample: so the least room that suffices is found at once."""
    chosen: I64 = np.empty(len(lengths), dtype=np.int64)
    samples = 0
    for document, length in zip(falling.tolist(), lengths[falling].tolist(), strict=True):
        room = size
        if fits := rooms >> length:
            room = length + (fits & -fits).bit_length() - 1
            chosen[document] = with_room[room].pop()
            if not with_room[room]:
                rooms ^= 1 << room
        else:
            chosen[document] = samples
            samples += 1
        if left := room - length:
            with_room[left].append(int(chosen[document]))
            rooms |= 1 << left
    order = falling[np.argsort(chosen[falling], kind="stable")]
    first = np.concatenate([[0], np.cumsum(np.bincount(chosen, minlength=samples))])
    return order, first.astype(np.int64)
