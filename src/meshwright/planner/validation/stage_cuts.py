"""Numbers of blocks in the stages of pipelines, as programs deal them that do not deal them evenly."""

from __future__ import annotations

from meshwright.spec import ModelSpec


def by_threshold(model: ModelSpec, count: int) -> tuple[int, ...]:
    """Blocks of each of `count` stages, where a stage ends with the block that exceeds its share.

    Shares are of the weights of blocks, as if each query head had keys of its own, and of the head; the
    embedding, a lookup, counts nothing. The head may exceed the share of an earlier stage than the last,
    where it stands here; that stage is empty then.
    Source: nanotron's code (2024), models/base.py, `build_model`, and `get_block_compute_costs` of Llama.
    """
    block = 4 * model.heads * model.head_dim * model.hidden + 3 * model.ffn * model.hidden
    whole = model.layers * block + model.vocab_size * model.hidden
    found, stage = [0] * count, 0
    for number in range(1, model.layers + 1):
        found[stage] += 1
        if number * block * count > whole * (stage + 1):
            stage += 1
    return tuple(found)
