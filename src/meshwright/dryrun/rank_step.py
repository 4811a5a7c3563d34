"""The real training step of one rank of a world of any size, without the world and without memory.

The step is the program's own: `parallelize`, the pipeline's schedule, the optimiser. Three things are
replaced: the device is fake (`memory_tracker.py`), process groups send nothing, and routers send equally many
tokens to every expert, since the routing of real data is not known.
"""

from __future__ import annotations

import time
import weakref
from collections import Counter, defaultdict
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, UntypedStorage

from meshwright.checkpoint.weights import Wanted, held_rectangles
from meshwright.comm.mesh import Mesh, build_mesh
from meshwright.comm.process_groups import Groups
from meshwright.data.loader import Batch
from meshwright.dryrun.even_routing import route_evenly
from meshwright.dryrun.fake_world import FakeGroups, FakeMoments, fake_batch, fake_world
from meshwright.dryrun.fused_products import fused_products
from meshwright.dryrun.memory_tracker import COLLECTIVES, MESSAGES, PLAIN, FakeMemory
from meshwright.dryrun.trace import Trace
from meshwright.dryrun.trace_counts import waits
from meshwright.fake_cuda import library
from meshwright.fake_cuda.inductor import CompiledCode, compiled_code
from meshwright.fake_cuda.runtime import RUNTIME
from meshwright.hardware.attention_backend import (
    AttentionBackends,
    AttentionGpu,
    attention_backends,
    check_release,
)
from meshwright.kernels import attention_cpu
from meshwright.kernels.attention_backend import preferred
from meshwright.kernels.triton_operator import has_triton
from meshwright.parallel import fused_comm_ops
from meshwright.parallel.activation_offload import HostMemory
from meshwright.parallel.flat_param import ParamSlot
from meshwright.parallel.fsdp_unit import BufferEvent, Unit, UnitObserver
from meshwright.parallel.pipeline_parallel import ActionHook
from meshwright.planner.rank_view import place_of
from meshwright.planner.traffic.exchange import fullest_step
from meshwright.schedule import Action, Kind
from meshwright.spec import RunSpec
from meshwright.train.parts import COMPONENTS_OF_PARTS
from meshwright.train.step import Trainer

PARAMETERS, MASTERS, GRADIENTS, OPTIMISER = "parameters", "masters", "gradients", "optimiser"
BATCH, ACTIVATIONS, BUFFERS = "batch", "activations", "buffers"
STATES = (PARAMETERS, MASTERS, GRADIENTS, OPTIMISER, *COMPONENTS_OF_PARTS)
COMPONENTS = (*STATES, BATCH, ACTIVATIONS, BUFFERS, MESSAGES, PLAIN)


@dataclass(frozen=True)
class Rehearsal:
    """Resources of one rank's step: bytes by component, by part of the model, and on the wire."""

    peak: int
    """Peak bytes of the step."""
    by_component: dict[str, int]
    """The peak's bytes by `COMPONENTS`."""
    by_module: dict[str, dict[str, int]]
    """The peak's bytes by unit of the model, then component; "" stands for no unit."""
    most: dict[str, int]
    """Peak bytes of each component by itself."""
    wire: dict[tuple[str, str], float]
    """(axis, operation) -> bytes that the rank sends."""
    calls: dict[tuple[str, str], int]
    counts: dict[str, dict[str, float]]
    """By "setup" and "step": groups, messages, waits (see `_counts`), and in "step" "kernels", operators that
    it launches on the device, and "kernels_a_block", those of the block with most, a microbatch; with
    compiled blocks "graphs", too, of which there is one for all blocks where they are of one kind."""
    offloaded: int
    """Peak bytes of activations in the host's memory."""
    held: Wanted
    """The rectangles of parameters that the rank stores, by name."""

    @property
    def states(self) -> int:
        """Parameters, gradients and what the optimiser needs, each at its most."""
        return sum(self.most[kind] for kind in STATES)


