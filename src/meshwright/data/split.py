"""The validation split, by document and by content."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from meshwright.data.order import U64


def held_out(hashes: U64, fraction: float) -> NDArray[np.bool_]:
    """Which documents are held out for validation: those in the lowest `fraction` of content hashes.

    So the split depends on neither seed nor tokenizer, equal documents fall on the same side, and other
    documents do not move when some are added. A fraction above 0 of two documents or more holds out one at
    least, and leaves one at least; a single document is never held out.
    """
    out = np.zeros(len(hashes), dtype=np.bool_)
    if fraction <= 0 or len(hashes) < 2:
        return out
    out = hashes < np.uint64(min(int(fraction * 2.0**64), 2**64 - 1))
    if not out.any():
        out[np.argmin(hashes)] = True
    elif out.all():
        out[np.argmax(hashes)] = False
    return out
