"""The mesh of devices: an object that is passed, with one group of ranks for each axis.

Ranks are numbered in `layout.order`, by default (pp, replicate, dp, cp, tp), the last fastest: what talks
most sits closest (Narayanan et al. 2021, §3; Grattafiori et al. 2024, §3.3.2).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from meshwright.comm.control import Control, new_scope
from meshwright.comm.heartbeat import Heartbeat
from meshwright.comm.process_groups import Groups, Row
from meshwright.comm.shared_memory_group import SharedMemoryGroup
from meshwright.comm.traffic_counter import TrafficCounter
from meshwright.schedule import Lane, lanes_of, schedule_of
from meshwright.spec.layout import Layout
from meshwright.spec.parameters import Piece


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

    axis = partial(_axis, groups, device=device, wire=wire)
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


def _axis(groups: Groups, line: _Line, device: torch.device, wire: TrafficCounter) -> Axis | None:
    """The axis of a line, None for a rank that it does not reach."""
    found = groups.along(line.grid, line.dim, line.purpose)
    if found is None:
        return None
    row, group = found
    memory, peers = groups.shared_memory(group), groups.are_peers(row)
    made = Axis(line.name, len(row), row.index(dist.get_rank()), group, device, wire, memory, peers)
    if groups.heartbeat.collectives is not None:
        groups.heartbeat.collectives.join(made)
    return made


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
