"""Least bytes that a rank of this program holds: sums of a few products, by which the search drops layouts.

They are never above the exact count (`planner/memory/exact.py`), and mostly near it. States are exact but for
padding and for parameters that every rank holds in few, such as the last norm. Activations are those that the
formulas of `planner/activations.py` give for a block of each kind. In a pipeline
gradients wait whole for the last microbatch, and those of all stages of a rank at once where no stage ends
before another begins. Without a pipeline a rank's bytes are those of the fullest of three moments: the head's
forward, the last block's backward, and the end of the step.
"""

from __future__ import annotations

from typing import NamedTuple

from meshwright.planner.activations import Activations, activations, movable
from meshwright.planner.activations_head import head_peaks
from meshwright.planner.activations_sizes import Sizes
from meshwright.planner.cost.layer import LayerCost
from meshwright.planner.cost.model import CostModel
from meshwright.planner.cost.stages import Contents, stored
from meshwright.planner.memory.generic import Generic, Memory
from meshwright.planner.memory.in_flight import weight_gradient_inputs
from meshwright.planner.rank_view import moment_width, saved_by_a_base, sum_width, widths
from meshwright.planner.traffic import exchange
from meshwright.spec import RunSpec
from meshwright.spec.layers import LayerKind


class _MicrobatchBytes(NamedTuple):
    """Bytes of one microbatch under one kind of schedule."""

    all: Activations
    block: dict[LayerKind, int]
    """Bytes that a block of each kind keeps, wherever that is."""
    movable: dict[LayerKind, int]
    """Bytes of these that are in the host's memory, in all blocks of a stage but its last."""
    deferred: dict[LayerKind, int]
    """Bytes that the deferred weight gradients of a block of each kind need."""
    at_head: int
    """Peak beyond kept activations in the head's forward."""


def _before_head(blocks: LayerCost, held: Contents) -> list[tuple[int, LayerKind]]:
    """(number of blocks that have a backward, their kind), without layers that predict further tokens, whose
    bytes are the head's."""
    model = blocks.spec.model
    beyond = [model.kind_of(layer) for layer in model.mtp_layers] if held.head else []
    counted = ((count - beyond.count(kind), kind) for count, kind in held.backward(blocks.kinds))
    return [(count, kind) for count, kind in counted if count > 0]


def _joined_ends(blocks: LayerCost, held: Contents) -> float:
    """Elements of the embedding and the head where one rank has both as one unit."""
    model = blocks.spec.model
    joined = model.head_embeds and held.embed and held.head
    return blocks.largest_unit * (1 if model.tied else 2) if joined else 0.0


