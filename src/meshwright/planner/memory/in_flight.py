"""Bytes of activations that a rank of a pipeline keeps for all microbatches that it has under way.

A microbatch's count from the end of its forward in a stage to the end of its backward there. Where a schedule
splits the backward, the first half frees them and leaves what the weight gradients need: for each linear map
its input and the gradient of its output (Qi et al. 2023). For N tokens of D channels, n tokens on the rank
between the layers (N/tp where sequences are sharded), Q, K and V channels of queries, keys and values, A of
attention's output, F of the feed-forward layer on this rank:

    attention       n D + N (Q + K + V) + N (A + D)
    feed-forward    n D + 2 N F + N (F + D)             N F for 2 N F where the layer is not gated
"""

from __future__ import annotations

from itertools import accumulate

from meshwright.planner.memory.activations import Activations, Sizes, activations, of_experts
from meshwright.planner.memory.activations_moe import routed_deferred
from meshwright.planner.rank_view import place_of
from meshwright.spec import RunSpec
from meshwright.spec.layout import SPLIT


def peak_activations(spec: RunSpec, pipeline_rank: int = 0, kept: Activations | None = None) -> int:
    """Peak bytes that a pipeline rank keeps between two of its actions.

    `kept` is what one microbatch keeps, if that is known already.
    """
    view, kept, sizes = place_of(spec, pipeline_rank), kept or activations(spec), Sizes(spec)
    splits = spec.layout.pp > 1 and spec.layout.schedule in SPLIT
    change = {}
    """Stage -> change in held bytes after an action of each kind: F, I, W, B."""
    for stage in view.own:
        whole = kept.of(stage)
        deferred = sum(weight_gradient_inputs(sizes, layer) for layer in stage.blocks) if splits else 0
        change[stage.index] = whole, deferred - whole, -deferred, -whole
    return max(accumulate(change[stage][kind] for kind, stage, _ in view.schedule.actions[pipeline_rank]))


def weight_gradient_inputs(s: Sizes, layer: int) -> int:
    """Bytes that a block's deferred weight gradients need."""
    model, found = s.spec.model, s.stream + s.queries + s.whole + s.out
    if (mla := model.mla) is None:
        found += s.keys + s.values
    else:
        found += s.own * (2 * (mla.q_rank or 0) + 2 * mla.kv_rank + mla.rope_dim)
        found += s.tokens * s.heads * (model.head_dim - mla.rope_dim + mla.v_dim)
    if s.channels(layer):
        found += s.stream + (s.gates + 1) * s.inner(layer) + s.whole
    return s.width.compute * found + of_experts(s, layer, routed_deferred)
