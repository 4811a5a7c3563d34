"""CUDA graphs: what a microbatch launches is recorded once, and then launched again by one call of the host.

A graph holds a microbatch's forward and backward with their messages, that of a step's first microbatch also
the gathers of parameters, and that of its last the reductions of gradients, and their norms. So a run has up
to three graphs: of the first microbatch, of the last, and of all between; and one, if a step has one
microbatch. They have one pool of memory in common, from which a step takes what it always takes, and which
nothing else uses between two steps.

A replay launches what was recorded, with the addresses and the numbers of that time (PyTorch's notes on CUDA
graphs, 2021; of a whole iteration, Megatron-LM's `full_cuda_graph`). So inputs are copied to the place that
the recorded microbatch read, gradients and norms are left in memory that no step frees, and a step with
other numbers of the host, such as another loss scale, is run without graphs, and recorded when it comes twice
in a row. A first run also makes what is made once: communicators, compiled kernels, whole parameters.

Saves         the host's time for all launches of a microbatch but one.
Takes         the gradients' memory during updates, too; and none of the pool is there for the optimiser.
"""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.comm.mesh import Mesh
from meshwright.comm.traffic_counter import TrafficCounter
from meshwright.data.loader import ON_DEVICE, Batch
from meshwright.parallel.data_parallel import DataParallel
from meshwright.parallel.parallelize import ParallelDecoder
from meshwright.parallel.pipeline_parallel import Pipeline
from meshwright.spec import RunSpec, UserError

MOST_CHANGES = 20
"""Steps in a row without a replay after which a run is told."""
Attributes = list[tuple[object, dict[str, Any]]]


class Graph(Protocol):
    """Work that was recorded."""

    def replay(self) -> None:
        """Launch it again."""


Capture = Callable[[Callable[[], None]], Graph]
"""Records what a function launches, which is not computed meanwhile."""


class CudaCapture:
    """Records CUDA graphs, which have one pool of memory."""

    def __init__(self) -> None:
        self._pool, self._stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream()

    def __call__(self, work: Callable[[], None]) -> Graph:
        graph = torch.cuda.CUDAGraph()
        mode = "thread_local"  # other threads pin memory of batches meanwhile, and write checkpoints
        try:
            with torch.cuda.graph(graph, self._pool, self._stream, mode):
                work()
        except (torch.OutOfMemoryError, dist.DistError):
            raise
        except RuntimeError as error:
            raise UserError(
                f"train.cuda_graphs: true, but a microbatch of this run cannot be captured: "
                f"{str(error).splitlines()[0]}; `meshwright dryrun --device cuda` names the operator; give "
                f"train.cuda_graphs = false"
            ) from error
        return graph


class StepOfMicrobatches:
    """Runs the microbatches of a step on one rank, and sums their gradients over all ranks."""

    def __init__(self, mesh: Mesh, pipeline: Pipeline, states: DataParallel) -> None:
        self._mesh, self._pipeline, self._states = mesh, pipeline, states

    def run(self, micros: Sequence[Batch], constants: Hashable) -> list[Tensor]:
        """Forward and backward of all microbatches; returns their losses where the last stage is.

        `constants` are the values of the host that they are computed with.
        """
        losses = self._pipeline.run(micros)
        self._finish()
        return losses

    def _finish(self) -> None:
        self._mesh.heartbeat.phase("reduce")
        self._states.finish_step()

    @contextmanager
    def unrecorded(self) -> Iterator[None]:
        """Context in which the host calls every operator, and nothing is recorded."""
        yield

    def forget(self) -> None:
        """Drop what was recorded: graphs end before the communicators of their messages do."""


@dataclass(frozen=True)
class _Recorded:
    """The graph of a microbatch, and what the host has to know when it has been launched."""

    graph: Graph
    inputs: Batch
    """Read by the graph."""
    loss: Tensor
    """Written by the graph."""
    changed: Attributes
    """Attributes that the host's part of the microbatch changes, with their values after it."""
    calls: list[tuple[str, str, float]]
    """(axis, operation, bytes) of its messages."""


