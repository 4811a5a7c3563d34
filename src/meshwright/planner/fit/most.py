"""The longest sequences and the largest microbatches of a training that fit, with full recomputation: powers
of two on any layout, and from the largest of them on its layout, by bisection."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import takewhile
from math import lcm

from meshwright.planner.fit.bisection import most_that
from meshwright.planner.memory.exact import memory_model
from meshwright.planner.memory.host import fits_host
from meshwright.planner.search.problem import SearchProblem
from meshwright.spec import RunSpec
from meshwright.spec.sections import FullRecompute

SHORTEST, UNIT = 128, 128
"""Tokens of the shortest sequences that are tried, and of the steps between lengths."""
LARGEST = 4096
"""Sequences of the largest microbatch that is tried."""
MICROBATCHES = 2
"""Microbatches of such a step on each rank at least: where there are several, gradients are added up."""


def longest_sequence(problem: SearchProblem, known: RunSpec | None = None) -> int:
    """Tokens of the longest sequences that fit, at most those that the model knows or that are asked about; 0
    if none do. `known` is a layout that may."""
    base = problem.base
    most = max(base.model.max_seq_len, base.data.seq_len)
    sequences = base.batch_sequences

    def searched(length: int) -> SearchProblem:
        return problem.with_batch(length, length * sequences)

    def on_layout_of(spec: RunSpec, length: int) -> RunSpec:
        data = spec.data.model_copy(update={"seq_len": length})
        return _with_batch(spec, length * sequences).model_copy(update={"data": data})

    def unit(spec: RunSpec) -> int:
        return lcm(UNIT, 2 * spec.layout.cp * spec.layout.tp)

    return _most(problem, known, (SHORTEST, most), searched, on_layout_of, unit)


def largest_micro_batch(problem: SearchProblem, known: RunSpec | None = None) -> int:
    """Sequences of the largest microbatch that fits; 0 if none does. `known` is a layout that may."""
    length, sequences = problem.base.data.seq_len, MICROBATCHES * problem.ranks

    def searched(size: int) -> SearchProblem:
        larger = problem.with_batch(length, size * sequences * length)
        return replace(larger, fixed={**larger.fixed, "micro_batch": size})

    def on_layout_of(spec: RunSpec, size: int) -> RunSpec:
        layout = spec.layout.model_copy(update={"micro_batch": size})
        return _with_batch(spec, size * sequences * length).model_copy(update={"layout": layout})

    return _most(problem, known, (1, LARGEST), searched, on_layout_of, lambda spec: 1)


def _most(
    problem: SearchProblem,
    known: RunSpec | None,
    within: tuple[int, int],
    searched: Callable[[int], SearchProblem],
    on_layout_of: Callable[[RunSpec, int], RunSpec],
    unit: Callable[[RunSpec], int],
) -> int:
    """The largest size `within` bounds that fits.

    `searched` is the run of a size on any layout, `on_layout_of` on that of a run, where sizes are multiples
    of `unit`. The search is asked about few powers of two: about none that fits the layout that is `known`,
    nor about one for which the least bytes of all layouts are too many, and of the others by bisection.
    """
    least, most = within
    memory = memory_model(problem.costs)

    def fits_there(spec: RunSpec, size: int) -> bool:
        if size % unit(spec):
            return False
        run = on_layout_of(spec, size)
        return memory.peak(run).device <= problem.capacity and fits_host(run, problem.cluster)

    def recomputing(size: int) -> SearchProblem:
        run = searched(size)
        return replace(run, fixed={"policy": FullRecompute().policy, **run.fixed})

    def may_fit(size: int) -> bool:
        bound = recomputing(size).least_memory(enough=problem.capacity)
        return bound is not None and bound.device <= problem.capacity

    powers = [least << power for power in range((most // least).bit_length())]
    layout, size = None, 0
    if known is not None:
        layout = _recomputed(problem, known)
        size = max((each for each in powers if fits_there(layout, each)), default=0)
    hopeful = list(takewhile(may_fit, (each for each in powers if each > size)))
    found: dict[int, RunSpec] = {}

    def fits(place: int) -> bool:
        if best := recomputing(hopeful[place]).search(1, any_will_do=True).best:
            found[place] = best[0].spec
        return bool(best)

    if hopeful and (fits(last := len(hopeful) - 1) or (last and fits(0))):
        place = last if last in found else most_that(fits, 0, last - 1)
        layout, size = found[place], hopeful[place]
    if layout is None or not size:
        return 0
    step, high = unit(layout), min(most, 2 * size - 1)
    count = most_that(lambda count: fits_there(layout, count * step), size // step, high // step)
    return max(size, step * count)


def _recomputed(problem: SearchProblem, spec: RunSpec) -> RunSpec:
    """A run with full recomputation, unless its policy is given."""
    if "policy" in problem.fixed:
        return spec
    return spec.model_copy(update={"recompute": FullRecompute()})


def _with_batch(spec: RunSpec, tokens: int) -> RunSpec:
    train = spec.train.model_copy(update={"batch_tokens": tokens, "batch_warmup": ()})
    return spec.model_copy(update={"train": train})
