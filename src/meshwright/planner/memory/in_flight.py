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

from collections.abc import Callable
from functools import cache
from operator import mul

from meshwright.planner.activations import Activations, activations, of_experts
from meshwright.planner.activations_lora import adapters_deferred, adapts_experts
from meshwright.planner.activations_moe import routed_deferred, routed_everything, routed_saved
from meshwright.planner.activations_sizes import Sizes
from meshwright.planner.rank_view import RankView, place_of, training_of
from meshwright.schedule.in_flight import most_in_flight
from meshwright.spec import MoeSpec, RunSpec
from meshwright.spec.layers import LayerKind
from meshwright.spec.stages import Stage


def peak_activations(
    spec: RunSpec, pipeline_rank: int = 0, kept: Activations | None = None, cpu: bool = True
) -> int:
    """Peak bytes that a pipeline rank keeps between two of its actions, on a CPU or on another device.

    `kept` is what one microbatch keeps, if that is known already.
    """
    return peaks_of_ranks(spec, kept or activations(spec, cpu), cpu)(place_of(spec, pipeline_rank))


def peaks_of_ranks(spec: RunSpec, kept: Activations, cpu: bool) -> Callable[[RankView], int]:
    """The function that gives `peak_activations` of each rank of a run's pipeline."""
    sizes, model = Sizes(spec, cpu), spec.model

    @cache
    def of_kind(kind: LayerKind) -> int:
        return weight_gradient_inputs(sizes, model.last_layers[kind])

    def deferred(stage: Stage) -> int:
        trained = (layer for layer in stage.layers if training_of(spec, layer).feed_forward)
        return sum(of_kind(model.kind_of(layer)) for layer in trained)

    return lambda view: _most(view, kept.of, deferred, kept.plans_of(view.own))


def host_activations(spec: RunSpec, pipeline_rank: int = 0) -> int:
    """Peak bytes of activations that a pipeline rank has in the host's memory between two of its actions."""
    return _most(place_of(spec, pipeline_rank), activations(spec).moved_of, lambda _stage: 0)


def expert_activations(spec: RunSpec, pipeline_rank: int = 0) -> int:
    """Bytes of a rank's `peak_activations` that are of its routed experts, with an even router."""
    sizes, kept = Sizes(spec), routed_everything if spec.recompute.policy == "none" else routed_saved

    def of(count: Callable[[RunSpec, MoeSpec], int]) -> Callable[[Stage], int]:
        return lambda stage: sum(of_experts(sizes, layer, count) for layer in stage.layers)

    def stays(stage: Stage) -> int:
        return sum(of_experts(sizes, layer, kept) for layer in stage.blocks[-1:])

    offloads = spec.train.offload_activations != "none"
    return _most(place_of(spec, pipeline_rank), stays if offloads else of(kept), of(routed_deferred))


def _most(
    view: RankView,
    whole: Callable[[Stage], int],
    deferred: Callable[[Stage], int],
    once: int = 0,
) -> int:
    """Most bytes of a rank, for those that one microbatch keeps in a stage, and those of a deferred half.

    `once` is kept as long as any microbatch is in flight in a stage with blocks.
    """
    spec, own = view.spec, view.own
    halves = [deferred(stage) if spec.layout.splits_backward else 0 for stage in own]
    flight = most_in_flight(spec.layout, spec.microbatches, (view.rank,))
    if not once:
        return int(flight.most([*map(whole, own)], halves))
    sizes, blocks = [*map(whole, own), *halves], [bool(stage.blocks) for stage in own] * 2
    return max(
        sum(map(mul, moment, sizes)) + once * any(map(mul, moment, blocks)) for moment in flight.by_stage
    )


def weight_gradient_inputs(s: Sizes, layer: int) -> int:
    """Bytes that a block's deferred weight gradients need; in low precision rounded, but for inputs that
    tensor ranks gather."""
    routed = of_experts(s, layer, routed_deferred)
    if s.spec.lora is not None:  # frozen weights need nothing
        return adapters_deferred(s, layer) + (routed if adapts_experts(s, layer) else 0)
    model, found, inputs = s.spec.model, s.queries + s.whole + s.out, s.stream
    if (mla := model.mla) is None:
        found += s.keys + s.values
    else:
        inputs += s.own * ((mla.q_rank or 0) + mla.kv_rank)
        found += s.own * ((mla.q_rank or 0) + mla.kv_rank + mla.rope_dim)
        found += s.tokens * s.heads * (model.head_dim - mla.rope_dim + mla.v_dim)
    if s.channels(layer):
        inputs += s.stream
        found += (s.gates + 1) * s.inner(layer) + s.whole
    plain, width = s.width.compute, s.width.compute if s.rounded is None else s.rounded
    return round(width * found + (plain if s.gathers else width) * inputs) + routed