def rehearse(spec: RunSpec, rank: int, device: torch.device, trace: Trace | None = None) -> Rehearsal:
    """Run one step (`step_of`) as rank `rank` of the layout's world, on a device that is faked.

    `trace` gets the events of the step, where this process has the faked GPU, for which blocks are compiled
    if the run says so. Elsewhere they are run as they are: no compiler writes code for a device that is not
    there. No default process group may be there.
    """
    number, recording = step_of(spec, rank), _Recording(trace)
    spec = _run_of(spec, number, compiles(spec), trace is not None)
    device = torch.device(device.type, device.index or 0)
    programs = fused_comm_ops.BODIES | ({} if trace is None else fused_products(trace))
    memory = FakeMemory(device, attention_cpu.BODIES, trace, programs)
    attention = preferred(assumed_backends(spec, device))
    with fake_world(spec.layout.world_size, rank), recording.streams(), attention:
        heads, experts = spec.model.kv_heads, spec.model.moe is not None
        groups, started = FakeGroups(device.type), time.process_time()
        mesh = build_mesh(spec.layout, device, heads, groups, experts, spec.step_groups > 1)
        assert mesh is not None
        recording.hear(mesh, groups)
        recording.pool(memory)
        with recording.compiler(spec, memory) as code, memory:
            observer, host = _BufferAccount(memory, spec.microbatches > 1), _FakeHost(memory)
            trainer = Trainer(spec, mesh, observer, FakeMoments(spec.train, device, mesh.control))
            held = held_rectangles(trainer.given)
            for part in trainer.parts:
                part.assume(number)
            if trainer.offload is not None:
                trainer.offload.host = host
            _tell(memory, trainer)
            first, second = fake_batch(spec), fake_batch(spec)
            trainer.expect(first)
            setup = before = recording.with_waits(_counts(mesh, groups, memory, started))
            memory.restart()
            if spec.train.cuda_graphs:
                first, second, number = _record_graphs(trainer, memory, first, second, number)
                before = _counts(mesh, groups, memory, started)
            for each in (memory.operators.clear, mesh.wire.clear, recording.forget):
                each()
            started = time.process_time()
            trainer.step(first, number, following=second)
            _mark_parts(memory, trainer)
            step = _counts(mesh, groups, memory, started)
        graphs = {} if code is None else {"graphs": code.graphs}
    step = recording.with_waits(step | {key: step[key] - before[key] for key in _SUMS})
    counts = {"setup": setup, "step": step | _kernels(memory, spec.microbatches) | graphs}
    return _rehearsal(memory, mesh, counts, host.most, held)


def assumed_backends(spec: RunSpec, device: torch.device) -> AttentionBackends:
    """The kernels of attention on a device: of packages those that the run asks for by name."""
    if device.type != "cuda":
        return attention_backends(spec, None)
    chosen, capability = spec.train.attention_backend, torch.cuda.get_device_capability(device)
    check_release(chosen, capability, torch.cuda.get_device_name(device))
    return attention_backends(spec, AttentionGpu(capability, frozenset({chosen})))


def compiles(spec: RunSpec) -> bool:
    """True if the dry run of a run in this process compiles blocks: for the faked GPU, with Triton."""
    return spec.train.compile and library.is_loaded() and has_triton()


def _run_of(spec: RunSpec, number: int, compiled: bool, graphs: bool) -> RunSpec:
    """The run whose step `number` is run, with blocks that are compiled, or without, and so for graphs."""
    alone = {"compile": compiled, "cuda_graphs": graphs and spec.train.cuda_graphs}
    length = {"tokens": None, "epochs": None, "steps": 2 * number + STEPS_BEFORE_GRAPHS}
    return spec.model_copy(update={"train": spec.train.model_copy(update=alone | length)})


STEPS_BEFORE_GRAPHS = 2
"""Steps of a run before one that replays graphs alone: one without, and one in which they are recorded."""


def _record_graphs(
    trainer: Trainer, memory: FakeMemory, first: Batch, second: Batch, number: int
) -> tuple[Batch, Batch, int]:
    """Take the steps after which a run replays graphs; returns the batches and the number of the next step.

    The peak is that of the step in which they are recorded: what they take, they take once.
    """
    for _ in range(STEPS_BEFORE_GRAPHS):
        memory.restart()
        trainer.step(first, number, following=second)
        first, second, number = second, fake_batch(trainer.spec), number + 1
        trainer.expect(first)  # else it has the one target that is read of a device without values
    return first, second, number


