"""Seconds of the host that launches the operators of a layer, and in which its device waits for it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from meshwright.planner.cost.breakdown import PassSeconds
from meshwright.planner.cost.operator_bytes import block_kernels
from meshwright.planner.cost.software import Hosting, SoftwareStack
from meshwright.spec import RunSpec
from meshwright.spec.layers import LayerKind

Passes = tuple[float, float, float, float]
"""Numbers for the forward, both halves of the backward, and recomputation."""
_DENSE, _UNFUSED, _EXPERTS = 22, 30, 25
"""Operators of the forward of another program's block, of one whose attention is not fused, and of experts.
Counted: those of a block as its formulas are written, whatever the program; their seconds are fitted."""
_BACKWARD = 1.2, 0.4
"""Operators of both halves of the backward over those of the forward. Counted: as above."""
_SELECTIVE = 8
"""Operators that selective recomputation repeats. Counted: as above."""
_ATTENTION = 1, 2
"""Operators of attention in the forward and in the backward. Counted: a block in a dry run."""


@dataclass(frozen=True)
class HostSeconds:
    """Seconds of a host for one layer and microbatch."""

    ahead: Passes
    behind: Passes
    """For operators that follow the router's, for whose counts the host may wait."""

    def waits(self, passes: PassSeconds, stack: SoftwareStack) -> PassSeconds:
        """`passes` of a device with the seconds in which it waits for this host."""
        waited = []
        for seconds, ahead, behind in zip(passes, self.ahead, self.behind, strict=True):
            if not seconds.total:
                wait = 0.0
            elif stack.blocking:
                wait = ahead + behind
            elif stack.blocking_experts:
                wait = behind + max(0.0, ahead - seconds.total)
            else:
                wait = max(0.0, ahead + behind - seconds.total)
            waited.append(seconds._replace(host=wait))
        return PassSeconds(*waited)


def host_seconds(stack: SoftwareStack, kind: LayerKind, launch: float, again: bool) -> HostSeconds:
    """Seconds of another program's host, which takes `launch` for an operator.

    `again` is true if recomputation repeats the whole forward.
    """
    count, experts = (_DENSE if stack.fused_attention else _UNFUSED), _EXPERTS * kind.has_experts
    ratios = 1.0, *_BACKWARD, 1.0 if again else _SELECTIVE / (count + experts)
    first, weight, both, repeated = (ratio * launch for ratio in ratios)
    ahead = first * count, weight * count, both * count, repeated * count
    behind = first * experts, weight * experts, both * experts, repeated * experts
    return HostSeconds(ahead, behind)


def counted_host_seconds(
    spec: RunSpec, kind: LayerKind, products: int, launch: Mapping[Hosting, float], repeated: Collection[str]
) -> HostSeconds:
    """Seconds of this program's host beside a GPU, whose operators are those that a dry run records.

    `products` are those of the forward; each has two in the backward. `launch` has the seconds of an operator
    that is eager, and of one that is compiled; `repeated` are the kinds of operators ('attention', 'matmul')
    that recomputation repeats beside memory-bound ones.
    """
    forward, backward = block_kernels(spec, kind)
    is_compiled = spec.train.compile and not kind.has_experts
    each, eager = launch["compiled" if is_compiled else "eager"], launch["eager"]
    attention = _ATTENTION[0] * eager
    again = attention * ("attention" in repeated) + products * eager * ("matmul" in repeated)
    ahead = (
        forward * each + products * eager + attention,
        backward * each + (products + _ATTENTION[1]) * eager,
        products * eager,
        forward * each + again,
    )
    return HostSeconds(ahead, (0.0, 0.0, 0.0, 0.0))
