"""How unevenly a router may deal tokens to ranks. Costs and bytes are those of an even one, unless told.

Of n experts on each of N ranks, of E in all, the loads are taken to be independent and normal: the largest of
N means lies as far above the mean as that of E experts, times sqrt(ln N / ln E / n).
"""

from __future__ import annotations

from math import log, sqrt

from meshwright.spec import MoeSpec

VIOLATIONS = (0.04, 0.72)
"""Tokens of the busiest expert over the mean, less 1: balanced by biases, and by an auxiliary loss. Source:
Wang et al. 2024 (arXiv 2408.15664), table 2, models of 1 billion parameters over their validation sets."""


def busiest(moe: MoeSpec, ranks: int) -> tuple[float, float]:
    """Rows of the busiest of `ranks` expert ranks over the mean: in the best routing published, and in usual
    one. Capacity limits both.
    """
    if ranks == 1:
        return 1.0, 1.0
    share = sqrt(log(ranks) / log(moe.experts) / (moe.experts // ranks))
    most = max(1.0, moe.capacity_factor or moe.experts)
    low, high = (min(most, 1 + each * share) for each in VIOLATIONS)
    return low, high
