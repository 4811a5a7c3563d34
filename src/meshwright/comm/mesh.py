"""The mesh of devices: an object that is passed, with one group of ranks for each axis.

Ranks are numbered in `layout.order`, by default (pp, replicate, dp, cp, tp), the last fastest: what talks
most sits closest (Narayanan et al. 2021, §3; Grattafiori et al. 2024, §3.3.2).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from meshwright.comm.collective_log import Ended, Flight
from meshwright.comm.control import Control, new_scope
from meshwright.comm.heartbeat import Heartbeat
from meshwright.comm.process_groups import Groups, Row
from meshwright.comm.shared_memory_group import SharedMemoryGroup, SharedMemoryWork
from meshwright.schedule import Lane, lanes_of, schedule_of
from meshwright.spec.layout import Layout
from meshwright.spec.parameters import Piece


class Pending(Protocol):
    """A collective under way."""

    def wait(self) -> object:
        """Return when the result may be read (on CUDA: by what is enqueued after this)."""
        ...

    def is_completed(self) -> bool:
        """True if it has ended; does not wait for it."""
        ...


class CallCheck(Protocol):
    """A check of the calls that a rank is about to start (`call_check.py`)."""

    def starts(
        self,
        axis: Axis,
        operation: str,
        what: str,
        pair: tuple[int, int, int] | None = None,
        rows: tuple[list[int], list[int]] | None = None,
    ) -> object:
        """Raise an error if the call is not that of the other ranks; `what` says its size and format, `pair`
        a message's sender, receiver and tag, and `rows` the numbers that go to each rank and come from it."""
        ...


class WireObserver(Protocol):
    """Hears of each call after it has been started, and when it is waited for."""

    def started(self, axis: str, operation: str, sent: float) -> int:
        """A call has been started that sends `sent` bytes; returns a number for it."""
        ...

    def waited(self, number: int) -> None:
        """The call with this number is about to be waited for."""
        ...


@dataclass(slots=True, eq=False)
class _Watched:
    """A collective under way, whose wait shows in the rank's heartbeat and on its wire.

    It keeps the tensors that are sent and received until it has been waited for.
    """

    works: Sequence[Pending]
    wire: TrafficCounter
    label: str
    number: int
    calls: Sequence[object]
    tensors: Sequence[Tensor]
    observed: int
    """Its number to the wire's observer."""
    flight: Flight | None

    def wait(self) -> None:
        wire = self.wire
        if wire.observer is not None:
            wire.observer.waited(self.observed)
        with wire.heartbeat.waits(self.label, self.number):
            wire.awaited = self.calls
            for work in self.works:
                # A message of gloo's waits as long as its group did when that was made, unless told here.
                if wire.limit is not None and isinstance(work, (dist.Work, SharedMemoryWork)):
                    work.wait(wire.limit)
                else:
                    work.wait()
            wire.awaited = ()
        if self.flight is not None:
            self.flight.waited()
        self.tensors = ()

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self.works)


