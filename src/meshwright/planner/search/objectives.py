"""The most that a cluster takes: the longest sequences, or the largest model of a shape.

A model is sized in steps of the fourth root of two in the parameters of its blocks. Its width and its depth
grow by the cube root of that: the width is a whole number of key-value heads with their queries, and the
depth is the number of layers that comes nearest. Channels of a head, the vocabulary, queries for each key,
feed-forward channels for each of the width, the number of experts, and latents stay the same.
"""

from __future__ import annotations

from functools import cache
from itertools import takewhile
from typing import Any

from meshwright.planner.search.infeasible import shortfall
from meshwright.planner.search.problem import SearchProblem
from meshwright.spec import ModelSpec, UserError
from meshwright.spec.architecture import RANDOM
from meshwright.units import short

_LONGEST = 2**24
"""Tokens of the longest sequence that is tried."""
_STEPS = 4
"""Sizes from one number of parameters to twice that number."""
_FAR = 20 * _STEPS
"""Sizes up or down that are tried."""
_EVEN = 64
"""Feed-forward channels are a multiple of it, where the given model's are."""


def longest_context(problem: SearchProblem) -> SearchProblem:
    """The run with the longest sequences, of a power of two of tokens, that fit. Raises `UserError`."""
    best, length, base = None, 1024, problem.base
    while length <= min(_LONGEST, base.train.batch_tokens):
        if base.model.position == "learned" and length > base.model.max_seq_len:
            break
        longer = problem.with_batch(length, base.train.batch_tokens // length * length)
        if not longer.fits():
            break
        best, length = longer, 2 * length
    if best is None:
        raise UserError(shortfall(problem))
    return best


def largest_model(problem: SearchProblem) -> SearchProblem:
    """The run with the largest model of the given one's shape that fits. Raises `UserError`."""
    given = problem.base.model

    @cache
    def with_size(size: int) -> SearchProblem:
        return problem.with_model(sized(given, size))

    @cache
    def fits(size: int) -> bool:
        return with_size(size).fits()

    steps = [2**power for power in range(_FAR.bit_length())]
    if fits(0):
        low = [0, *takewhile(fits, steps)][-1]
        high = next((size for size in steps if size > low), _FAR + 1)
    else:
        smallest = _smallest(given)
        smaller = [0, *(-step for step in steps if -step > smallest), smallest]
        low = next(filter(fits, smaller), smallest)
        if not fits(low):
            least = with_size(low)
            raise UserError(
                f"--objective: not even the smallest model of the shape of {problem.model_name} "
                f"({described(least.base.model)}) has a layout: {shortfall(least)}"
            )
        high = smaller[smaller.index(low) - 1]
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return with_size(low)


def _smallest(given: ModelSpec) -> int:
    """The size with one key-value head and the fewest layers."""
    for size in range(-1, -_FAR, -1):
        model = sized(given, size)
        if model.kv_heads == 1 and model.layers == _fewest(given):
            return size
    return -_FAR


def sized(given: ModelSpec, size: int) -> ModelSpec:
    """A model of the same shape with nearly 2^(size/4) times the parameters in its blocks."""
    if size == 0:
        return given
    scale = 2 ** (size / _STEPS / 3)
    kv_heads = max(1, round(given.kv_heads * scale))
    width = kv_heads / given.kv_heads

    def channels(count: int) -> int:
        unit = _EVEN if count % _EVEN == 0 else 1
        return round(count * width / unit) * unit if count else 0

    wide: dict[str, Any] = {
        **given.model_dump(),
        "preset": None,
        "hf": None,
        "weights": RANDOM,
        "kv_heads": kv_heads,
        "heads": round(given.heads * width),
        "hidden": round(given.hidden * width),
        "ffn": channels(given.ffn),
    }
    if given.moe is not None:
        ffn, shared = channels(given.moe.ffn), channels(given.moe.shared_ffn)
        wide["moe"] = {**given.moe.model_dump(), "ffn": ffn, "shared_ffn": shared}

    def layered(layers: int) -> ModelSpec:
        return ModelSpec.model_validate({**wide, "layers": layers})

    first, period = _fewest(given), 1 if given.moe is None else given.moe.every
    near = max(first, round(given.layers * scale))
    some, more = (_blocks(layered(layers)) for layers in (near, near + period))
    missing = _blocks(given) * 2 ** (size / _STEPS) - some
    return layered(max(first, near + round(missing * period / (more - some))))


def _fewest(given: ModelSpec) -> int:
    """Layers of the smallest model of a shape: it has at least one block of each kind."""
    return 1 if given.moe is None else min(given.layers, given.moe.dense_first + given.moe.every)


def _blocks(model: ModelSpec) -> int:
    """Parameters without those of the vocabulary."""
    return model.parameters - (1 if model.tied else 2) * model.vocab_size * model.hidden


def described(model: ModelSpec) -> str:
    """A model's size in one line."""
    heads = f"{model.heads} heads" + (f" ({model.kv_heads} of keys)" if model.kv_heads != model.heads else "")
    experts = "" if model.moe is None else f", {model.moe.experts} experts of {model.moe.ffn:,}"
    return (
        f"{short(model.parameters)} parameters: {model.layers} layer{'s' * (model.layers > 1)}, "
        f"hidden {model.hidden:,}, {heads}, ffn {model.ffn:,}{experts}"
    )
