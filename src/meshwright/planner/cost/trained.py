"""The share of a stage's work and parameters that training takes where some parameters are frozen."""

from __future__ import annotations

from typing import NamedTuple

from meshwright.planner.cost.breakdown import PassSeconds, Seconds
from meshwright.planner.rank_view import embedding_is_trained, training_of
from meshwright.spec import RunSpec
from meshwright.spec.parameter_groups import frozen_names, run_parameters
from meshwright.spec.parameters import Parameter
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
    """Work of the backward, and elements that are frozen."""

    works: tuple[Work, ...]
    """In blocks of each of the model's kinds, in their order, in embeddings and in heads."""
    frozen_split: int = 0
    """Elements that tensor ranks share, of blocks without their routed experts."""
    frozen_whole: int = 0
    """Elements that each tensor rank holds."""
    frozen_experts: int = 0
    quantised_split: int = 0
    """Those of `frozen_split` that are stored in fewer bits."""
    quantised_whole: int = 0
    added_split: int = 0
    """Elements of adapters that tensor ranks share."""
    added_whole: int = 0
    added_experts: int = 0

    @property
    def embed(self) -> Work:
        """Work in the embedding."""
        return self.works[-2]

    @property
    def head(self) -> Work:
        """Work in the head."""
        return self.works[-1]

    def plus(self, other: Trained) -> Trained:
        """The sum of two stages."""
        works = (a.plus(b) for a, b in zip(self.works, other.works, strict=True))
        return Trained(
            tuple(works),
            self.frozen_split + other.frozen_split,
            self.frozen_whole + other.frozen_whole,
            self.frozen_experts + other.frozen_experts,
            self.quantised_split + other.quantised_split,
            self.quantised_whole + other.quantised_whole,
            self.added_split + other.added_split,
            self.added_whole + other.added_whole,
            self.added_experts + other.added_experts,
        )


def trained_in(spec: RunSpec, stage: Stage) -> Trained | None:
    """The work of a stage's backward; None where no parameter of the run is frozen."""
    if not frozen_names(spec):
        return None
    model, every = spec.model, run_parameters(spec)
    numbers = {kind: number for number, kind in enumerate(model.kinds)}
    works, frozen, added = [Work()] * (len(numbers) + 2), list[Parameter](), list[Parameter]()
    for layer in stage.layers:
        number = numbers[model.kind_of(layer)]
        work = Work(int(training_of(spec, layer).feed_forward), trained_share(spec, layer))
        works[number] = works[number].plus(work)
        frozen += [p for p in every[f"blocks.{layer}"] if not p.trainable]
        added += [adapter for p in every[f"blocks.{layer}"] for adapter in p.adapters]
    if stage.embed or (stage.head and model.head_embeds):
        works[-2] = Work(0, float(embedding_is_trained(spec)))
    if stage.head:
        works[-1] = Work(int(head_has_gradient(spec)), float(head_is_trained(spec)))
    return Trained(
        tuple(works),
        frozen_split=sum(p.size for p in frozen if p.split and not p.expert),
        frozen_whole=sum(p.size for p in frozen if not p.split and not p.expert),
        frozen_experts=sum(p.size for p in frozen if p.expert),
        quantised_split=sum(p.size for p in frozen if p.quantised is not None and p.split),
        quantised_whole=sum(p.size for p in frozen if p.quantised is not None and not p.split),
        added_split=sum(p.size for p in added if p.split),
        added_whole=sum(p.size for p in added if not p.split and not p.expert),
        added_experts=sum(p.size for p in added if p.expert),
    )