@dataclass
class TrafficCounter:
    """Bytes that this rank sent and calls that it made, by (axis, operation).

    Bytes are those of a bandwidth-optimal algorithm over n ranks and a tensor of S bytes: all-gather,
    reduce-scatter and broadcast S (n-1)/n, all-reduce 2 S (n-1)/n (Thakur et al. 2005), all-to-all of S bytes
    a rank S (n-1)/n; a shift or a send what leaves this rank. What is under way shows in `heartbeat`.
    """

    heartbeat: Heartbeat = field(default_factory=Heartbeat)

    bytes: dict[tuple[str, str], float] = field(default_factory=dict)
    calls: dict[tuple[str, str], int] = field(default_factory=dict)
    log: list[tuple[str, str, float]] | None = None
    """(axis, operation, bytes) of each call in order, if this is a list; None records the sums only."""
    check: CallCheck | None = None
    """Sees each call before it starts."""
    limit: timedelta | None = None
    """The longest wait for a call, by default that of its group."""
    observer: WireObserver | None = None
    awaited: Sequence[Any] = ()
    """Results of the check for the call that the rank waits for, or whose wait has failed."""

    def record(self, axis: str, operation: str, sent: float) -> None:
        """Add one call that sends `sent` bytes."""
        key = (axis, operation)
        self.bytes[key] = self.bytes.get(key, 0.0) + sent
        self.calls[key] = self.calls.get(key, 0) + 1
        if self.log is not None:
            self.log.append((axis, operation, sent))

    def start(
        self,
        axis: Axis,
        operation: str,
        sent: float,
        works: Sequence[Pending | None],
        calls: Sequence[object],
        tensors: Sequence[Tensor],
        pair: tuple[int, int, int] | None = None,
    ) -> Pending:
        """Add one call that has just been started, and sends `sent` bytes; returns the handle to wait on.

        It ends with the last of its `works`; `calls` are what the check has returned of it, `tensors` those
        that it reads and writes, and `pair` is a message's sender, receiver and tag.
        """
        self.record(axis.name, operation, sent)
        return self.watched(axis, operation, works, calls, tensors, pair, sent)

    def watched(
        self,
        axis: Axis,
        operation: str,
        works: Sequence[Pending | None],
        calls: Sequence[object],
        tensors: Sequence[Tensor],
        pair: tuple[int, int, int] | None = None,
        sent: float = 0.0,
    ) -> Pending:
        """The handle to wait on of a call that has just been started, as of `start`, which is not counted:
        what receives a message sends nothing."""
        started = [work for work in works if work is not None]
        assert len(started) == len(works), "a rank starts collectives only on groups that it is in"
        observed = 0 if self.observer is None else self.observer.started(axis.name, operation, sent)
        flight, log = None, self.heartbeat.collectives
        if log is not None:
            flight = log.start(axis, operation, sent, [_ended(work) for work in started], pair)
        label, number = f"{axis.name} {operation}", self.heartbeat.start()
        return _Watched(started, self, label, number, calls, tensors, observed, flight)

    def clear(self) -> None:
        """Drop all sums, and stop logging calls."""
        self.bytes.clear()
        self.calls.clear()
        self.log = None


def _ended(work: Pending) -> Ended:
    """Tells whether a work has ended, from any thread."""
    if isinstance(work, SharedMemoryWork):  # only its own thread may look further
        return lambda: work.done
    return work.is_completed


@dataclass(frozen=True)
class Axis:
    """One rank's view of one axis: the group of the ranks that differ in this coordinate only."""

    name: str
    size: int
    rank: int
    group: dist.ProcessGroup | None
    """None on an axis of one rank, where nothing is sent."""
    device: torch.device
    """Where the group's collectives take tensors."""
    wire: TrafficCounter
    memory: SharedMemoryGroup | None = None
    """Collectives of the group through the memory of a host that all its ranks may share."""
    peers: bool | None = None
    """True if its ranks' devices can read each other's memory, False if not; None if that has to be asked."""


@dataclass(frozen=True)
class Mesh:
    """One rank's place in the mesh.

    `storage` is the (replicate, shard, tp) mesh that stored parameters are DTensors on, without its dims of
    one rank; `shard` is dp x cp. The context axis is `ring` x `ulysses`, the latter neighbours (Fang & Zhao
    2024). Routed experts lie on `expert`, ep x etp neighbours of one stage and replica (Liu et al. 2025,
    parallel folding), of which etp neighbours, `expert_tensor`, share theirs; ranks that hold the same ones
    are `expert_data`, and `expert_storage` is the (replicate, expert_data, ep, etp) mesh of their DTensors.
    `sequence` joins the ranks that share sequences, cp x tp. Without experts all of these have one rank.
    Where there are more tensor ranks than key-value heads, `copies` neighbours hold the same head:
    `split_storage` is the (replicate, shard, parts, copies) mesh of those.
    `pipeline` joins the ranks that share the layers; messages between their stages go over `lanes`: the axis
    and the tag of each lane that the schedule uses, none without a pipeline. `ends` joins the first and the
    last rank of the pipeline, where the others have none. `world` is all ranks: it carries the few numbers of
    a step that all of them need. `control` carries host messages of all ranks, over the store and not a
    group; `background` is a second one for checkpoints that are written during training: on one they would
    wait for each other. `heartbeat` shows this rank's steps and waits to its supervisor. `numbers` are those
    that the ranks of the mesh have in the run, in order. `step_group` is the mesh of the ranks that
    take steps together, where replicas take them by themselves, in which `replicate` is of one rank.
    """

    layout: Layout
    device: torch.device
    storage: DeviceMesh
    split_storage: DeviceMesh
    expert_storage: DeviceMesh
    wire: TrafficCounter
    replicate: Axis
    shard: Axis
    context: Axis
    ring: Axis
    ulysses: Axis
    tensor: Axis
    copies: Axis
    expert: Axis
    expert_data: Axis
    expert_tensor: Axis
    sequence: Axis
    pipeline: Axis
    lanes: Mapping[Lane, tuple[Axis, int]]
    ends: Axis | None
    world: Axis
    control: Control
    background: Control
    heartbeat: Heartbeat
    numbers: Sequence[int]
    step_group: Mesh | None = None
    others: Mapping[str, Mesh] = field(default_factory=dict)
    """The meshes of other models of the run, over the same ranks, by their names."""

    @property
    def rank(self) -> int:
        """This rank's number."""
        return self.world.rank

    def alike(self, piece: Piece) -> Axis:
        """The ranks among which several hold the same piece of a parameter."""
        if piece.routed:
            return self.expert_tensor
        return self.tensor if piece.copies == self.tensor.size else self.copies

    def with_layout(self, layout: Layout) -> Mesh:
        """The mesh for a layout of the same axes that differs otherwise, such as in its ZeRO stage."""
        own = layout.model_copy(update={"replicate": 1})
        group = None if self.step_group is None else replace(self.step_group, layout=own)
        return replace(self, layout=layout, step_group=group)

    @property
    def data_rank(self) -> int:
        """Which of `layout.data_ranks` readers of samples this rank is."""
        return self.replicate.rank * self.layout.dp + self.shard.rank // self.layout.cp


