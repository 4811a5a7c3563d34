"""Bytes of our own program on the fullest rank of its pipeline: the formulas that the dry run is held to.

Without a pipeline the step is followed in time, and the terms are those of its fullest moment
(`planner/memory/peak.py`). In a pipeline states are `planner/memory/states.py`'s, to the byte, and what is
kept is `planner/memory/in_flight.py`'s, for the schedule that runs; on top stand buffers of units on their
way and the temporaries of the operators at the peak.
"""

from __future__ import annotations

from collections.abc import Sequence

from meshwright.planner.cost.model import CostModel
from meshwright.planner.memory.activations import Activations, activations
from meshwright.planner.memory.generic import Memory, beyond, held_microbatches, memories
from meshwright.planner.memory.in_flight import peak_activations
from meshwright.planner.memory.peak import Moment, fullest_moment
from meshwright.planner.memory.states import StateShard, states_at, units
from meshwright.planner.rank_view import RankView, place_of, widths
from meshwright.spec import RunSpec


def needs(spec: RunSpec, on: CostModel) -> list[Memory]:
    """Bytes that each rank of the pipeline needs: exact for our own program, else by `memory/generic.py`."""
    if not on.stack.ours:
        return memories(spec, on)
    short = shortened(spec)
    kept = activations(short)
    return [_rank(short, on, kept, rank) for rank in range(spec.layout.pp)]


def fullest(spec: RunSpec, on: CostModel) -> Memory:
    """The same of the rank that needs most."""
    return max(needs(spec, on), key=lambda each: each.allocated)


def shortened(spec: RunSpec) -> RunSpec:
    """The run with as few microbatches as hold all that any rank ever holds."""
    count = held_microbatches(spec)
    if count == spec.microbatches:
        return spec
    tokens = spec.train.batch_tokens // spec.microbatches * count
    train = spec.train.model_copy(update={"batch_tokens": tokens})
    layout = spec.layout.model_copy(update={"micro_batch": spec.micro_batch})
    return spec.model_copy(update={"train": train, "layout": layout})


def _rank(spec: RunSpec, on: CostModel, kept: Activations, rank: int) -> Memory:
    at = place_of(spec, rank)
    listed = units(at)
    held = states_at(at, listed)
    if spec.layout.pp == 1:
        then = fullest_moment(at, listed, kept, casts=on.cluster.device.kind == "cpu")
    else:
        then = _summed(at, listed, kept, held.gradients, rank)
    found = Memory(
        parameters=held.parameters + held.masters,
        gradients=then.gradients,
        optimiser=held.optimiser + held.balance,
        activations=then.activations,
        logits=then.temporaries,
        buffers=then.buffers,
        fragmentation=0.0,
        context=0.0,
        communicators=0.0,
        rank=rank,
    )
    return beyond(found, spec, on)


def _summed(
    at: RankView, listed: Sequence[StateShard], kept: Activations, gradients: int, rank: int
) -> Moment:
    """In a pipeline all is taken to be there at once: microbatches are at every place under way."""
    head = kept.at_head if at.head else 0
    block = kept.in_block - (kept.head if at.head else 0) if at.layers else 0
    flight = peak_activations(at.spec, rank, kept)
    return Moment(gradients, flight, max(head, block, 0), buffers(at, listed))


def buffers(at: RankView, listed: Sequence[StateShard]) -> int:
    """Bytes of units that are gathered, or packed for the wire, at the most that they take in a pipeline.

    Of ZeRO-3 all units of a rank are whole from the step's begin to its end. ZeRO-2 and 3 pack a unit's
    gradients to reduce them.
    """
    spec, width = at.spec, widths(at.spec)
    sharded = [unit for unit in listed if unit.ranks > 1]
    if not sharded:
        return 0
    largest = max(unit.whole for unit in sharded)
    if spec.layout.zero == 1:
        return largest * width.compute
    gathered = sum(unit.whole for unit in sharded) * width.compute if spec.layout.zero == 3 else 0
    packed = 0 if spec.microbatches > 1 else largest * width.reduce
    return gathered + packed
