"""The longest sequences and the largest microbatches of a training that fit, with full recomputation: powers
of two on any layout, by the search, and from the last of them on its layout, by bisection."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import lcm

from meshwright.planner.fit.bisection import most_that
from meshwright.planner.memory.exact import memory_model
from meshwright.planner.search.problem import SearchProblem
from meshwright.spec import RunSpec
from meshwright.spec.sections import FullRecompute

SHORTEST, UNIT = 128, 128
"""Tokens of the shortest sequences that are tried, and of the steps between lengths."""
LARGEST = 4096
"""Sequences of the largest microbatch that is tried."""
MICROBATCHES = 2
"""Microbatches of such a step on each rank at least: where there are several, gradients are added up."""


def longest_sequence(problem: SearchProblem) -> int:
    """Tokens of the longest sequences that fit, at most those that the model knows or that are asked about; 0
    if none do."""
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

    return _most(problem, base.data.seq_len, (SHORTEST, most), searched, on_layout_of, unit)


def largest_micro_batch(problem: SearchProblem) -> int:
    """Sequences of the largest microbatch that fits; 0 if none does."""
    length, sequences = problem.base.data.seq_len, MICROBATCHES * problem.ranks

    def searched(size: int) -> SearchProblem:
        larger = problem.with_batch(length, size * sequences * length)
        return replace(larger, fixed={**larger.fixed, "micro_batch": size})

    def on_layout_of(spec: RunSpec, size: int) -> RunSpec:
        layout = spec.layout.model_copy(update={"micro_batch": size})
        tokens = size * length * spec.layout.data_ranks * spec.microbatches
        return _with_batch(spec, tokens).model_copy(update={"layout": layout})

    return _most(problem, 1, (1, LARGEST), searched, on_layout_of, lambda spec: 1)


def _most(
    problem: SearchProblem,
    start: int,
    within: tuple[int, int],
    searched: Callable[[int], SearchProblem],
    on_layout_of: Callable[[RunSpec, int], RunSpec],
    unit: Callable[[RunSpec], int],
) -> int:
    """The largest size `within` bounds that fits.

    `searched` is the run of a size on any layout, `on_layout_of` on that of a run, where sizes are multiples
    of `unit`. Powers of two are tried from the one at `start` on, which is likely to fit.
    """
    least, most = within
    found: dict[int, RunSpec] = {}

    def fits(size: int) -> bool:
        run = searched(size)
        run = replace(run, fixed={"policy": FullRecompute().policy, **run.fixed})
        if best := run.search(1, any_will_do=True).best:
            found[size] = best[0].spec
        return bool(best)

    size = least << max(0, (min(start, most) // least).bit_length() - 1)
    while size >= least and not fits(size):
        size //= 2
    if size < least:
        return 0
    while 2 * size <= most and 2 * size not in found and fits(2 * size):
        size *= 2
    layout = found[size]
    step, memory = unit(layout), memory_model(problem.costs)

    def fits_there(count: int) -> bool:
        return memory.peak(on_layout_of(layout, count * step)).device <= problem.capacity

    return max(size, step * most_that(fits_there, size // step, min(2 * size, most) // step))


def _with_batch(spec: RunSpec, tokens: int) -> RunSpec:
    train = spec.train.model_copy(update={"batch_tokens": tokens, "batch_warmup": ()})
    return spec.model_copy(update={"train": train})