def build_mesh(
    layout: Layout,
    device: torch.device,
    kv_heads: int | None = None,
    groups: Groups | None = None,
    experts: bool = True,
    apart: bool = False,
) -> Mesh | None:
    """Build the mesh of `layout` over the first `layout.world_size` ranks of the default group.

    `kv_heads` are those of the model, by default as many as any layout can deal out, and `experts` tells
    whether it has any. `groups` are those that other meshes of this process have made. Where replicas
    step `apart` each gets a mesh of its own, too.

    Every rank of the default group calls this, since making a group is collective; a rank that is not part of
    the mesh gets None.
    """
    size = layout.world_size
    if dist.get_world_size() < size:
        raise ValueError(f"the layout needs {size} ranks and the process group has {dist.get_world_size()}")
    heads = kv_heads if kv_heads is not None else layout.tp * layout.cp
    copies = layout.kv_copies(heads)
    groups, scope = groups or Groups(device.type), new_scope()
    wire = TrafficCounter(groups.heartbeat)
    grid = rank_grid(layout)
    storages = _storages(groups, layout, grid, copies, experts, ("replicate",))

    def axis(line: _Line) -> Axis | None:
        found = groups.along(line.grid, line.dim, line.purpose)
        if found is None:
            return None
        row, group = found
        memory, peers = groups.shared_memory(group), groups.are_peers(row)
        made = Axis(line.name, len(row), row.index(dist.get_rank()), group, device, wire, memory, peers)
        if groups.heartbeat.collectives is not None:
            groups.heartbeat.collectives.join(made)
        return made

    # Lanes have a group each where groups keep the order of posting; gloo tells messages apart by tags.
    lanes = {
        lane: axis(_Line("pipeline", grid, 0, f"{lane}" if groups.in_order else ""))
        for lane in lanes_of(schedule_of(layout, 1).rank_of)
    }
    lines = _lines(layout, grid, heads, experts)
    axes: dict[str, Any] = {"ends": None} | {key: axis(line) for key, line in lines.items()}
    group = groups.world(tuple(range(size)))
    rows = grid.transpose(0, 1).reshape(layout.replicate, -1)
    members = groups.along(rows, 1, "step_group") if apart else None
    own_storages = _storages(groups, layout, grid, copies, experts, ()) if apart else {}
    if None in storages.values():
        return None
    for purpose in ("control", "background"):
        seen = groups.heartbeat if purpose == "control" else None  # a thread of its own waits in the other
        axes[purpose] = groups.connections.control(purpose, size, scope, groups.timeout, seen)
    axes["world"] = Axis("world", size, dist.get_rank(), group if size > 1 else None, device, wire)
    over = {lane: (axis, tag) for tag, (lane, axis) in enumerate(lanes.items()) if axis is not None}
    axes["heartbeat"] = groups.heartbeat
    mesh = Mesh(layout, device, wire=wire, lanes=over, numbers=range(size), **storages, **axes)
    if members is None:
        return mesh
    own = _step_group(mesh, groups, scope, members, own_storages)
    return replace(mesh, step_group=own).with_layout(layout)


