"""One training step: the same for every layout, one device included."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from meshwright.checkpoint.save_plan import Tensors
from meshwright.checkpoint.weights import WeightParts, Weights, fill
from meshwright.comm.collectives import start_all_reduce, sum_scalars
from meshwright.comm.mesh import Mesh
from meshwright.data.loader import Batch
from meshwright.optim.clipping import Clipping
from meshwright.optim.lr_schedule import learning_rate
from meshwright.optim.offload import MomentMemory
from meshwright.optim.optimisers import OPTIMISER_CLASSES
from meshwright.parallel.fsdp_unit import UnitObserver
from meshwright.parallel.loss_normalization import (
    power_and_rest,
    weight_of_a_target,
)
from meshwright.parallel.microbatches import kinds_of_microbatches, microbatches, own_tokens
from meshwright.parallel.parallelize import initialise, parallelize, round_stored
from meshwright.parallel.precision import LossScale
from meshwright.parallel.quantised_weights import put_values
from meshwright.parallel.router_balance import LayerBalance
from meshwright.parallel.stale_gradients import DueGradients
from meshwright.parallel.step_part import StepBegin, StepEnd, StepPart
from meshwright.spec import RunSpec
from meshwright.spec.lora import is_adapter
from meshwright.spec.parameter_groups import given_names
from meshwright.train.cuda_graphs import step_of_microbatches
from meshwright.train.magnitudes import begin_magnitudes
from meshwright.train.memory_use import memory_bytes
from meshwright.train.nll import loss_and_count, own_targets
from meshwright.train.parts import Sources, parts_of
from meshwright.train.step_result import StepResult
from meshwright.train.step_sums import Sums, Totals

P = TypeVar("P", bound=StepPart)


class Trainer:
    """A decoder, its states and its optimiser on one rank of a mesh."""

    def __init__(
        self,
        spec: RunSpec,
        mesh: Mesh,
        observer: UnitObserver | None = None,
        memory: MomentMemory | None = None,
        sources: Sources | None = None,
    ) -> None:
        """`memory` is where the moments are, by default the place of `spec` without a run's folder."""
        self.memory_before = memory_bytes(mesh.device)
        """Bytes that this process held before the model was built: Python, its libraries, the corpus."""
        self.run_spec, self.run_mesh = spec, mesh
        if spec.step_groups > 1:
            spec, mesh = spec.of_step_group(), mesh.step_group or mesh
        self.spec, self.mesh = spec, mesh
        """Those of the ranks that take steps together."""
        built = parallelize(spec, mesh, observer)
        self.decoder, self.states, self.pipeline = built.decoder, built.states, built.pipeline
        self.balance, self.further, self.offload = built.balance, built.further, built.offload
        self.buffers, self.dropout = built.buffers, built.dropout
        self.microbatches = step_of_microbatches(spec, mesh, built)
        memory = memory or MomentMemory(spec.train, mesh.device, mesh.control)
        self.optimiser = OPTIMISER_CLASSES[spec.train.optimiser](self.states, spec, memory)
        self.parts = parts_of(self.run_spec, self.run_mesh, mesh, built, sources or Sources())
        """In the order in which they act."""
        self.clipping, self.due = self.part(Clipping), self.part(DueGradients)
        self._due_factor: float | None = None
        self.loss_scale = LossScale(spec.precision)
        self.rest = 1.0
        """1/N for N targets, divided by the power of two in it that is in the loss already."""
        self.sequences = spec.batch_sequences
        """Samples of the last batch, over all ranks."""
        self._targets: tuple[Batch | None, int] = None, 0
        """The batch that comes next, if it is known, with the targets of all ranks in it."""
        self._ahead: tuple[Batch, Batch] | None = None
        """The batch that comes next, and this rank's tokens of it on the device."""
        self.before_update: Callable[[], None] = lambda: None
        """Called before an update changes the state, of which copies may be under way."""

    @property
    def gradient_factor(self) -> float:
        """Factor from what the last backward left to gradients: `rest` divided by the loss scale."""
        return self.rest / self.loss_scale.value

    @property
    def applied_factor(self) -> float:
        """Factor from what `sums` left to the gradients that `apply` takes; 0 where none is due yet."""
        return self._due_factor or 0.0

    def initialise(self, weights: Weights | None = None) -> None:
        """Draw the initial weights, or take those given, rounded to the master format. Local: sends nothing.

        Raises `UserError` for weights that are damaged.
        """
        given = frozenset() if weights is None else given_names(self.spec)
        initialise(self.states, self.spec.model, self.spec.train.seed, given)
        if weights is not None:
            self._take(self.given, weights)
        begin_magnitudes(self.states, self.spec, weights, given)
        for part in self.parts:
            part.begin()

    def fill(self, weights: WeightParts) -> None:
        """Take this rank's part of a model's weights, rounded to what the run stores. Local.

        Raises `UserError` for weights that are damaged.
        """
        self._take(self.held, weights)

    def _take(self, held: Tensors, weights: WeightParts) -> None:
        fill(held, weights)
        put_values(self.states.units, held)
        round_stored(self.states)

    @property
    def given(self) -> Tensors:
        """This rank's parts of what a run reads that starts from a trained model, as `held`: with adapters,
        where it goes on from some."""
        names = given_names(self.spec)
        parameters = {name: each for name, each in self.states.parameters() if name in names}
        return {**parameters, **self.balance.biases()}

    @property
    def held(self) -> Tensors:
        """This rank's parts of a model's own parameters and routers' biases by name, without adapters; what
        is quantised as copies, which `put_values` stores."""
        parameters = {name: each for name, each in self.states.parameters() if not is_adapter(name)}
        return {**parameters, **self.balance.biases()}

    def part(self, kind: type[P]) -> P:
        """The part of a class. Raises StopIteration if the step has none."""
        return next(part for part in self.parts if isinstance(part, kind))

    @property
    def prefix(self) -> str:
        """Beginning of the names of what the ranks that step together have by themselves."""
        return "".join(part.prefix for part in self.parts)

    @contextmanager
    def model(self) -> Iterator[None]:
        """Compute with the run's model, where the weights that are trained are others."""
        with ExitStack() as stack:
            for part in self.parts:
                stack.enter_context(part.model())
            yield

    def models(self) -> Iterator[tuple[str, AbstractContextManager[None]]]:
        """(name, context that computes with it) of the weights that are evaluated, first the run's model.

        That has no name.
        """
        yield "", self.model()
        for part in self.parts:
            yield from part.models()

    def expect(self, batch: Batch) -> None:
        """Count the targets of a batch over all ranks, ahead of the step that takes it."""
        own = [self._own_targets(batch), *self.further.own_targets(batch)]
        targets, *further = sum_scalars(own, self.mesh.world)
        self._targets = batch, int(targets)
        self.further.expect_targets(further)

    @contextmanager
    def exact(self) -> Iterator[None]:
        """Compute gradients without bounds of messages, and with every call of the host: what is not a step
        of the run, and what is computed again."""
        with self.buffers.exact(), self.microbatches.unrecorded():
            yield

    def compile_stages(self, evaluate: bool) -> float:
        """Compile the blocks of all stages before the first step; every rank calls it. Returns its seconds.

        So the first step is as long as others, and a rank that compiles keeps none waiting that would take it
        for hung. `evaluate` compiles the forward without gradients too. No state changes. A run whose blocks
        are not compiled has nothing to do here.
        """
        if not self.spec.train.compile:
            return 0.0
        begun = time.perf_counter()
        with self.mesh.heartbeat.stays():
            for batch in kinds_of_microbatches(self.spec):
                micro = self.further.with_answers(batch, own_tokens(batch, self.mesh).to(self.mesh.device))
                self._compile(micro, evaluate)
        self.states.end_step()
        return time.perf_counter() - begun

    def _compile(self, micro: Batch, evaluate: bool) -> None:
        """Run forwards and the backward of a microbatch, of which nothing is kept."""
        whole = self.mesh.pipeline.size == 1  # as in a step, which releases parameters as it goes
        forward = self.pipeline.forward if whole else partial(self.pipeline.warm_up, training=False)
        if whole:
            self.states.begin_step(1)
            self.pipeline.run([micro])
            self.states.finish_step()
        else:
            self.pipeline.warm_up([micro], training=True)
        if evaluate:
            forward([micro])
        for context in (each for part in self.parts for each in part.forwards()):
            with context:
                forward([micro])

    def gradients(self, batch: Batch) -> Tensor:
        """Forward and backward of the step; leaves the summed gradients, without `gradient_factor`.

        Returns this rank's share of the global mean loss, a scalar in float64 on the device: the sum over all
        ranks is the loss. The number of the batch's targets is that of `expect`, or of the step before.
        """
        if self._targets[0] is not batch:
            self.expect(batch)
        power, self.rest = power_and_rest(weight_of_a_target(self._targets[1]))
        ahead, self._ahead = self._ahead, None
        own = ahead[1] if ahead and ahead[0] is batch else own_tokens(batch, self.mesh)
        with self.buffers.used():
            for part in self.parts:
                own = part.with_answers(batch, own)
            return self.backward(own, batch.tokens.shape[0] * self.spec.layout.data_ranks, power)

    def backward(self, own: Batch, sequences: int, power: float, micro_batch: int | None = None) -> Tensor:
        """Forward and backward of this rank's tokens `own` of a batch of `sequences` samples over all ranks.

        `power` is the factor of a target's loss, which with `rest` gives its weight, and `micro_batch` the
        samples of a microbatch, by default the run's; the rest is as in `gradients`.
        """
        micros = list(microbatches(own, micro_batch or self.spec.micro_batch, self.mesh.device))
        self.dropout.update = self.optimiser.updates
        self.states.begin_step(len(micros))
        self.sequences = sequences
        begin = StepBegin(self.sequences, self.loss_scale.value / self.rest)
        for part in self.parts:
            part.begin_step(begin)
        for stage in self.pipeline.stages.values():
            stage.target_weight = power * self.loss_scale.value
        losses = self.microbatches.run(micros, self._constants())
        if not losses or self.mesh.tensor.rank > 0:  # tensor ranks find the same loss
            return torch.zeros((), dtype=torch.float64, device=self.mesh.device)
        return torch.stack(losses).double().sum() * self.gradient_factor

    def _constants(self) -> Hashable:
        """Values of the host that the microbatches of this step are computed with."""
        weights = [stage.target_weight for stage in self.pipeline.stages.values()]
        return *weights, *(part.constants() for part in self.parts)

    def sums(
        self, loss: Tensor, following: Batch | None = None, failed: bool = False, stop: bool = False
    ) -> Sums:
        """The step's numbers over all ranks, given each rank's share of its loss: one sum on the device.

        Late gradients, which this step applies, are put in the place of its own before. Joined to the numbers
        are the targets of the `following` batch, the counts of the experts' balance, and the squares of each
        parameter's norm where that is clipped.
        """
        self._due_factor = self.due.exchange(self.gradient_factor)
        targets = self._own_targets(following) if following is not None else 0
        loss = self.buffers.judged(loss)
        found = torch.stack([self.states.squares(), loss])
        counted = torch.tensor([targets, failed, stop], dtype=found.dtype)
        numbers = torch.cat([found, counted.to(found.device, non_blocking=True)])
        more = [
            each for part in self.parts for each in part.own_numbers(self.gradient_factor, following)
        ] + self.clipping.own_squares()
        counts = self.balance.counted()
        own = torch.cat([numbers, *more]) if more else numbers
        joined = torch.cat([own, *(each.flatten() for each in counts)]) if counts else own
        start_all_reduce(joined, self.mesh.world, "scalars").wait()
        for each in counts:
            each.copy_(joined[len(own) :].view_as(each))
        if following is not None:
            self._ahead = following, own_tokens(following, self.mesh).to(self.mesh.device)
        return Sums(joined[: len(own)], following)

    def _totals(self, sums: Sums, read: Callable[[], list[float]]) -> tuple[Totals, bool]:
        """The numbers of `sums` when they have come, and whether the device has updated the parameters."""
        with self.mesh.heartbeat.waits("the device"):
            on_host = read()
        size, numbers = len(sums.on_device), len(Totals._fields)
        found = Totals(*on_host[:numbers])
        first = numbers
        for part in self.parts:
            part.take(on_host[first : first + part.numbers])
            first += part.numbers
        self.clipping.take_squares(on_host[first:size])
        updated = on_host[size:] == [1.0]
        if not math.isfinite(found.squares):  # a row's norm may be beyond fp32 where no element is
            (squares,) = sum_scalars([float(self.states.squares(exact=True))], self.mesh.world)
            found = found._replace(squares=squares)
        self._targets = sums.following, int(found.targets)
        return found, updated

    def step(
        self,
        batch: Batch,
        number: int,
        following: Batch | None = None,
        failed: bool = False,
        stop: Callable[[], bool] | None = None,
    ) -> StepResult:
        """Optimiser step `number` (from 1) on this rank's samples of the global batch.

        With the batch of the `following` step, that one needs no message before its forward. `failed`, and
        what `stop` returns after the backward, are reported to all ranks.
        """
        loss = self.gradients(batch)
        asked = stop is not None and stop()
        sums = self.sums(loss, following, failed, asked)
        rate = self._rate(number)
        read = self._totals(sums, self._start_update(sums, rate))
        if self.buffers.overflowed:  # nothing was updated
            for part in self.parts:
                part.retract()
            self.states.end_step()
            with self.exact():
                loss = self.gradients(batch)
            sums = self.sums(loss, following, failed, asked)
            read = self._totals(sums, self._start_update(sums, rate))
        return self._end(*read, number, rate)

    def _start_update(self, sums: Sums, rate: float) -> Callable[[], list[float]]:
        """Start to read the numbers of `sums`, and behind that the update where the device can decide on it.

        Then the device need not wait for the host. One more number is 1 if the device updates parameters.
        """
        self.before_update()
        if self.due.steps or not (self.clipping.on_device and self.optimiser.takes_divisor):
            return sums.start_read()
        squares, loss = sums.on_device[:2]
        divisor = self.clipping.divisor(squares, self.applied_factor)
        updates = (divisor * loss).mul_(0).eq_(0)  # 1 if both are finite, else 0
        read = sums.start_read(updates.view(1))
        self.optimiser.step_divided(rate, divisor, (1 - updates).float())
        return read

    def apply(self, sums: Sums, number: int, rate: float | None = None) -> StepResult:
        """Clip the gradients that `gradients` left, update the parameters, and drop the gradients.

        The device decides on the update, where it can, and the host on what the device has skipped. `rate` is
        the learning rate, by default that of step `number`.
        """
        rate = self._rate(number, rate)
        return self._end(*self._totals(sums, self._start_update(sums, rate)), number, rate)

    def _rate(self, number: int, given: float | None = None) -> float:
        """The learning rate of step `number`, or the one that is `given`, as the optimiser takes it."""
        rate = learning_rate(self.spec.train, number) if given is None else given
        return rate / self.spec.staleness_lr_divisor

    def _end(self, totals: Totals, updated: bool, number: int, rate: float) -> StepResult:
        """Update the parameters unless the device has `updated` them, and drop the gradients."""
        self.mesh.heartbeat.phase("optimiser")
        norm = math.sqrt(totals.squares) * self.applied_factor
        # A late gradient is judged by itself: the loss is that of a later one.
        finite = math.isfinite(norm) and (self.due.steps > 0 or math.isfinite(totals.loss))
        waiting = self._due_factor is None
        if updated:
            self.optimiser.updates += 1
        elif finite and not waiting:
            self.optimiser.step(rate, self.clipping.clip(norm, self.applied_factor))
        counted = finite and math.isfinite(totals.loss)
        end = StepEnd(number, finite, finite and not waiting, counted, int(totals.stops))
        for part in self.parts:
            part.after_update(end)
        scale = self.loss_scale.value
        self.loss_scale.update(finite)
        self.states.end_step()
        for part in self.parts:
            part.after_step(end)
        further, failures = self.further.mean, int(totals.failures)
        metrics = {key: value for part in self.parts for key, value in part.metrics().items()}
        return StepResult(
            totals.loss, norm, rate, finite, waiting, failures, end.stops, scale, further, metrics
        )

    def layers_balance(self) -> dict[int, LayerBalance]:
        """The balance of the last step in each layer with experts, of every stage, in order of layers."""
        return self.balance.statistics(self.sequences, self.spec.data.seq_len)

    def nll(self, batch: Batch) -> Tensor:
        """This rank's share of the negative log-likelihood and of the targets; see `nll`.

        Where a run has another loss, it is that one, and what it is divided by.
        """
        own = own_tokens(batch, self.mesh)
        for part in self.parts:
            own = part.with_held_out(batch, own)
        return loss_and_count(self.pipeline, self.spec.micro_batch, own, self._own_targets(batch))

    def _own_targets(self, batch: Batch) -> int:
        """This rank's share of the number that the loss of a batch is divided by."""
        counts = (part.own_count(batch) for part in self.parts)
        found = next((count for count in counts if count is not None), None)
        return own_targets(self.pipeline, batch) if found is None else found
