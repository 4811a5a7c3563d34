"""Parts: what a training step has beside its model, its optimiser and its loss scale.

A part keeps state of its own, and acts at fixed moments of a step. Training, checkpoints, dry runs, `verify`
and what computes gradients aside go through `Trainer.parts`, and name no single one.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor
from typing_extensions import TypedDict

from meshwright.parallel.flat_param import Stored
from meshwright.parallel.fsdp_unit import Unit


class NoFields(TypedDict):
    """The fields of a part that adds none to the state of a checkpoint."""


@dataclass(frozen=True)
class StepBegin:
    """Numbers of a step that begins."""

    sequences: int
    """Samples of all ranks."""
    loss_factor: float
    """Factor on losses beside that of targets, which `Trainer.gradient_factor` takes out of gradients."""


@dataclass
class StepEnd:
    """Outcome of a step."""

    number: int
    """From 1."""
    finite: bool
    """False if the gradients that were due, or the loss that goes with them, were not finite."""
    updated: bool
    """True if parameters were updated."""
    counted: bool
    """True if the loss of the step's own tokens, too, was finite."""
    stops: int
    """Ranks that were asked to stop, as far as is known; a part that hears of more adds them."""


class StepPart:
    """A part of a step on one rank; each method does nothing by default."""

    component: ClassVar[str] = ""
    """Component of memory that `held` counts under, as dry runs call it."""
    Fields: ClassVar[type] = NoFields
    """The TypedDict of the fields that `state` adds to a checkpoint's."""
    numbers: int = 0
    """Numbers that a step sums over all ranks because of the part."""
    prefix: str = ""
    """Beginning of the names of what the ranks that step with this one have by themselves."""

    # Step ---------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Begin with the weights that were drawn or loaded, without a state from before."""

    def begin_step(self, begin: StepBegin) -> None:
        """Called before the first forward of a step."""

    def constants(self) -> Hashable:
        """Values of the host, but for the step's own, that change what a microbatch of this step computes."""
        return ()

    def with_answers(self, batch: Any, own: Any) -> Any:
        """`own`, this rank's tokens of a batch (`data.loader.Batch`), with what the part adds to them."""
        return own

    def retract(self) -> None:
        """Called where a step is computed again, before that: forget what the first time has left."""

    def after_update(self, end: StepEnd) -> None:
        """Called after the update of the parameters, or where there was none; gradients are there still."""

    def after_step(self, end: StepEnd) -> None:
        """Called when gradients have been dropped."""

    def with_held_out(self, batch: Any, own: Any) -> Any:
        """`own`, this rank's tokens of a batch that is held out, with the loss that it is judged by."""
        return own

    def own_count(self, batch: Any) -> int | None:
        """This rank's share of the number that a batch's loss is divided by; None where targets count."""
        return None

    def own_numbers(self, factor: float, following: Any) -> list[Tensor]:
        """This rank's share of `numbers` that are summed over all ranks at the end of a step, in float64.

        Gradients, and losses like theirs, take a `factor`; `following` is the next batch, if it is known.
        """
        return []

    def take(self, numbers: Sequence[float]) -> None:
        """Take `own_numbers`, summed over all ranks."""

    def metrics(self) -> Mapping[str, float]:
        """Fields that the part adds to the metrics of the last step."""
        return {}

    def held_out_metrics(self) -> Mapping[str, float]:
        """Fields that the part adds to a validation's, of what was held out since it was last asked.

        All ranks of the mesh call this together.
        """
        return {}

    def forwards(self) -> Iterable[AbstractContextManager[None]]:
        """Contexts in which a step takes a forward without gradients beside its own: a compiler sees them
        first."""
        return ()

    # State --------------------------------------------------------------------------------------------

    def tensors(self) -> Iterable[tuple[str, Stored]]:
        """(name in a checkpoint, tensor) of all that a resume needs, in this part's memory."""
        return ()

    def named(self, tensors: dict[str, Stored], updates: int) -> dict[str, Stored]:
        """All tensors of a checkpoint by name, where `tensors` are those of the ranks that step together.

        Their optimiser has taken so many `updates`.
        """
        return tensors

    def state(self) -> Mapping[str, Any]:
        """The rest of what a resume needs, as fields of a checkpoint's state, in JSON."""
        return {}

    def form(self) -> object:
        """Value on which the names of `tensors` depend, equal on all ranks."""
        return None

    def check(self, state: Mapping[str, Any], where: str) -> None:
        """Raise `UserError` if the run cannot go on from a checkpoint of this state, named `where`."""

    def expect(self, state: Mapping[str, Any]) -> None:
        """Make room for the tensors of a checkpoint of this state, which are loaded next."""

    def missing(self, state: Mapping[str, Any]) -> tuple[str, ...]:
        """Beginnings of the names of `tensors` that a checkpoint of this state does not have."""
        return ()

    def names_in(self, state: Mapping[str, Any], tensors: dict[str, Stored]) -> dict[str, Stored]:
        """`tensors`, of `named`, by the names that they have in a checkpoint of this state."""
        return tensors

    def updates_in(self, state: Mapping[str, Any], updates: int) -> int:
        """Updates of this rank's optimiser in a checkpoint of this state, whose tensors have been loaded.

        `updates` are those that the state tells.
        """
        return updates

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a checkpoint's state, whose tensors have been loaded."""

    # What others ask ----------------------------------------------------------------------------------

    def model(self) -> AbstractContextManager[None]:
        """Compute with the run's model, where the weights that are trained are others."""
        return nullcontext()

    def models(self) -> Iterator[tuple[str, AbstractContextManager[None]]]:
        """(name, context that computes with it) of further weights that are evaluated beside the run's."""
        return iter(())

    def averages(self) -> Iterator[tuple[str, Unit, Tensor]]:
        """(kind, unit, flat buffer) of numbers that belong to the unit's parameters one by one."""
        return iter(())

    def held(self) -> Iterator[tuple[Unit | None, Tensor]]:
        """Tensors that live across steps, each with its unit, if it is of one."""
        return iter(())

    def agreed(self) -> Iterator[tuple[str, Unit | None, Tensor]]:
        """(words and name, unit, flat tensor) of what is equal on all ranks of `replicate`, though they step
        apart; the names of a unit's parameters are left to it."""
        return iter(())

    def of_gradients(self) -> tuple[list[object], list[Tensor]]:
        """Objects whose attributes, and tensors whose values, change while gradients are computed."""
        return [], []

    def assume(self, number: int) -> None:
        """Take the state that steps before step `number` leave in a run: for dry runs."""

    def flops_per_token(self) -> float:
        """Model FLOPs of a token that the part adds to those of the run's model."""
        return 0.0
