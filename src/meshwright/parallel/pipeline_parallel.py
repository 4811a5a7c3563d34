"""Pipeline parallelism: the decoder cut into stages, run by the very lists that `meshwright.schedule` makes.

Splits        the decoder's units over pp ranks, one stage or more on each (Huang et al. 2019; Narayanan et
              al. 2021).
Wire          from stage to stage, each microbatch: N D b forward and N D b backward, for N tokens of a
              context rank (1 / tp of them with sequence sharding), D channels of b bytes to compute in.
              Nothing where both stages are on one rank. Once a step, the gradient of tied embeddings whose
              ends are on two ranks.
Saves         everything but what the own stages need; activations by the schedule: a rank holds those of as
              many microbatches as its list has under way (`schedule.check.peak`).

A list says what is computed and in which order; what is sent and received follows from it, and when it is
posted and waited for (`schedule/posting.py`): what runs here are the operations of that posting, which are
replayed under NCCL's rules before the first step (`schedule/validate.py`). Messages go over lanes, on each of
which a rank only sends or only receives (`schedule/lanes.py`). A split backward (zero bubble, Qi et al. 2023)
sends the input's gradient on before the weights' are computed (`deferred_wgrad.py`).

One device is the same code: one stage, a list of F and B, and no message.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from itertools import product
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from meshwright.comm.collectives import start_receive, start_send
from meshwright.comm.mesh import Axis, Mesh
from meshwright.comm.traffic_counter import Pending
from meshwright.model.hooks import identity
from meshwright.parallel.deferred_wgrad import WeightGradStore, Work, weight_gradients
from meshwright.schedule import (
    Action,
    Kind,
    Operation,
    PostedKind,
    Posting,
    Schedule,
    check,
    forward_only,
    lane_rule,
    posting,
    replay,
)
from meshwright.schedule.actions import target_of


class StageModule(Protocol):
    """The computation of one pipeline stage."""

    target_weight: float
    """Factor of each target's loss, where the stage gives the loss."""

    def __call__(self, microbatch: Any, x: Tensor | None, /) -> Tensor:
        """The input of the next stage, or what the objective takes; `x` is from the stage before."""
        ...

    def empty(self, microbatch: Any) -> Tensor:
        """Room for what goes from stage to stage."""
        ...


class ActionHook:
    """Callbacks around each action that a rank computes; these do nothing."""

    def before(self, action: Action) -> None:
        """Called before an action is computed."""

    def after(self, action: Action, given: Tensor | None, result: Tensor | None) -> None:
        """Called after an action, with its input from and its result for a neighbouring stage, if any."""


class Pipeline:
    """Runs the stages of one rank.

    `make` gives the schedule for a number of microbatches; `begin` is told before each forward whether it is
    the last microbatch's; `take` gets each gradient that a schedule puts off. `peak` is the most activations
    (of one microbatch in one stage) that the last run held at a time. Nothing is trained in the stages before
    `first_trained`, which have no backward.
    """

    def __init__(
        self,
        stages: Mapping[int, StageModule],
        mesh: Mesh,
        make: Callable[[int], Schedule],
        store: WeightGradStore,
        begin: Callable[[bool], None],
        take: Callable[[nn.Parameter, Tensor | None], None],
        first_trained: int = 0,
    ) -> None:
        self.first_trained = first_trained
        self.stages, self.mesh, self.store, self.begin, self.take = stages, mesh, store, begin, take
        self.make = lru_cache(make)
        self._posting = lru_cache(self._checked_posting)
        self.watch = ActionHook()
        self.peak = 0

    @property
    def has_end(self) -> bool:
        """True if this rank holds the last stage."""
        return max(self.stages) == self.make(1).stages - 1

    def warm_up(self, microbatches: Sequence[Any], training: bool) -> None:
        """Run each stage of this rank on an input of zeros for each microbatch, with its backward if
        `training`.

        Nothing goes from stage to stage, and no parameter gets a gradient. A compiler then compiles all
        stages at the same time; without it, each is compiled when its first input comes, one after the other.
        The ranks that share a stage call this together.
        """
        for stage, microbatch in product(self.stages.values(), microbatches):
            x = torch.zeros_like(stage.empty(microbatch)).requires_grad_(training)
            with torch.set_grad_enabled(training):
                out = stage(microbatch, x)
            if training:
                torch.autograd.grad(out, x, torch.zeros_like(out))

    def _checked_posting(self, microbatches: int, training: bool) -> Posting:
        """This rank's operations of a step, or of a forward alone. Raises `ScheduleError` if ranks would
        hang."""
        schedule = self.make(microbatches)
        if training:
            check(schedule)
        else:
            schedule = forward_only(schedule)
            replay(schedule)
        return posting(schedule, self.mesh.pipeline.rank)

    def run(
        self,
        microbatches: Sequence[Any],
        objective: Callable[[Tensor], Tensor] = identity,
        last: bool = True,
    ) -> list[Tensor]:
        """Forward and backward of every microbatch; `objective` makes the last stage's result a scalar.

        `last` is False where further microbatches of the step come after these. Returns that scalar of each
        microbatch on the rank that holds the last stage; an empty list elsewhere.
        """
        run = _Run(self, microbatches, objective, last)
        run.execute(self._posting(len(microbatches), True))
        self.peak = run.peak
        return run.results

    @torch.no_grad()
    def forward(self, microbatches: Sequence[Any]) -> list[Tensor]:
        """The last stage's result for each microbatch, on the rank that holds it; an empty list elsewhere.

        Stage by stage, all microbatches (breadth first).
        """
        run = _Run(self, microbatches, identity)
        run.execute(self._posting(len(microbatches), False))
        return run.results


