"""The share of a stage's work and parameters that training takes where some parameters are frozen."""

from __future__ import annotations

from typing import NamedTuple

from meshwright.planner.cost.breakdown import PassSeconds, Seconds
from meshwright.planner.rank_view import embedding_is_trained, training_of
from meshwright.spec import RunSpec
from meshwright.spec.parameter_groups import frozen_names, run_parameters
from meshwright.spec.stages import Stage
from meshwright.spec.training_flops import head_has_gradient, head_is_trained, trained_share


class Work(NamedTuple):
    """Modules of one kind in a stage whose backward is computed, and those whose weights' gradients are.

    The latter are not whole where some of a module's matrices are frozen.
    """

    input: int = 0
    weight: float = 0.0

    def plus(self, other: Work) -> Work:
        """The sum of two stages."""
        return Work(self.input + other.input, self.weight + other.weight)

    def of(self, count: int, each: PassSeconds) -> PassSeconds:
        """Seconds of `count` modules that take `each` where everything is trained."""
        nothing = Seconds()
        return PassSeconds(
            nothing.plus(each.forward, count),
            nothing.plus(each.input, self.input),
            nothing.plus(each.weight, self.weight),
            nothing.plus(each.again, self.input),
        )


class Trained(NamedTuple):
    """Work of the backward by kind of module, and elements that are frozen."""

    dense: Work = Work()
    routed: Work = Work()
    embed: Work = Work()
    head: Work = Work()
    frozen_split: int = 0
    """Elements that tensor ranks share, of blocks without their routed experts."""
    frozen_whole: int = 0
    """Elements that each tensor rank holds."""
    frozen_experts: int = 0

    def plus(self, other: Trained) -> Trained:
        """The sum of two stages."""
        return Trained(
            self.dense.plus(other.dense),
            self.routed.plus(other.routed),
            self.embed.plus(other.embed),
            self.head.plus(other.head),
            self.frozen_split + other.frozen_split,
            self.frozen_whole + other.frozen_whole,
            self.frozen_experts + other.frozen_experts,
        )


def trained_in(spec: RunSpec, stage: Stage) -> Trained | None:
    """The work of a stage's backward; None where no parameter of the run is frozen."""
    if not frozen_names(spec):
        return None
    every, found = run_parameters(spec), Trained()
    for layer in stage.blocks:
        listed = every[f"blocks.{layer}"]
        work = Work(int(training_of(spec, layer).feed_forward), trained_share(spec, layer))
        routed, frozen = spec.model.has_experts(layer), [p for p in listed if not p.trainable]
        block = Trained(
            dense=Work() if routed else work,
            routed=work if routed else Work(),
            frozen_split=sum(p.size for p in frozen if p.split and not p.expert),
            frozen_whole=sum(p.size for p in frozen if not p.split and not p.expert),
            frozen_experts=sum(p.size for p in frozen if p.expert),
        )
        found = found.plus(block)
    if stage.embed:
        found = found._replace(embed=Work(0, float(embedding_is_trained(spec))))
    if stage.head:
        found = found._replace(head=Work(int(head_has_gradient(spec)), float(head_is_trained(spec))))
    return found
