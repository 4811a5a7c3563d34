"""Numbers of blocks in the stages of pipelines, as programs deal them that leave no choice."""

from __future__ import annotations

from collections.abc import Callable

from meshwright.spec import ModelSpec
from meshwright.spec.stages import even

StageCut = Callable[[ModelSpec, int], tuple[int, ...] | None]
"""A model, and a number of stages -> the blocks of each stage; None where the program has no such cut."""


def as_even_as_can_be(model: ModelSpec, count: int) -> tuple[int, ...]:
    """Blocks of `count` stages that differ by one at most."""
    return tuple(even(model.layers, count))


def equal(model: ModelSpec, count: int) -> tuple[int, ...] | None:
    """Blocks of `count` stages that are as large as each other."""
    return None if model.layers % count else (model.layers // count,) * count


def lighter_ends(model: ModelSpec, count: int) -> tuple[int, ...] | None:
    """Blocks of `count` stages, of which the first and the last have one less where that divides evenly.

    Source: Qi et al. 2023 (Zero Bubble, arXiv 2401.10241): a layer less at both ends, for the embedding and
    the head.
    """
    if (model.layers + 2) % count or count < 2:
        return equal(model, count)
    each = (model.layers + 2) // count
    return each - 1, *(each,) * (count - 2), each - 1


def by_threshold(model: ModelSpec, count: int) -> tuple[int, ...] | None:
    """Blocks of each of `count` stages, where a stage ends with the module that exceeds its share.

    Shares are of the weights of blocks, as if each query head had keys of its own, and of the head; all else
    counts nothing: the embedding, a lookup, and the final norm, the logits' cast and the loss, which follow
    one by one where the shares are exceeded. The head may exceed the share of an earlier stage than the last,
    where it stands here; that stage has no block then. None where the last stage would have no module at all:
    nanotron's runs with such a stage end in their first step.
    Source: nanotron's code (2024), models/base.py, `build_model`, and `get_block_compute_costs` of Llama.
    """
    block = 4 * model.heads * model.head_dim * model.hidden + 3 * model.ffn * model.hidden
    head, norm, cast, loss = model.vocab_size * model.hidden, 0, 0, 0
    whole = model.layers * block + head
    stages, stage, passed = [], 0, 0
    for weights in (*(block,) * model.layers, norm, head, cast, loss):
        passed += weights
        stages.append(stage)
        if passed * count > whole * (stage + 1) and stage + 1 < count:
            stage += 1
    blocks = stages[: model.layers]
    return tuple(blocks.count(stage) for stage in range(count)) if stages[-1] == count - 1 else None
