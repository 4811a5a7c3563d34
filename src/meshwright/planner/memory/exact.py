"""Bytes of this program on the ranks of its pipeline: the formulas that dry runs are compared with.

Without a pipeline the step is followed in time, and the terms are those of its fullest moment
(`planner/memory/peak.py`). In a pipeline states are those of `planner/memory/states.py`, to the byte, and
activations those of `planner/memory/in_flight.py` for the schedule that runs, with buffers of units that are
gathered or reduced and the temporaries of the operators at the peak on top.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from meshwright.planner.activations import Activations, activations, backward_peaks
from meshwright.planner.activations_sizes import Sizes
from meshwright.planner.cost.model import CostModel
from meshwright.planner.memory.generic import Generic, Memory, held_microbatches
from meshwright.planner.memory.in_flight import peaks_of_ranks
from meshwright.planner.memory.lower_bound import LowerBound
from meshwright.planner.memory.peak import Moment, fullest_moment
from meshwright.planner.memory.states import StateShard, states_at, units
from meshwright.planner.rank_view import RankView, place_of, widths
from meshwright.spec import RunSpec


def memory_model(costs: CostModel) -> Generic:
    """The memory model of a software stack: exact for this program, generic for others."""
    return Exact(costs) if costs.stack.ours else Generic(costs)


class Exact(LowerBound):
    """Memory of this program, as dry runs count it."""

    def in_step(self, spec: RunSpec) -> list[Memory]:
        """Bytes of each rank of the pipeline in a step of `train.batch_tokens`."""
        short = shortened(spec)
        kept = activations(short, self.costs.cluster.device.kind == "cpu")
        flights = peaks_of_ranks(short, kept, self.costs.cluster.device.kind == "cpu")
        known: dict[object, list[StateShard]] = {}
        views = (place_of(short, rank) for rank in range(spec.layout.pp))
        return [self._rank(view, units(view, known), kept, flights) for view in views]

    def _rank(
        self,
        view: RankView,
        shards: Sequence[StateShard],
        kept: Activations,
        flights: Callable[[RankView], int],
    ) -> Memory:
        on_cpu = self.costs.cluster.device.kind == "cpu"
        held = states_at(view, shards, staged=not on_cpu)
        if view.spec.layout.pp == 1:
            moment = fullest_moment(view, shards, kept, on_cpu)
        else:  # microbatches are at every stage of their passes, so that everything is held at once
            head = kept.at_head if view.head else 0
            block = kept.in_block - (kept.head if view.head else 0) if view.layers else 0
            before, after = messages(view, on_cpu)
            forward = self._in_forward(view, kept, on_cpu) - before  # the input that came is kept
            most = 2 * (before + after) + max(head, block, forward, 0)
            moment = Moment(held.gradients, flights(view), most, buffers(view, shards))
        terms = (
            held.parameters + held.masters,
            moment.gradients,
            held.optimiser + held.balance + held.scaling + held.exchange,
            moment.activations,
            moment.temporaries,
            moment.buffers,
        )
        return self.on_device(view.spec.layout, view.rank, terms)

    @staticmethod
    def _in_forward(view: RankView, kept: Activations, on_cpu: bool) -> int:
        """Most bytes beyond those kept in the forward of the last block of a rank's stage."""
        sizes = Sizes(view.spec, on_cpu)
        blocks = {stage.blocks[-1]: stage for stage in view.own if stage.blocks}
        return max(
            (
                backward_peaks(sizes, layer, on_cpu).forward
                - (kept.head if stage.head else 0)
                + (kept.unread if stage.embed else 0)
                for layer, stage in blocks.items()
            ),
            default=0,
        )


def shortened(spec: RunSpec) -> RunSpec:
    """The run with as few microbatches as hold all that any rank ever holds."""
    count = held_microbatches(spec)
    if count == spec.microbatches:
        return spec
    tokens = spec.train.batch_tokens // spec.microbatches * count
    train = spec.train.model_copy(update={"batch_tokens": tokens, "batch_warmup": ()})
    layout = spec.layout.model_copy(update={"micro_batch": spec.micro_batch})
    return spec.model_copy(update={"train": train, "layout": layout})


def messages(view: RankView, on_cpu: bool) -> tuple[int, int]:
    """Bytes of one message between a rank of a pipeline and the ranks before it, and after it; 0 without any.

    Of each there are two at a time, besides what the schedule holds: the one that was sent last, and the one
    that comes next.
    """
    size = widths(view.spec).compute * Sizes(view.spec, on_cpu).stream
    return size * any(not stage.embed for stage in view.own), size * any(not stage.head for stage in view.own)


def buffers(view: RankView, shards: Sequence[StateShard]) -> int:
    """Most bytes of units that are gathered, or packed to be reduced, in a pipeline.

    With ZeRO-3 all units of a rank are whole throughout a step. ZeRO-2 and 3 pack a unit's gradients to
    reduce them.
    """
    spec, width = view.spec, widths(view.spec)
    sharded = [unit for unit in shards if unit.ranks > 1]
    base = sorted(unit.whole * width.compute for unit in shards if unit.quantised)
    # For a pass of one block; where a rank has several stages, also by the last backward of another one.
    dequantised = sum(base[-min(2, len(view.own)) :])
    if not sharded:
        return dequantised
    largest = max((unit.whole for unit in sharded if unit.trainable), default=0)
    if spec.layout.zero == 1:
        return largest * width.compute + dequantised
    gathered = sum(unit.whole for unit in sharded) * width.compute if spec.layout.zero == 3 else 0
    packed = 0 if spec.microbatches > 1 else largest * width.reduce
    return gathered + packed + dequantised
