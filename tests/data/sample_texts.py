"""Text for the tests of data."""

from __future__ import annotations

import numpy as np

_LINE = "the quick brown fox jumps over a lazy dog; naïve ☃ 漢字 def return x_BTD == 42\n"
WORDS = [*_LINE.split(" "), "", "", "\n\n"]


def texts(documents: int, seed: int = 0) -> list[str]:
    """Documents of very different lengths: one word to some hundred."""
    rng = np.random.default_rng(seed)
    lengths = np.exp(rng.uniform(0, 6, documents)).astype(int) + 1
    return [f"{i} " + " ".join(rng.choice(WORDS, n)) for i, n in enumerate(lengths)]
