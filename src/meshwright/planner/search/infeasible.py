"""Why nothing fits, in one sentence: what is short, by how much, and the nearest changes that would do."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import prod
from typing import Any

from meshwright.hardware.cluster import Cluster
from meshwright.planner.cost.uncertainty import room
from meshwright.planner.memory.generic import Memory
from meshwright.planner.search.least_memory import least_memory
from meshwright.planner.search.request import PlanRequest, node, roomier
from meshwright.spec import RunSpec, UserError
from meshwright.spec.load import from_tree

_MOST = 131072
"""Devices of the largest cluster that is tried."""


def shortfall(wish: PlanRequest) -> str:
    """Why no layout of a wish fits."""
    least = least_memory(wish.space(), wish.engines())
    where = f"{wish.ranks:,} x {wish.cluster.device.name}"
    if least is None:
        return _no_layout(wish)
    ways = "; ".join(_changes(wish, least)) or "no near change was found that would do"
    states = least.parameters + least.gradients + least.optimiser + least.buffers
    rest = least.device - states - least.activations - least.logits
    short = least.device - wish.capacity
    reason = (
        f"the least that a rank needs in any layout is {_gb(least.device)}"
        if short > 0
        else f"every layout needs more, though some near {_gb(least.device)}"
    )
    missing = f", {_gb(short)} more" if short > 0 else ""
    return (
        f"{_name(wish)}: nothing fits {where}: of {_gb(room(wish.cluster))} a plan may fill "
        f"{_gb(wish.capacity)}, and {reason}{missing} (states {_gb(states)}, activations and logits "
        f"{_gb(least.activations + least.logits)}, other {_gb(rest)}); {ways}"
    )


def _name(wish: PlanRequest) -> str:
    return wish.base.model.preset or wish.base.model.hf or wish.base.model.family


def _gb(size: float) -> str:
    return f"{size / 1e9:,.4g} GB"


def _no_layout(wish: PlanRequest) -> str:
    """No layout is legal: the batch, the sequence or what is fixed does not go with the number of ranks."""
    base, fixed = wish.base, wish.fixed
    if fixed:
        if (broken := _broken_rule(wish)) is not None:
            return broken
        given = ", ".join(f"{_key(key)} = {value}" for key, value in fixed.items())
        loose = [key for key in fixed if _legal(replace(wish, fixed=_without(wish, key)))]
        hint = f"; without {' or '.join(map(_key, loose))} there are some" if loose else ""
        return f"{_name(wish)}: no layout of {wish.ranks:,} ranks has {given}{hint}"
    ways = []
    if counts := _shared_counts(wish):
        ways.append(f"--gpus {' or '.join(map(str, counts))}")
    if sequences := _shared_sequences(wish):
        ways.append(
            f"--batch-tokens {sequences * base.data.seq_len}, which are {sequences:,} sequences, or a "
            "multiple of it"
        )
    return (
        f"{_name(wish)}: no layout shares {base.batch_sequences:,} sequences of {base.data.seq_len:,} tokens "
        f"among {wish.ranks:,} ranks; try {', or '.join(ways) or 'a power of two of devices and sequences'}"
    )


def _shared_counts(wish: PlanRequest) -> list[int]:
    """The powers of two of devices, or of nodes, below and above, whose ranks some layout shares the batch
    among."""
    each = node(wish.cluster) if wish.cluster.device.kind != "cpu" else 1
    unit = each if wish.ranks > each else 1
    below = unit << ((wish.ranks // unit).bit_length() - 1)
    found = [count for count in (below, 2 * below) if count != wish.ranks]
    return [count for count in found if _legal(replace(wish, cluster=wish.cluster.resized(count)))]


def _shared_sequences(wish: PlanRequest) -> int | None:
    """The fewest sequences, an odd number that divides the ranks times powers of two, that are shared."""
    tree = wish.base.to_json()
    sequences = wish.ranks // (wish.ranks & -wish.ranks)
    while sequences <= wish.ranks:
        tree["train"]["batch_tokens"] = sequences * wish.base.data.seq_len
        if sequences > wish.base.batch_sequences and _legal(replace(wish, base=RunSpec.model_validate(tree))):
            return sequences
        sequences *= 2
    return None


def _broken_rule(wish: PlanRequest) -> str | None:
    """What the rules say of the keys that are fixed, with as many data ranks as are left."""
    layout: dict[str, Any] = {key: value for key, value in wish.fixed.items() if key != "policy"}
    taken = prod(layout.get(axis, 1) for axis in ("replicate", "tp", "cp", "pp"))
    layout = {"dp": max(1, wish.ranks // taken), "zero": 1, **layout}
    try:
        from_tree({**wish.base.to_json(), "layout": layout})
    except UserError as error:
        return str(error)
    return None


def _key(key: str) -> str:
    return "recompute.policy" if key == "policy" else f"layout.{key}"


def _without(wish: PlanRequest, key: str) -> dict[str, object]:
    return {name: value for name, value in wish.fixed.items() if name != key}


def _legal(wish: PlanRequest) -> bool:
    return least_memory(wish.space(), wish.engines()) is not None


def _fits(wish: PlanRequest) -> bool:
    """Whether some layout of a wish fits; first by what any needs at least."""
    least = least_memory(wish.space(), wish.engines())
    if least is None or least.device > wish.searched:
        return False
    return bool(wish.search(any_will_do=True).best)


def _changes(wish: PlanRequest, least: Memory) -> Iterator[str]:
    """The nearest changes that would do, each by itself."""
    for key in wish.fixed:
        if _fits(replace(wish, fixed=_without(wish, key))):
            yield f"it fits without {_key(key)} = {wish.fixed[key]}"
    if wish.limit is not None and _fits(replace(wish, limit=None)):
        yield "it fits without the limit on memory"
    shorter = _shorter(wish) if least.activations + least.logits > 0.1 * least.device else None
    if shorter is not None:
        yield f"it fits with sequences of {shorter:,} tokens"
    count = _smallest(wish)
    if count is not None:
        yield f"the smallest power of two of nodes that does is {count:,} devices of {wish.cluster.name}"
    other = next((each for each in _others(wish) if _fits(replace(wish, cluster=each))), None)
    if other is not None:
        yield f"{wish.ranks:,} x {other.device.name} ({other.name}) would do"


def _others(wish: PlanRequest) -> list[Cluster]:
    return [] if wish.limit is not None else roomier(wish.cluster)


def _shorter(wish: PlanRequest) -> int | None:
    """Tokens of the longest half, quarter, ... of the sequence that fits."""
    tree, length = wish.base.to_json(), wish.base.data.seq_len
    while length % 2 == 0 and length > 128:
        length //= 2
        tree["data"]["seq_len"] = length
        if _fits(replace(wish, base=RunSpec.model_validate(tree))):
            return length
    return None


def _smallest(wish: PlanRequest) -> int | None:
    """The least power of two of nodes, more than there are, that some layout fits on."""
    each = node(wish.cluster) if wish.cluster.device.kind != "cpu" else 1
    count = each
    while count <= _MOST:
        if count > wish.ranks and _fits(replace(wish, cluster=wish.cluster.resized(count))):
            return count
        count *= 2
    return None