class _Recording:
    """The record of a step in a trace, where there is one: what it hears of, and the waits that are in it."""

    def __init__(self, trace: Trace | None) -> None:
        self._trace = trace

    def streams(self) -> AbstractContextManager[None]:
        """A context in which the trace hears of streams and events."""
        return nullcontext() if self._trace is None else RUNTIME.observed(self._trace)

    def pool(self, memory: FakeMemory) -> None:
        """Let the memory hear of what is captured."""
        if self._trace is not None:
            self._trace.capture = lambda begins: (
                memory.begin_capture() if begins else memory.end_capture(ACTIVATIONS)
            )

    def compiler(self, spec: RunSpec, memory: FakeMemory) -> AbstractContextManager[CompiledCode | None]:
        """A context in which blocks can be compiled, if the run compiles any."""
        return compiled_code(memory.launched) if spec.train.compile else nullcontext()

    def hear(self, mesh: Mesh, groups: FakeGroups) -> None:
        """Let the trace hear of collectives and of phases."""
        mesh.wire.observer = self._trace
        if self._trace is not None:
            groups.heartbeat.on_phase = self._trace.on_phase

    def forget(self) -> None:
        """Begin anew."""
        if self._trace is not None:
            self._trace.events.clear()

    def with_waits(self, counts: dict[str, float]) -> dict[str, float]:
        """Counts with the waits of the host that are in the trace, which has all of them."""
        if self._trace is None:
            return counts
        return counts | {"device_waits": len([*waits(self._trace.events)])}


def _kernels(memory: FakeMemory, microbatches: int) -> dict[str, float]:
    """Operators that a step launches, and those of the block with most, a microbatch."""
    blocks = [count for name, count in memory.operators.items() if name.startswith("blocks.")]
    most = round(max(blocks, default=0) / microbatches, 2)
    return {"kernels": sum(memory.operators.values()), "kernels_a_block": most}


def _rehearsal(
    memory: FakeMemory, mesh: Mesh, counts: dict[str, dict[str, float]], offloaded: int, held: Wanted
) -> Rehearsal:
    by_module: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for storage in memory.at_peak():
        by_module[storage.module][storage.kind] += storage.size
    return Rehearsal(
        memory.peak,
        _by_component(sum(by_module.values(), Counter())),
        {module: _by_component(kinds) for module, kinds in by_module.items()},
        _by_component(memory.most),
        dict(mesh.wire.bytes),
        dict(mesh.wire.calls),
        counts,
        offloaded,
        held,
    )