class _Run:
    """One pass through the operations of this rank."""

    def __init__(
        self,
        pipeline: Pipeline,
        microbatches: Sequence[Any],
        objective: Callable[[Tensor], Tensor],
        last: bool = True,
    ) -> None:
        self.of, self.schedule = pipeline, pipeline.make(len(microbatches))
        self.microbatches, self.objective, self.last = microbatches, objective, last
        self.rank = pipeline.mesh.pipeline.rank
        self._lane_of = lane_rule(self.schedule.ranks)
        self.held: dict[tuple[int, int], tuple[Tensor | None, Any]] = {}
        """(stage, microbatch) -> its input, and where its backward begins."""
        self.deferred: dict[tuple[int, int], list[Work]] = {}
        self.local: dict[Action, Tensor] = {}
        """Results that a stage of this rank computed for another of its stages, by the waiting action (F or
        B)."""
        self.received: dict[Action, tuple[Pending, Tensor]] = {}
        """By the action that needs it."""
        self.to_send: dict[Action, Tensor] = {}
        """Results that the next operation sends, by the action."""
        self.sent: dict[Action, Pending] = {}
        self.results: list[Tensor] = []
        self.peak = 0

    def execute(self, posting: Posting) -> None:
        """Carry out the operations in order."""
        for operation in posting:
            action = operation.action
            match operation.verb:
                case PostedKind.RECEIVE:
                    self._receive(operation)
                case PostedKind.RECEIVED:
                    self.received[action][0].wait()
                case PostedKind.COMPUTE:
                    self._compute(action)
                case PostedKind.SEND:
                    self._send(operation)
                case PostedKind.SENT:
                    self.sent.pop(action).wait()

    # Messages ---------------------------------------------------------------------------------------

    def _lane(self, action: Action, sender: int, receiver: int) -> tuple[Axis, int]:
        """The axis and the tag of a message."""
        return self.of.mesh.lanes[self._lane_of(action.kind is not Kind.F, sender, receiver)]

    def _receive(self, operation: Operation) -> None:
        action, sender = operation.action, operation.peer
        room = self.of.stages[action.stage].empty(self.microbatches[action.microbatch])
        pending = start_receive(room, sender, *self._lane(action, sender, self.rank))
        self.received[action] = pending, room

    def _send(self, operation: Operation) -> None:
        action, receiver = operation.action, operation.peer
        result = self.to_send.pop(action)
        pending = start_send(result, receiver, *self._lane(action, self.rank, receiver))
        self.sent[action] = pending

    # Computing --------------------------------------------------------------------------------------

    def _compute(self, action: Action) -> None:
        """Compute an action of what the neighbouring stage gave, and keep the result where it is needed."""
        given = self.local.pop(_waits(action), None)
        if action in self.received:
            _, given = self.received.pop(action)
        self.of.watch.before(action)
        result = self._result(action, given)
        self.of.watch.after(action, given, result)
        if result is None:
            return
        stage = target_of(action, self.schedule.stages)
        assert stage is not None
        if self.schedule.rank_of[stage] == self.rank:
            self.local[_waits(action._replace(stage=stage))] = result
        else:
            self.to_send[action] = result.contiguous()

    def _result(self, action: Action, given: Tensor | None) -> Tensor | None:
        """Compute an action; returns the result that a neighbouring stage needs, if any."""
        self.of.mesh.heartbeat.phase("forward" if action.kind is Kind.F else "backward")
        place = (action.stage, action.microbatch)
        if action.kind is Kind.F:
            return self._forward(place, given)
        if action.kind is Kind.W:
            self._weights(place)
            return None
        if action.kind is Kind.B:
            return self._backward(place, given)
        with self.of.store.during() as deferred:
            self.deferred[place] = deferred
            return self._backward(place, given)

    def _forward(self, place: tuple[int, int], x: Tensor | None) -> Tensor | None:
        stage, number = place
        training = torch.is_grad_enabled()
        if training:
            self.of.begin(self.last and number == len(self.microbatches) - 1)
        if x is not None and training and stage > self.of.first_trained:
            x.requires_grad_()
        out = self.of.stages[stage](self.microbatches[number], x)
        last = stage == self.schedule.stages - 1
        if last:
            out = self.objective(out)
            self.results.append(out.detach())
        if training and stage >= self.of.first_trained:
            # Of what is sent on only the graph is needed here.
            self.held[place] = x, out if last else torch.autograd.graph.get_gradient_edge(out)
            self.peak = max(self.peak, len(self.held.keys() | self.deferred.keys()))
        return None if last else out.detach()

    def _backward(self, place: tuple[int, int], grad: Tensor | None) -> Tensor | None:
        """The gradient of a stage's input; zeros for a stage before that has no backward.

        Such a stage learns from the message that its activations have come, as the schedule relies on.
        """
        stage, number = place
        if stage >= self.of.first_trained:
            x, begin = self.held.pop(place)
            torch.autograd.backward([begin], [grad])
            if stage > self.of.first_trained:
                assert x is not None
                return x.grad
        return (
            None if stage == 0 else torch.zeros_like(self.of.stages[stage].empty(self.microbatches[number]))
        )

    @torch.no_grad()
    def _weights(self, place: tuple[int, int]) -> None:
        for parameters, found in weight_gradients(self.deferred.pop(place)):
            for parameter, grad in zip(parameters, found, strict=True):
                if parameter.requires_grad:
                    self.of.take(parameter, grad)


def _waits(action: Action) -> Action:
    """The action with I written as B: both wait for the gradient from the next stage."""
    return action if action.kind is Kind.F else action._replace(kind=Kind.B)
