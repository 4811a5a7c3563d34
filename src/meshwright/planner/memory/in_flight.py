"""Bytes of activations that a rank of a pipeline keeps for all microbatches that it has under way.

A microbatch's count from the end of its forward in a stage to the end of its backward there. Where a schedule
splits the backward, the first half frees them and leaves what the gradients of the weights need: for each
linear map its input and the gradient of its output (Qi et al. 2023). For N tokens of D channels, of which the
rank has n between the layers (N/tp where sequences are sharded), Q, K and V channels of queries, keys and
values, A of what attention gives, F of the feed-forward layer on this rank:

    attention       n D + N (Q + K + V) + N (A + D)
    feed-forward    n D + 2 N F + N (F + D)             N F for 2 N F where the layer is not gated
"""

from __future__ import annotations

from itertools import accumulate

from meshwright.planner.memory.activations import Activations, Sizes, activations, of_experts
from meshwright.planner.memory.activations_moe import routed_put_off
from meshwright.planner.rank_view import place_of
from meshwright.spec import RunSpec
from meshwright.spec.layout import SPLIT
from meshwright.spec.stages import Stage


def peak_activations(spec: RunSpec, pipeline_rank: int = 0, kept: Activations | None = None) -> int:
    """The most bytes that a rank of this place in the pipeline keeps between two of its actions.

    `kept` is what one microbatch keeps, where that is known already.
    """
    at, kept = place_of(spec, pipeline_rank), kept or activations(spec)
    splits = spec.layout.pp > 1 and spec.layout.schedule in SPLIT
    change = {
        stage.index: _changes(kept.of(stage), _put_off(spec, stage) if splits else 0) for stage in at.own
    }
    return max(accumulate(change[stage][kind] for kind, stage, _ in at.schedule.actions[pipeline_rank]))


def _changes(whole: int, put_off: int) -> tuple[int, int, int, int]:
    """What is held more after an action of each kind: F, I, W, B."""
    return whole, put_off - whole, -put_off, -whole


def _put_off(spec: RunSpec, stage: Stage) -> int:
    sizes = Sizes(spec)
    return sum(_of_block(sizes, layer) for layer in stage.blocks)


def _of_block(s: Sizes, layer: int) -> int:
    found = _of_attention(s) + s.whole + s.out
    if s.channels(layer):
        found += s.stream + (s.gates + 1) * s.inner(layer) + s.whole
    return s.width.compute * found + of_experts(s, layer, routed_put_off)


def _of_attention(s: Sizes) -> int:
    """Elements of the inputs of its maps but the last, and of their outputs' gradients."""
    model = s.spec.model
    if (mla := model.mla) is None:
        return s.stream + s.queries + s.keys + s.values
    latents = 2 * (mla.q_rank or 0) + 2 * mla.kv_rank + mla.rope_dim
    expanded = s.tokens * s.heads * (model.head_dim - mla.rope_dim + mla.v_dim)
    return s.stream + s.own * latents + s.queries + expanded