class LowerBound(Generic):
    """Bytes that layouts of this program need at least on a cost model's devices."""

    def __init__(self, costs: CostModel) -> None:
        super().__init__(costs)
        self._known: dict[tuple[LayerCost, bool], _MicrobatchBytes] = {}

    def _of_microbatch(self, blocks: LayerCost, split: bool) -> _MicrobatchBytes:
        """Bytes of a microbatch; `split` is true for schedules that split backwards."""
        key = blocks, split
        if key not in self._known:
            schedule = "zb-h1" if split else "1f1b"
            layout = blocks.spec.layout.model_copy(update={"schedule": schedule})
            offloads = blocks.spec.train.offload_activations != "none"
            train = blocks.spec.train.model_copy(update={"offload_activations": "none"})
            spec = blocks.spec.model_copy(update={"layout": layout, "train": train})
            on_cpu = self.costs.cluster.device.kind == "cpu"
            sizes, kept = Sizes(spec, on_cpu), activations(spec, on_cpu)
            kinds = sizes.kinds.items()
            self._known[key] = _MicrobatchBytes(
                kept,
                {kind: kept.by_block[layer] for kind, layer in kinds},
                {kind: movable(sizes, layer) if offloads else 0 for kind, layer in kinds},
                {kind: weight_gradient_inputs(sizes, layer) if split else 0 for kind, layer in kinds},
                head_peaks(sizes, on_cpu)[0],
            )
        return self._known[key]

    def kept(self, blocks: LayerCost, held: Contents, split: bool | None = None) -> float:
        """Bytes that a stage keeps of one microbatch; the least of any schedule if `split` is None."""
        each = self._of_microbatch(blocks, split is not False and blocks.spec.layout.pp > 1)
        kinds = _before_head(blocks, held)
        whole = each.all.shared_by([kind for _, kind in kinds])
        whole += (each.all.embed if held.embed else 0) + (each.all.head if held.head else 0)
        whole += min((each.movable[kind] for _, kind in kinds), default=0)  # the last block's stay
        return whole + sum(count * (each.block[kind] - each.movable[kind]) for count, kind in kinds)

    def deferred(self, blocks: LayerCost, held: Contents) -> float:
        """Bytes that a stage keeps of one microbatch whose weight gradients alone are left."""
        each = self._of_microbatch(blocks, True)
        return sum(count * each.deferred[kind] for count, kind in held.backward(blocks.kinds))

    def resident(self, spec: RunSpec, blocks: LayerCost, held: Contents, met: bool = True) -> Memory:
        """Bytes of a rank that holds `held`; in a pipeline, without activations that its schedule holds."""
        each = self._of_microbatch(blocks, False)
        head = each.all.head if held.head else 0
        if spec.layout.pp > 1:
            # A schedule that splits backwards may need less in a block: its products add gradients.
            in_block = min(self._of_microbatch(blocks, split).all.in_block for split in (False, True))
            block = in_block - head if held.blocks and held.trained is None else 0
            kept = float(max(each.all.at_head if held.head else 0, block, 0))
        else:
            # With two microbatches, ZeRO-1 frees the head's gradients before any others of a block are whole.
            block = 0 if spec.layout.zero == 1 and spec.microbatches == 2 else each.all.in_block - head
            block = block if held.trained is None else 0
            kept = self.kept(blocks, held, False) + each.all.plans + max(each.at_head, block)
        return self._count(spec, blocks, held, kept, met)

    def lower_bound(self, spec: RunSpec, blocks: LayerCost, model: Contents) -> Memory:
        """Bytes that the fullest rank needs at least, however stages are cut; `model` is the whole model."""
        pp, count = spec.layout.pp, spec.microbatches
        if pp == 1:
            return self.resident(spec, blocks, model)
        kept = self.kept(blocks, model) / pp
        apart = kept * count if count >= 2 * pp else kept  # schedules that hold all microbatches
        bounds = (self._count(spec, blocks, model, *each, pp) for each in ((kept, True), (apart, False)))
        return min(bounds, key=lambda memory: memory.allocated)

    def least_states(self, spec: RunSpec, blocks: LayerCost, model: Contents) -> Memory:
        """`lower_bound` without activations."""
        pp = spec.layout.pp
        bounds = (self._count(spec, blocks, model, 0.0, met, pp) for met in (True, False))
        return min(bounds, key=lambda memory: memory.allocated)

    def _count(
        self, spec: RunSpec, blocks: LayerCost, held: Contents, kept: float, met: bool, shares: int = 1
    ) -> Memory:
        """Bytes of a rank that holds 1 / `shares` of `held`, and `kept` bytes of activations.

        `met` is true if gradients of all stages wait at one time.
        """
        width, layout, elements = widths(spec), spec.layout, stored(blocks, held)
        several, zero = spec.microbatches > 1, layout.zero
        ranks = (layout.shard_ranks, layout.expert_data_ranks) if zero else (1, 1)
        waits = met and several and (zero < 2 or layout.pp > 1)
        packed = sum_width(spec)
        parameters = optimiser = buffers = 0.0
        during = after = 0.0
        """Gradients while a last microbatch's activations are there, and at the end of the step."""
        frozen = elements.frozen / shares, elements.frozen_routed / shares
        saved = elements.quantised * saved_by_a_base(spec) / shares, 0.0
        every = elements.trained.dense / shares, elements.trained.routed / shares
        for whole, still, narrower, n in zip(every, frozen, saved, ranks, strict=True):
            part = whole / n
            parameters += (still * width.compute - narrower) / (n if layout.shards(False) else 1)
            if spec.train.offload == "none":
                optimiser += moment_width(spec) * part
            optimiser += part * width.exact if spec.train.ema is not None else 0
            optimiser += exchange.shared_numbers(spec) * part * width.exact
            parameters += part * width.master
            if zero < 3 and not (n == 1 and width.compute == width.master):
                parameters += whole * width.compute
            if n == 1:
                during += whole * packed if several else 0.0
                after += whole * (packed if packed == width.exact else packed + width.exact)
                continue
            during += whole * packed if waits else part * width.exact if several else 0.0
            after += part * width.exact
            if zero == 3 and layout.pp > 1:
                buffers += (whole + still) * width.compute
        if layout.pp > 1 and not several and ranks[0] == 1 and packed != width.exact:
            after -= _joined_ends(blocks, held) / shares * packed  # two stages add up theirs exactly at once
        if zero == 1 and layout.pp > 1 and ranks[0] > 1 and held.trained is None:
            units = [blocks.largest_unit] if held.embed or held.head else []
            units += [blocks.held(kind)[0] for _, kind in held.by_kind(blocks.kinds)]
            gathered = max(units, default=0) if shares == 1 else min(units)
            buffers += gathered * width.compute
        if layout.pp == 1 and during + kept < after:
            during, kept = after, 0.0
        gradients = during if layout.pp == 1 else max(during, after)
        return self.on_device(layout, 0, (parameters, gradients, optimiser, kept, 0.0, buffers))
