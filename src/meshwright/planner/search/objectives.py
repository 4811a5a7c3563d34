"""The most that a cluster takes: the longest sequences, or the largest model of a shape.

A model is sized in steps of the fourth root of two in the parameters of its blocks. Its width and its depth
grow by the cube root of that: the width is a whole number of key-value heads with their queries, and as many
layers follow as come nearest. Channels of a head, the vocabulary, queries for each key, feed-forward channels
for each of the width, the number of experts, and latents stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from meshwright.planner.search.infeasible import shortfall
from meshwright.planner.search.least_memory import least_memory
from meshwright.planner.search.request import PlanRequest
from meshwright.spec import ModelSpec, RunSpec, UserError
from meshwright.units import short

_LONGEST = 2**24
"""Tokens of the longest sequence that is tried."""
_STEPS = 4
"""Sizes from one number of parameters to twice as many."""
_FAR = 20 * _STEPS
"""Sizes up or down that are tried."""
_EVEN = 64
"""Feed-forward channels are a multiple of it, where the given model's are."""


def feasible(wish: PlanRequest) -> bool:
    """Whether any of a wish's layouts fits; first by what any needs at least."""
    least = least_memory(wish.space(), wish.engines())
    if least is None or least.device > wish.searched:
        return False
    return bool(wish.search(any_will_do=True).best)


def longest_context(wish: PlanRequest) -> PlanRequest:
    """The wish with the longest sequences, of a power of two of tokens, of which some layout fits."""
    best = None
    length = 1024
    while length <= min(_LONGEST, wish.base.train.batch_tokens):
        longer = _with_length(wish, length)
        if longer is None or not feasible(longer):
            break
        best, length = longer, 2 * length
    if best is None:
        raise UserError(shortfall(wish))
    return best


def _with_length(wish: PlanRequest, length: int) -> PlanRequest | None:
    """The wish with sequences of `length` tokens; None beyond learned positions."""
    base = wish.base
    if base.model.position == "learned" and length > base.model.max_seq_len:
        return None
    batch = base.train.batch_tokens // length * length
    tree = base.to_json()
    tree["data"]["seq_len"], tree["train"]["batch_tokens"] = length, batch
    return replace(wish, base=RunSpec.model_validate(tree))


def largest_model(wish: PlanRequest) -> PlanRequest:
    """The wish with the largest model of the given one's shape of which some layout fits."""
    given = wish.base.model

    def fits(size: int) -> bool:
        return feasible(with_model(wish, sized(given, size)))

    step, low = 1, 0
    if fits(0):
        while step <= _FAR and fits(step):
            low, step = step, 2 * step
        high = min(step, _FAR + 1)
    else:
        smallest, high = _smallest(given), 0
        low = max(-step, smallest)
        while not fits(low):
            if low == smallest:
                raise UserError(_none(with_model(wish, sized(given, low)), wish))
            step, high = 2 * step, low
            low = max(-step, smallest)
    return with_model(wish, sized(given, _last(fits, low, high)))


def _smallest(given: ModelSpec) -> int:
    """The size of one key-value head and as few layers as can be."""
    for size in range(-1, -_FAR, -1):
        model = sized(given, size)
        if model.kv_heads == 1 and model.layers == _fewest(given):
            return size
    return -_FAR


def _last(holds: Callable[[int], bool], low: int, high: int) -> int:
    """The last size that something holds at, where it does at `low`, and not at `high`."""
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


def sized(given: ModelSpec, size: int) -> ModelSpec:
    """A model of the same shape with nearly 2^(size/4) times as much in its blocks; 0 is the given one."""
    if size == 0:
        return given
    scale = 2 ** (size / _STEPS / 3)
    kv_heads = max(1, round(given.kv_heads * scale))
    width = kv_heads / given.kv_heads
    wide: dict[str, Any] = {
        **given.model_dump(),
        "preset": None,
        "hf": None,
        "kv_heads": kv_heads,
        "heads": round(given.heads * width),
        "hidden": round(given.hidden * width),
        "ffn": _channels(given.ffn, width),
    }
    if given.moe is not None:
        ffn, shared = _channels(given.moe.ffn, width), _channels(given.moe.shared_ffn, width)
        wide["moe"] = {**given.moe.model_dump(), "ffn": ffn, "shared_ffn": shared}
    first, period = _fewest(given), 1 if given.moe is None else given.moe.every
    near = max(first, round(given.layers * scale))
    some, more = (_blocks(_layered(wide, layers)) for layers in (near, near + period))
    missing = _blocks(given) * 2 ** (size / _STEPS) - some
    return _layered(wide, max(first, near + round(missing * period / (more - some))))


def _fewest(given: ModelSpec) -> int:
    """Layers of the smallest model of a shape: of each kind of block it has one at least."""
    return 1 if given.moe is None else min(given.layers, given.moe.dense_first + given.moe.every)


def _blocks(model: ModelSpec) -> int:
    """Parameters without those of the vocabulary."""
    return model.parameters - (1 if model.tied else 2) * model.vocab_size * model.hidden


def _layered(wide: dict[str, Any], layers: int) -> ModelSpec:
    return ModelSpec.model_validate({**wide, "layers": layers})


def _channels(given: int, width: float) -> int:
    """As many times as wide."""
    unit = _EVEN if given % _EVEN == 0 else 1
    return round(given * width / unit) * unit if given else 0


def with_model(wish: PlanRequest, model: ModelSpec) -> PlanRequest:
    """The wish with another model."""
    tree = wish.base.to_json()
    tree["model"] = model.model_dump(mode="json")
    return replace(wish, base=RunSpec.model_validate(tree))


def described(model: ModelSpec) -> str:
    """A model's size in one line."""
    heads = f"{model.heads} heads" + (f" ({model.kv_heads} of keys)" if model.kv_heads != model.heads else "")
    experts = "" if model.moe is None else f", {model.moe.experts} experts of {model.moe.ffn:,}"
    return (
        f"{short(model.parameters)} parameters: {model.layers} layer{'s' * (model.layers > 1)}, "
        f"hidden {model.hidden:,}, {heads}, ffn {model.ffn:,}{experts}"
    )


def _none(least: PlanRequest, wish: PlanRequest) -> str:
    name = wish.base.model.preset or wish.base.model.hf or wish.base.model.family
    return (
        f"--objective: not even the smallest model of the shape of {name} "
        f"({described(least.base.model)}) has a layout: {shortfall(least)}"
    )
