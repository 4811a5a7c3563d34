"""Why nothing fits, in one sentence: what is short, by how much, and the nearest changes that would do."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import inf, prod
from typing import Any

from meshwright.hardware.cluster import GPUS
from meshwright.hardware.find import catalogue
from meshwright.planner.cost.uncertainty import room
from meshwright.planner.memory.generic import Memory
from meshwright.planner.memory.host import host_bytes, host_ranks, host_room, offloads, with_host_room
from meshwright.planner.programs.table import PROGRAMS
from meshwright.planner.search.problem import SearchProblem
from meshwright.planner.search.results import AXES
from meshwright.spec import UserError
from meshwright.spec.arithmetic import divisors, nearest
from meshwright.spec.load import from_tree
from meshwright.spec.rules import is_accepted

_NO_KEYS = {"policy": "recompute.policy", "max_stages": "--max-stages"}
"""Fixed things that are not keys of the layout, as users give them."""
_MOST = 131072
"""Devices of the largest cluster that is tried."""


def shortfall(problem: SearchProblem) -> str:
    """Why no layout fits."""
    least = problem.least_memory()
    if least is None:
        return _no_layout(problem)
    if (words := _host_shortfall(problem)) is not None:
        return words
    ways = "; ".join(_changes(problem, least)) or "no near change was found that would do"
    states = least.parameters + least.gradients + least.optimiser + least.buffers
    kept = least.activations + least.logits
    reason = f"every layout needs more, though a rank's equal share of everything is {_gb(least.device)}"
    if (short := least.device - problem.capacity) > 0:
        reason = f"the least that a rank needs in any layout is {_gb(least.device)}, {_gb(short)} more"
    return (
        f"{problem.model_name}: nothing fits {problem.ranks:,} x {problem.cluster.device.name}: of "
        f"{_gb(room(problem.cluster))} a plan may fill {_gb(problem.capacity)}, and {reason} (states "
        f"{_gb(states)}, activations and logits {_gb(kept)}, other {_gb(least.device - states - kept)}); "
        f"{ways}"
    )


def _host_shortfall(problem: SearchProblem) -> str | None:
    """Why no layout fits its hosts, where some fit the devices; None where none does."""
    cluster, train = problem.cluster, problem.base.train
    room = host_room(cluster)
    if room is None or not offloads(problem.base):
        return None
    found = replace(problem, cluster=with_host_room(cluster, None)).search(1).best
    if not found:
        return None
    key = "train.offload" if train.offload == "host" else "train.offload_activations"
    node = host_ranks(cluster)
    least = _gb(host_bytes(found[0].spec, node))
    return (
        f"{key}: the layouts that fit {problem.ranks:,} x {cluster.device.name} need more memory of their "
        f"hosts than there is: the fastest {least} for {node} ranks of a node, "
        f"where they may fill {_gb(room)}; give 'none', more devices, or a hardware file with another "
        f"device.host_memory in bytes a device"
    )


def _gb(size: float) -> str:
    return f"{size / 1e9:,.4g} GB"


def not_run(problem: SearchProblem, pipelines: bool = False) -> str | None:
    """The sentence of the rule for which the program runs no layout, or none with `pipelines`; else None.

    Without that rule there is a layout, or, where several are broken, without it and others. Rules on keys
    that are fixed are tried first.
    """
    name = problem.stack.name
    program = PROGRAMS[name]
    rules = sorted(program.rules, key=lambda rule: rule.key not in problem.fixed)
    sets = [*((rule,) for rule in rules), *(tuple(rules[: end + 1]) for end in range(1, len(rules)))]
    for dropped in sets:
        space = replace(problem, program=program.without(dropped)).space()
        layout = next((each for each in space.layouts() if each.layout.pp > 1 or not pipelines), None)
        if layout is not None:  # which breaks the last of them, without which there was none before
            return dropped[-1].sentence(name, PROGRAMS[name].release, layout)
    return None


def _no_layout(problem: SearchProblem) -> str:
    """Why no layout is legal: the batch, the sequence or fixed keys do not go with the number of ranks."""
    if (words := not_run(problem)) is not None:
        return words
    base, fixed = problem.base, problem.fixed
    if fixed:
        if (broken := _broken_rule(problem)) is not None:
            return broken
        given = ", ".join(f"{key_name(key)} = {value}" for key, value in fixed.items())
        loose = [key for key in fixed if _legal(problem.without(key))]
        hint = f"; without {' or '.join(map(key_name, loose))} there are some" if loose else ""
        if near := [f"{key_name(key)} = {size}" for key in loose if (size := _nearest(problem, key))]:
            hint += f", and with {' or '.join(near)}"
        return f"{problem.model_name}: no layout of {problem.ranks:,} ranks has {given}{hint}"
    ways = []
    if counts := _shared_counts(problem):
        ways.append(f"--gpus {' or '.join(map(str, counts))}")
    if sequences := _shared_sequences(problem):
        ways.append(
            f"--batch-tokens {sequences * base.data.seq_len}, which are {sequences:,} sequences, or a "
            "multiple of it"
        )
    return (
        f"{problem.model_name}: no layout shares {base.shared_sequences:,} sequences of "
        f"{base.data.seq_len:,} tokens among {problem.ranks:,} ranks; try "
        f"{', or '.join(ways) or 'a power of two of devices and sequences'}"
    )


def _nearest(problem: SearchProblem, key: str) -> int | None:
    """The size nearest to that of a fixed axis, or microbatch, for which some layout is legal."""
    total = problem.base.shared_sequences if key == "micro_batch" else problem.ranks
    if key not in (*AXES, "micro_batch"):
        return None
    fits = [size for size in divisors(total) if _legal(replace(problem, fixed={**problem.fixed, key: size}))]
    return nearest(problem.fixed[key], fits) if fits else None


def _node(problem: SearchProblem) -> int:
    """Devices that come together: those of a node, or one rank of a CPU host."""
    return problem.cluster.node if problem.cluster.device.kind != "cpu" else 1


def _shared_counts(problem: SearchProblem) -> list[int]:
    """Powers of two of devices, or of nodes, just below and above, for which some layout is legal."""
    node = _node(problem)
    unit = node if problem.ranks > node else 1
    below = unit << ((problem.ranks // unit).bit_length() - 1)
    counts = (below, 2 * below)
    return [count for count in counts if count != problem.ranks and _legal(problem.resized(count))]


def _shared_sequences(problem: SearchProblem) -> int | None:
    """The fewest sequences that ranks can share: an odd divisor of the ranks times a power of two."""
    length = problem.base.data.seq_len
    sequences = problem.ranks // (problem.ranks & -problem.ranks)
    while sequences <= problem.ranks:
        more = sequences > problem.base.shared_sequences
        if more and _legal(problem.with_batch(length, sequences * length)):
            return sequences
        sequences *= 2
    return None


def _broken_rule(problem: SearchProblem) -> str | None:
    """The rule that the fixed keys break, with as many data ranks as are left."""
    layout: dict[str, Any] = {key: value for key, value in problem.fixed.items() if key not in _NO_KEYS}
    taken = prod(layout.get(axis, 1) for axis in ("replicate", "tp", "cp", "pp"))
    layout = {"dp": max(1, problem.ranks // taken), "zero": 1, **layout}
    try:
        from_tree({**problem.base.to_json(), "layout": layout})
    except UserError as error:
        return str(error)
    return None


def key_name(key: str) -> str:
    """A fixed key as users give it."""
    return _NO_KEYS.get(key, f"layout.{key}")


def _legal(problem: SearchProblem) -> bool:
    return problem.least_memory(enough=inf) is not None


def _changes(problem: SearchProblem, least: Memory) -> Iterator[str]:
    """The nearest changes that would do, each on its own."""
    for key in problem.fixed:
        if problem.without(key).fits():
            yield f"it fits without {key_name(key)} = {problem.fixed[key]}"
    if problem.limit is not None and replace(problem, limit=None).fits():
        yield "it fits without the limit on memory"
    if least.activations + least.logits > 0.1 * least.device:
        length = problem.base.data.seq_len
        while length % 2 == 0 and length > 128:
            length //= 2
            if problem.with_batch(length, problem.base.train.batch_tokens).fits():
                yield f"it fits with sequences of {length:,} tokens"
                break
    count = _node(problem)
    while count <= _MOST and not (count > problem.ranks and problem.resized(count).fits()):
        count *= 2
    if count <= _MOST:
        yield (f"the smallest power of two of nodes that does is {count:,} devices of {problem.cluster.name}")
    if problem.limit is None:
        yield from _roomier(problem)
    if problem.stack.ours and problem.cluster.device.host_link is not None:
        yield from _other_ways(problem)


def _other_ways(problem: SearchProblem) -> Iterator[str]:
    """Moments in the hosts' memory where that does, and the verb that tries more ways on GPUs of one node."""
    offloaded = problem.with_offload()
    if is_accepted(offloaded.base) and offloaded.fits():
        yield "it fits with --train.offload host"
    model, cluster = problem.base.model, problem.cluster
    if (
        cluster.device.kind in GPUS
        and problem.ranks <= cluster.node
        and cluster.name in catalogue()
        and (model.preset or model.hf)
    ):
        yield (
            f"`meshwright fit {problem.model_name} --gpu {cluster.name} --count {problem.ranks}` tells which "
            f"other ways of training fit, such as LoRA and QLoRA"
        )


def _roomier(problem: SearchProblem) -> Iterator[str]:
    """The cluster of the catalogue with the least memory among those with more, on which it fits."""
    device = problem.cluster.device
    for other in sorted(catalogue().values(), key=lambda cluster: cluster.device.memory):
        if other.device.kind == device.kind and other.device.memory > device.memory:
            resized = other.resized(problem.ranks)
            if replace(problem, cluster=resized).fits():
                yield f"{problem.ranks:,} x {resized.device.name} ({resized.name}) would do"
                return
