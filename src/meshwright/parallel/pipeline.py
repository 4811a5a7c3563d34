"""Pipeline parallelism: the decoder cut into stages, run by the very lists that `meshwright.schedule` makes.

Splits        the decoder's units over pp ranks, one stage or more on each (Huang et al. 2019; Narayanan et
              al. 2021).
Wire          from stage to stage, each microbatch: N D b forward and N D b backward, for N tokens of a
              context rank (1 / tp of them with sequence sharding), D channels of b bytes to compute in.
              Nothing where both stages are on one rank. Once a step, the gradient of tied embeddings whose
              ends are on two ranks.
Saves         everything but what the own stages need; activations by the schedule: a rank holds those of as
              many microbatches as its list has under way (`schedule.check.peak`).

A list says what is computed and in which order; what is sent and received follows from it. A receive is
posted one action before it is needed, and a send is waited for when something has come back that proves
that it arrived, so both run beside the computation. Activations and gradients have a channel each: by kind,
messages between two ranks come in the order of sending. A split backward (zero bubble, Qi et al. 2023)
sends the input's gradient on before the weights' are computed (`later.py`).

One device is the same code: one stage, a list of F and B, and no message.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from meshwright.parallel.collectives import start_receive, start_send
from meshwright.parallel.later import Later, Work, together
from meshwright.parallel.mesh import Axis, Mesh, Pending
from meshwright.schedule import Action, Kind, Schedule
from meshwright.schedule.actions import source_of, target_of
from meshwright.schedule.flow import flow_of


class StageModule(Protocol):
    """What a rank computes of one stage."""

    target_weight: float
    """Factor of each target's loss, where the stage gives the loss."""

    def __call__(self, microbatch: Any, x: Tensor | None, /) -> Tensor:
        """The input of the next stage, or what the objective takes; `x` is from the stage before."""
        ...

    def empty(self, microbatch: Any) -> Tensor:
        """Room for what goes from stage to stage."""
        ...


class Watch:
    """What is told of each action that a rank computes; this one does nothing with it."""

    def before(self, action: Action) -> None:
        """An action is about to be computed."""

    def after(self, action: Action, given: Tensor | None, result: Tensor | None) -> None:
        """It was, of what a stage beside had `given`; a stage beside will have the result."""


class Pipeline:
    """Runs the stages of one rank.

    `make` gives the schedule for a number of microbatches; `begin` is told before each forward whether it is
    the last microbatch's; `take` gets each gradient that a schedule puts off. `peak` is the most activations
    (of one microbatch in one stage) that the last run held at a time.
    """

    def __init__(
        self,
        stages: Mapping[int, StageModule],
        mesh: Mesh,
        make: Callable[[int], Schedule],
        later: Later,
        begin: Callable[[bool], None],
        take: Callable[[nn.Parameter, Tensor], None],
    ) -> None:
        self.stages, self.mesh, self.later, self.begin, self.take = stages, mesh, later, begin, take
        self.make = lru_cache(make)
        self._proofs = lru_cache(lambda count: proofs(self.make(count), mesh.pipeline.rank))
        self.watch = Watch()
        self.peak = 0

    @property
    def has_end(self) -> bool:
        """Whether this rank has the last stage."""
        return max(self.stages) == self.make(1).stages - 1

    def run(self, microbatches: Sequence[Any], objective: Callable[[Tensor], Tensor]) -> None:
        """Forward and backward of every microbatch; `objective` makes the last stage's result a scalar."""
        schedule = self.make(len(microbatches))
        run = _Run(self, schedule, microbatches, objective, self._proofs(len(microbatches)))
        run.execute(schedule.actions[self.mesh.pipeline.rank])
        self.peak = run.peak

    @torch.no_grad()
    def forward(self, microbatches: Sequence[Any]) -> list[Tensor]:
        """What the last stage gives for each microbatch, on the rank that has it; nothing elsewhere.

        Stage by stage, all microbatches (breadth first).
        """
        found: list[Tensor] = []

        def keep(total: Tensor) -> Tensor:
            found.append(total)
            return total

        run = _Run(self, self.make(len(microbatches)), microbatches, keep, {})
        numbers = range(len(microbatches))
        run.execute([Action(Kind.F, stage, number) for stage in sorted(self.stages) for number in numbers])
        return found


def proofs(schedule: Schedule, rank: int) -> dict[int, list[int]]:
    """Which sends of a rank have arrived when it has received: position in its list -> positions of sends.

    A message from a rank that it sent after it had taken ours proves that ours arrived. Sends that nothing
    proves are in no list.
    """
    flow = flow_of(schedule)
    first, end = flow.starts[rank], flow.starts[rank + 1]
    found: dict[int, list[int]] = defaultdict(list)
    for sent in range(first, end):
        target = flow.target[sent]
        if not flow.crosses[sent]:
            continue
        for at in range(sent + 1, end):
            source = flow.source[at]
            if source > target and flow.rank_of[source] == flow.rank_of[target]:
                found[at - first].append(sent - first)
                break
    return dict(found)