def step_of(spec: RunSpec, rank: int) -> int:
    """The number of the step that is run: the first, or where replicas step apart one that begins an
    exchange, and after which most bytes of exchanges are under way."""
    return fullest_step(place_of(spec, rank // spec.layout.strides["pp"] % spec.layout.pp))


# Counts -------------------------------------------------------------------------------------------------

_SUMS = ("groups", "host_collectives", "device_waits")
"""Counts that go on from the set-up to the step; the others begin anew."""


def _counts(mesh: Mesh, groups: Groups, memory: FakeMemory, started: float) -> dict[str, float]:
    """Counts of what a rank has constructed, sent and waited for so far.

    `groups` are constructions of process groups, `host_collectives` rounds of the control plane,
    `collectives` those on devices, messages included, and `device_waits` reads of the host that wait for the
    device. `seconds` are of the processor, since `started`; faked tensors take most of them.
    """
    return {
        "groups": groups.constructions,
        "host_collectives": mesh.control.rounds + mesh.background.rounds,
        "device_waits": memory.waits,
        "collectives": sum(mesh.wire.calls.values()),
        "seconds": time.process_time() - started,
    }


class _FakeHost(HostMemory):
    """The host's memory as a number of bytes: nothing is allocated there."""

    def __init__(self, memory: FakeMemory) -> None:
        super().__init__()
        self._memory = memory

    def room(self, home: Tensor, device: torch.device) -> Tensor:
        room = super().room(home, device)
        self._memory.mark(room, ACTIVATIONS)
        return room

    def _allocate(self, here: Tensor) -> Tensor:
        return torch.empty(here.shape, dtype=here.dtype, device="meta")


# What serves what ---------------------------------------------------------------------------------------


class _BufferAccount(UnitObserver):
    """Records the purpose of units' buffers. Gradients that wait for further microbatches are states."""

    def __init__(self, memory: FakeMemory, several: bool) -> None:
        self._memory, self._several = memory, several

    def gathering(self, unit: Unit) -> AbstractContextManager[None]:
        return self._memory.serving(_unit_of(unit.slots))

    def on_buffer(self, unit: Unit, event: BufferEvent, buffer: Tensor) -> None:
        memory, name, mesh = self._memory, _unit_of(unit.slots), unit.mesh
        layout = mesh.layout
        match event:
            case "full":
                sharded = layout.zero == 3 and max(mesh.shard.size, mesh.expert_data.size) > 1
                passing = sharded or unit.quantised is not None
                memory.mark(buffer, BUFFERS if passing else PARAMETERS, name)
            case "stored":
                memory.mark(buffer, PARAMETERS if unit.aliased else MASTERS, name)
            case "resized":
                memory.resized(buffer)
            case "packed":
                waits = unit.shards is None or (self._several and (layout.zero < 2 or layout.pp > 1))
                memory.mark(buffer, GRADIENTS if waits else BUFFERS, name)
            case "packed taken":
                memory.becomes(buffer.untyped_storage(), BUFFERS)
            case "gradient":
                memory.becomes(buffer.untyped_storage(), GRADIENTS, name)
            case "gathered" | "sent" | "part":
                memory.mark(buffer, BUFFERS, name)


def _unit_of(slots: list[ParamSlot]) -> str:
    """embed (tied ends too), blocks.0, ..., or head."""
    names = {slot.key for slot in slots}
    first = "embed.weight" if "embed.weight" in names else min(names)
    return ".".join(first.split(".")[: 2 if first.startswith("blocks.") else 1])


class _ActivationWatch(ActionHook):
    """Distinguishes activations, which an action leaves for another, from temporaries."""

    def __init__(self, memory: FakeMemory) -> None:
        self._memory = memory
        self._start: int | None = None
        self._given: weakref.ref[UntypedStorage] | None = None

    def before(self, action: Action) -> None:
        if self._start is None:
            self._memory.settle(0, BATCH)
        given = None if self._given is None else self._given()
        if given is not None:  # a backward may wait for what came, too
            self._memory.becomes(given, ACTIVATIONS)
            self._given = None
        self._start = self._memory.now

    def after(self, action: Action, given: Tensor | None, result: Tensor | None) -> None:
        memory = self._memory
        assert self._start is not None
        if result is not None:
            memory.mark(result, MESSAGES)
        if given is not None and action.kind in (Kind.F, Kind.I):
            self._given = weakref.ref(given.untyped_storage())
        if action.kind in (Kind.F, Kind.I):
            memory.settle(self._start, ACTIVATIONS)


def _tell(memory: FakeMemory, trainer: Trainer) -> None:
    """Mark a trainer's tensors, and install the callbacks that follow its step."""
    optimiser, decoder, spec = trainer.optimiser, trainer.decoder, trainer.spec
    for buffer in optimiser.buffers():
        if spec.train.offload == "none":
            memory.mark(buffer.flat, OPTIMISER, _unit_of(buffer.unit.slots))
        elif len(buffer.flat):
            memory.elsewhere(buffer.flat)
    _mark_parts(memory, trainer)
    memory.settle(0, OPTIMISER)  # Adam's step counts
    trainer.pipeline.watch = _ActivationWatch(memory)
    names = {module: name for name, module in decoder.named_modules()}
    for group in trainer.states.modules:
        for module in group:
            _follow(memory, module, names[module])
    route_evenly(decoder, spec)


def _mark_parts(memory: FakeMemory, trainer: Trainer) -> None:
    """Mark what the parts of a step hold, among it what the step has begun."""
    for part in trainer.parts:
        for unit, tensor in part.held():
            memory.mark(tensor, part.component, _unit_of(unit.slots) if unit is not None else "")


def _follow(memory: FakeMemory, module: torch.nn.Module, name: str) -> None:
    """Attribute allocations in the forward and backward of `module` to `name`."""

    def enter(*_: Any) -> None:
        memory.module = name

    def leave(_module: Any, _args: Any, output: Tensor) -> None:
        memory.module = ""
        if torch.is_grad_enabled() and output.requires_grad:
            output.register_hook(enter)

    module.register_forward_pre_hook(enter, prepend=True)
    module.register_forward_hook(leave)


# The count ----------------------------------------------------------------------------------------------


def _by_component(kinds: Counter[str]) -> dict[str, int]:
    """Bytes of each component; collectives outside units count as messages."""
    return {kind: kinds[kind] + (kinds[COLLECTIVES] if kind == MESSAGES else 0) for kind in COMPONENTS}
