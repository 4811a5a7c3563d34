"""How unevenly a router deals tokens to ranks, and how long the busiest rank makes the others wait.

Each layer and microbatch waits for the rank with the most rows. The loads of the E experts, over their mean,
are taken to be independent and normal but for their sum, which is fixed. Of N ranks with n = E / N experts
each, that get R rows each in the mean, the busiest is expected to get 1 + m(N) sqrt(s^2 / n + c) times as
many:

    m(N)    the largest of N standard normal numbers, Blom's approximation (Blom 1958)
    s       spread of how popular experts are: v / m(64) where the busiest expert of a published model of
            64 gets 1 + v times the mean of the tokens of a validation set
    c       chance: (E - k) / ((E - 1) R) for tokens that choose k experts each at random, independently

Ranks grow apart with their number and with fewer experts each, and c with fewer tokens in a microbatch.
Tokens of one sequence choose experts that are related, which c leaves out.

Seconds are those of c alone, without which the errors on published runs that were left out of the fit grow:
with c 13.6% in the mean of 47 runs with experts, without it 14.2%. Their routers are told to choose at random
(Megatron-Core's moe_router_force_load_balancing), so that they say nothing of s, which is told beside a plan.
"""

from __future__ import annotations

from math import sqrt
from statistics import NormalDist

from meshwright.planner.traffic.layer_shape import expert_room, routed_tokens
from meshwright.spec import RunSpec

VIOLATIONS = (0.04, 0.72)
"""Tokens of the busiest expert over the mean, less 1: balanced by biases, and by an auxiliary loss. Source:
Wang et al. 2024 (arXiv 2408.15664), table 2, MaxVio of models of 1 billion parameters over their validation
sets."""
_MEASURED = 64
"""Experts of a layer of these models. Source: assumed, as in DeepSeekMoE (Dai et al. 2024), whose kind they
are."""


def busiest(spec: RunSpec, violation: float) -> float:
    """Rows of the busiest of the run's expert ranks over the mean, as expected of a layer and microbatch.

    `violation` is that of a whole validation set: 0 for experts that are equally popular. Capacity limits it,
    and that a token sends one copy to an expert at most.
    """
    moe, ranks = spec.model.moe, spec.layout.ep
    if moe is None or ranks == 1:
        return 1.0
    here, rows = moe.experts // ranks, routed_tokens(spec) * moe.top_k * spec.layout.etp
    popularity = (violation / _largest(_MEASURED)) ** 2 / here
    chance = (moe.experts - moe.top_k) / (moe.experts - 1) / rows
    most = min(ranks * min(moe.top_k, here) / moe.top_k, max(1.0, expert_room(spec, moe)))
    return min(most, 1 + _largest(ranks) * sqrt(popularity + chance))


def _largest(count: int) -> float:
    """The expected largest of `count` standard normal numbers."""
    return NormalDist().inv_cdf((count - 0.375) / (count + 0.25))