class _Run:
    """One pass through a list of actions of this rank."""

    def __init__(
        self,
        pipeline: Pipeline,
        schedule: Schedule,
        microbatches: Sequence[Any],
        objective: Callable[[Tensor], Tensor],
        proofs: Mapping[int, Sequence[int]],
    ) -> None:
        self.of, self.schedule, self.proofs = pipeline, schedule, proofs
        self.microbatches, self.objective = microbatches, objective
        self.rank = pipeline.mesh.pipeline.rank
        self.held: dict[tuple[int, int], tuple[Tensor | None, Any]] = {}
        """(stage, microbatch) -> its input, and where its backward begins."""
        self.put_off: dict[tuple[int, int], list[Work]] = {}
        self.here: dict[Action, Tensor] = {}
        """What a stage of this rank computed for another one: by what waits for it, as F or B."""
        self.sent: dict[int, tuple[Pending, Tensor]] = {}
        self.peak = 0

    def execute(self, listed: Sequence[Action]) -> None:
        """Compute the actions in order."""
        coming = self._receive(listed[0]) if listed else None
        for at, action in enumerate(listed):
            given = self._wait(action, coming)
            coming = self._receive(listed[at + 1]) if at + 1 < len(listed) else None
            for number in self.proofs.get(at, ()):
                self.sent.pop(number)[0].wait()
            self.of.watch.before(action)
            result = self._compute(action, given)
            self.of.watch.after(action, given, result)
            if result is not None:
                self._send(at, action, result)
        for pending, _ in self.sent.values():
            pending.wait()

    # Messages ---------------------------------------------------------------------------------------

    def _channel(self, action: Action) -> tuple[Axis, int]:
        """The axis and the tag of what an action receives, or sends."""
        mesh = self.of.mesh
        return (mesh.pipeline, 0) if action.kind is Kind.F else (mesh.gradients, 1)

    def _receive(self, action: Action) -> tuple[Tensor, Pending] | None:
        """Begin to receive what an action waits for, if that comes from another rank."""
        stage = source_of(action, self.schedule.stages)
        if stage is None or (source := self.schedule.rank_of[stage]) == self.rank:
            return None
        room = self.of.stages[action.stage].empty(self.microbatches[action.microbatch])
        return room, start_receive(room, source, *self._channel(action))

    def _wait(self, action: Action, coming: tuple[Tensor, Pending] | None) -> Tensor | None:
        if coming is None:
            return self.here.pop(_waits(action), None)
        room, pending = coming
        pending.wait()
        return room

    def _send(self, at: int, action: Action, result: Tensor) -> None:
        stage = target_of(action, self.schedule.stages)
        assert stage is not None
        target = self.schedule.rank_of[stage]
        if target == self.rank:
            self.here[_waits(action._replace(stage=stage))] = result
            return
        result = result.contiguous()
        self.sent[at] = (start_send(result, target, *self._channel(action)), result)

    # Computing --------------------------------------------------------------------------------------

    def _compute(self, action: Action, given: Tensor | None) -> Tensor | None:
        """What the stage beside waits for, if one does."""
        place = (action.stage, action.microbatch)
        if action.kind is Kind.F:
            return self._forward(place, given)
        if action.kind is Kind.W:
            self._weights(place)
            return None
        if action.kind is Kind.B:
            return self._backward(place, given)
        with self.of.later.during() as put_off:
            self.put_off[place] = put_off
            return self._backward(place, given)

    def _forward(self, place: tuple[int, int], x: Tensor | None) -> Tensor | None:
        stage, number = place
        training = torch.is_grad_enabled()
        if training:
            self.of.begin(number == len(self.microbatches) - 1)
        x = x.requires_grad_() if training and x is not None else x
        out = self.of.stages[stage](self.microbatches[number], x)
        last = stage == self.schedule.stages - 1
        if last:
            out = self.objective(out)
        if training:
            # Of what is sent on only the graph is needed here.
            self.held[place] = x, out if last else torch.autograd.graph.get_gradient_edge(out)
            self.peak = max(self.peak, len(self.held.keys() | self.put_off.keys()))
        return None if last else out.detach()

    def _backward(self, place: tuple[int, int], grad: Tensor | None) -> Tensor | None:
        x, begin = self.held.pop(place)
        torch.autograd.backward([begin], [grad])
        return None if x is None else x.grad

    @torch.no_grad()
    def _weights(self, place: tuple[int, int]) -> None:
        for parameters, found in together(self.put_off.pop(place)):
            for parameter, grad in zip(parameters, found, strict=True):
                if parameter is not None and grad is not None:
                    self.of.take(parameter, grad)


def _waits(action: Action) -> Action:
    """The same for both kinds of action that wait for a gradient."""
    return action if action.kind is Kind.F else action._replace(kind=Kind.B)