class GraphsOfMicrobatches(StepOfMicrobatches):
    """Runs microbatches by CUDA graphs."""

    def __init__(
        self, mesh: Mesh, pipeline: Pipeline, states: DataParallel, new_capture: Callable[[], Capture]
    ) -> None:
        """`new_capture` is asked for the one of all graphs that are there together."""
        super().__init__(mesh, pipeline, states)
        self._new_capture, self._recording = new_capture, True
        self._capture: Capture | None = None
        self._before: Hashable = None
        """The values that the last step was computed with."""
        self._changes = 0
        """Steps in a row that were computed with other values than the one before."""
        self._graphs: dict[tuple[bool, bool], _Recorded] = {}
        """By whether a microbatch is the first of its step, and the last."""

    def run(self, micros: Sequence[Batch], constants: Hashable) -> list[Tensor]:
        """Forward and backward of all microbatches, by graphs if the step before was computed with the same
        `constants`."""
        if not self._recording:
            return super().run(micros, constants)
        shapes = {micro.tokens.shape for micro in micros}
        now = constants, len(micros) > 1, *shapes
        before, self._before = self._before, now
        if now != before or len(shapes) > 1:
            self.forget()
            self._tell_changes()
            return super().run(micros, constants)
        self._changes = 0
        for unit in self._states.units:  # what is gathered is gathered in the first graph, always
            unit.settle()
            unit.expire()
        end = len(micros) - 1
        return [self._launch(micro, number == 0, number == end) for number, micro in enumerate(micros)]

    @contextmanager
    def unrecorded(self) -> Iterator[None]:
        before, self._recording = self._recording, False
        try:
            yield
        finally:
            self._recording = before

    def forget(self) -> None:
        self._graphs, self._capture = {}, None

    def _tell_changes(self) -> None:
        self._changes += 1
        if self._changes == MOST_CHANGES and self._mesh.rank == 0:
            warnings.warn(
                f"train.cuda_graphs: true, but each of {MOST_CHANGES} steps in a row has other numbers "
                f"than the one before it, such as its targets, and none is replayed; give samples of as many "
                f"targets each, or train.cuda_graphs = false",
                stacklevel=2,
            )

    def _launch(self, micro: Batch, first: bool, last: bool) -> Tensor:
        """Compute a microbatch by its graph, which is recorded if there is none yet; returns its loss."""
        heartbeat = self._mesh.heartbeat
        heartbeat.phase("forward")
        recorded = self._graphs.get((first, last))
        if recorded is not None:
            _restore(recorded.changed)
        else:
            recorded = self._graphs[first, last] = self._record(micro, last)
        for call in recorded.calls:
            self._mesh.wire.record(*call)
        torch._foreach_copy_(_on_device(recorded.inputs), _on_device(micro))
        recorded.graph.replay()
        if last:
            heartbeat.phase("reduce")
        return recorded.loss.clone()

    def _record(self, micro: Batch, last: bool) -> _Recorded:
        rooms = {name: getattr(micro, name).clone() for name in ON_DEVICE}
        inputs, losses = replace(micro, **rooms), list[Tensor]()

        def work() -> None:
            losses.extend(self._pipeline.run([inputs], last=last))
            if last:
                self._finish()
            else:
                self._states.settle()

        self._capture = self._capture or self._new_capture()
        before = _attributes(self._states)
        with _calls(self._mesh.wire) as calls:
            graph = self._capture(work)
        (loss,) = losses
        return _Recorded(graph, inputs, loss, _changed(before, _attributes(self._states)), calls)


def _on_device(micro: Batch) -> list[Tensor]:
    return [getattr(micro, name) for name in ON_DEVICE]


@contextmanager
def _calls(wire: TrafficCounter) -> Iterator[list[tuple[str, str, float]]]:
    """Context in which messages are listed and not counted.

    Nor are they logged: what watches the log asks from another thread whether they have ended, and a message
    that is recorded never does.
    """
    calls: list[tuple[str, str, float]] = []
    heartbeat = wire.heartbeat
    before = wire.bytes, wire.calls, wire.log, heartbeat.collectives
    wire.bytes, wire.calls, wire.log, heartbeat.collectives = {}, {}, calls, None
    try:
        yield calls
    finally:
        wire.bytes, wire.calls, wire.log, heartbeat.collectives = before


# What the host knows of a step --------------------------------------------------------------------------


def _attributes(states: DataParallel) -> Attributes:
    objects = states.of_gradients()
    return [(each, {name: _kept(value) for name, value in vars(each).items()}) for each in objects]


def _kept(value: Any) -> Any:
    """The value, or a copy of what may be changed in place."""
    return copy(value) if isinstance(value, list | set | dict | deque) else value


def _changed(before: Attributes, after: Attributes) -> Attributes:
    """The attributes whose values after are others than before."""
    found = []
    for (each, earlier), (_, later) in zip(before, after, strict=True):
        own = {name: value for name, value in later.items() if not _same(earlier.get(name), value)}
        if own:
            found.append((each, own))
    return found


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, list | deque) and isinstance(other, list | deque):  # perhaps of tensors
        return len(one) == len(other) and all(a is b for a, b in zip(one, other, strict=True))
    return one is other or (isinstance(one, set | dict | bool | int | str) and bool(one == other))


def _restore(attributes: Attributes) -> None:
    for each, values in attributes:
        vars(each).update({name: _kept(value) for name, value in values.items()})


def step_of_microbatches(spec: RunSpec, mesh: Mesh, built: ParallelDecoder) -> StepOfMicrobatches:
    """The way in which a run's microbatches are run. Raises `UserError` for graphs on a CPU."""
    if not spec.train.cuda_graphs:
        return StepOfMicrobatches(mesh, built.pipeline, built.states)
    if mesh.device.type != "cuda":
        raise UserError(
            "train.cuda_graphs: true has no effect on a CPU, which launches nothing; give "
            "train.cuda_graphs = false"
        )
    return GraphsOfMicrobatches(mesh, built.pipeline, built.states, CudaCapture)