def _step_group(
    mesh: Mesh,
    groups: Groups,
    scope: str,
    members: tuple[Row, dist.ProcessGroup | None],
    storages: Mapping[str, Any],
) -> Mesh:
    """The mesh of the ranks that step with this one, and their group: all its axes but two are the run's."""
    numbers, group = members
    rank, own = numbers.index(mesh.rank), f"{scope}/step_group/{mesh.replicate.rank}"
    seen: dict[str, Heartbeat | None] = {"control": groups.heartbeat, "background": None}
    controls: dict[str, Any] = {
        purpose: groups.connections.control(purpose, len(numbers), own, groups.timeout, heartbeat, rank)
        for purpose, heartbeat in seen.items()
    }
    world = Axis("world", len(numbers), rank, group, mesh.device, mesh.wire)
    alone = Axis("replicate", 1, 0, None, mesh.device, mesh.wire)
    return replace(mesh, numbers=numbers, world=world, replicate=alone, **storages, **controls)


def _storages(
    groups: Groups, layout: Layout, grid: Tensor, copies: int, experts: bool, first: tuple[str, ...]
) -> dict[str, Any]:
    """The meshes of stored parameters' DTensors, by field of `Mesh`; `first` names the first dims."""
    storage = groups.device_mesh(grid, (*first, "shard", "tp"))
    found = {"storage": storage, "split_storage": storage, "expert_storage": storage}
    if experts:
        expert_grid = _expert_grid(layout, grid, experts)
        found["expert_storage"] = groups.device_mesh(expert_grid, (*first, "expert_data", "ep", "etp"))
    if copies > 1:
        heads_grid = grid.unflatten(-1, (-1, copies))
        found["split_storage"] = groups.device_mesh(heads_grid, (*first, "shard", "parts", "copies"))
    return found


def rank_grid(layout: Layout) -> Tensor:
    """The numbers of the ranks, (pp, replicate, dp x cp, tp), whatever order they are numbered in."""
    numbered = layout.axes_in_order
    places = [[name for name, _ in numbered].index(name) for name in ("pp", "replicate", "dp", "tp")]
    return torch.arange(layout.world_size).view([size for _, size in numbered]).permute(places).contiguous()


class _Line(NamedTuple):
    """An axis to be made: the name that the wire records, and the dim of a grid of ranks it runs along."""

    name: str
    grid: Tensor
    dim: int
    purpose: str = ""


def _expert_grid(layout: Layout, grid: Tensor, experts: bool) -> Tensor:
    """Ranks as (pp, replicate, expert_data, ep, etp); without experts each of these axes is of one rank."""
    if not experts:
        return grid.view(-1, 1, 1, 1, 1)
    return grid.view(layout.pp, layout.replicate, layout.expert_data_ranks, layout.ep, layout.etp)


def _lines(layout: Layout, grid: Tensor, heads: int, experts: bool) -> dict[str, _Line]:
    """The axes to be made, by field of `Mesh`."""
    ulysses, expert_grid = layout.ulysses(heads), _expert_grid(layout, grid, experts)
    tokens = grid.view(-1, layout.cp, layout.tp)
    rings = grid.view(-1, layout.cp // ulysses, ulysses, layout.tp)
    lines = {
        "replicate": _Line("replicate", grid, 1),
        "shard": _Line("shard", grid, 2),
        "context": _Line("context", tokens, 1, "context"),
        "ring": _Line("context", rings, 1, "context"),
        "ulysses": _Line("context", rings, 2, "context"),
        "tensor": _Line("tensor", grid, 3),
        "copies": _Line("tensor", grid.unflatten(-1, (-1, layout.kv_copies(heads))), 4),
        "expert": _Line("expert", expert_grid.flatten(3), 3),
        "expert_data": _Line("expert_data", expert_grid, 2),
        "expert_tensor": _Line("expert", expert_grid, 4, "expert_tensor"),
        "sequence": _Line("sequence", grid.view(-1, layout.cp * layout.tp if experts else 1), 1),
        "pipeline": _Line("pipeline", grid, 0),
    }
    return lines | ({"ends": _Line("pipeline", grid[[0, -1]], 0)} if layout.pp > 1 else {})
