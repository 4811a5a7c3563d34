"""Choices besides its layout that would make a plan more than 10% better: precision, recomputation, islands,
fewer devices.

Each is estimated on the plan's own layout, so that a search with it may find more.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from meshwright.planner.cost.model import CostModel
from meshwright.planner.explain.candidate import Candidate
from meshwright.planner.layout_levels import POLICIES
from meshwright.spec.arithmetic import divisors
from meshwright.spec.rules import is_accepted

WORTH = 0.1
"""Share by which an alternative has to be better to be told."""


def alternatives(best: Candidate, capacity: float, policy_given: bool) -> list[str]:
    """A sentence for each choice that would be more than `WORTH` better than a plan, on its own layout.

    `policy_given` is true if the recompute policy was not to be chosen, and `capacity` are the bytes of a
    device that may be used. A plan in low precision that bf16 would beat is told by any share.
    """
    found = [*_precision(best, capacity)]
    found += _recomputation(best, capacity) if policy_given else []
    return [*found, *_islands(best), *_fewer_devices(best, capacity)]


def _precision(best: Candidate, capacity: float) -> Iterator[str]:
    """Yield what the other of bf16 and fp8 would change."""
    now, low = best.spec.precision.compute, best.spec.precision.low
    other = "bf16" if low else "fp8"
    if other not in best.cluster.device.peak or not (low or now in ("bf16", "fp16")):
        return
    changed = [each for each in _in_format(best, other) if each.fits(capacity)]
    if not changed:
        return
    gain = best.seconds / min(each.seconds for each in changed) - 1
    if gain > (0.0 if low else WORTH):
        slower = f": {now} is slower here" if low else ""
        yield f"In {other} (--precision.compute {other}) the first would be {gain:.1%} faster{slower}."


def _in_format(best: Candidate, format: str) -> Iterator[Candidate]:
    """Yield a plan in another format, with blocks as they are and the other of compiled and not."""
    precision = best.spec.precision.model_copy(update={"compute": format})
    costs = CostModel(best.cluster, best.costs.stack)
    for compiled in (True, False) if best.costs.counted else (best.spec.train.compile,):
        train = best.spec.train.model_copy(update={"compile": compiled})
        spec = best.spec.model_copy(update={"precision": precision, "train": train})
        if is_accepted(spec):
            yield Candidate(spec, costs)


def _recomputation(best: Candidate, capacity: float) -> Iterator[str]:
    """Yield the recompute policy that would be better than the one that was given."""
    faster: dict[str, float] = {}
    layout, given = best.spec.layout, best.spec.recompute.policy
    for name, size in product(POLICIES.keys() - {given}, divisors(best.spec.micro_batch)):
        changes = {"recompute": POLICIES[name], "layout": layout.model_copy(update={"micro_batch": size})}
        other = Candidate(best.spec.model_copy(update=changes), best.costs)
        if is_accepted(other.spec) and other.fits(capacity):
            faster[name] = max(best.seconds / other.seconds - 1, faster.get(name, 0.0))
    found = max(faster, key=faster.__getitem__, default=None)
    if found is not None and faster[found] > WORTH:
        yield f"With --recompute.policy {found} the first would be {faster[found]:.1%} faster."


def _islands(best: Candidate) -> Iterator[str]:
    """Yield what islands would save at most, where ranks wait for a network between data ranks."""
    share = best.parts.get("data axis", 0.0) / best.seconds
    gain = share / (1 - share)
    crosses = best.cluster.count > best.cluster.node
    if best.costs.stack.ours and best.spec.step_groups == 1 and crosses and gain > WORTH:
        yield (
            f"Islands (--islands auto), which exchange parameters now and then, would be up to {gain:.1%} "
            f"faster: {share:.1%} of a step is spent waiting for the data axis."
        )


def _fewer_devices(best: Candidate, capacity: float) -> Iterator[str]:
    """Yield how much more each device would do with half of the data ranks."""
    layout = best.spec.layout
    if layout.dp % 2 or best.cluster.count <= best.cluster.node or best.spec.step_groups > 1:
        return
    spec = best.spec.model_copy(update={"layout": layout.model_copy(update={"dp": layout.dp // 2})})
    if not is_accepted(spec):
        return
    half = Candidate(spec, CostModel(best.cluster.resized(best.cluster.count // 2), best.costs.stack))
    gain = half.tokens_per_second * 2 / best.tokens_per_second - 1
    if half.fits(capacity) and gain > WORTH:
        yield (
            f"On {half.cluster.count:,} devices each would do {gain:.1%} more: the same tokens cost less, "
            f"and take {2 / (1 + gain):.2f} times as long."
        )
