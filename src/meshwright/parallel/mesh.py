"""The mesh of devices: an object that is passed, with one group of ranks for each axis.

Ranks are numbered in `layout.order`, by default (pp, replicate, dp, cp, tp), the last fastest: what talks
most sits closest (Narayanan et al. 2021, §3; Grattafiori et al. 2024, §3.3.2).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from meshwright.parallel.groups import Groups
from meshwright.schedule import Lane, lanes_of, schedule_of
from meshwright.spec.layout import Layout


@dataclass
class Wire:
    """What crossed each axis: (axis, operation) -> bytes that one rank sends, and the number of calls.

    Bytes are those of a bandwidth-optimal algorithm over n ranks and a whole tensor of S bytes: all-gather
    and reduce-scatter S (n-1)/n, all-reduce 2 S (n-1)/n (Thakur et al. 2005); an all-to-all of S bytes a rank
    S (n-1)/n; a shift what is sent.
    """

    bytes: dict[tuple[str, str], float] = field(default_factory=dict)
    calls: dict[tuple[str, str], int] = field(default_factory=dict)

    def record(self, axis: str, operation: str, sent: float) -> None:
        """Add one collective."""
        key = (axis, operation)
        self.bytes[key] = self.bytes.get(key, 0.0) + sent
        self.calls[key] = self.calls.get(key, 0) + 1

    def clear(self) -> None:
        """Forget everything."""
        self.bytes.clear()
        self.calls.clear()


@dataclass(frozen=True)
class Axis:
    """One rank's view of one axis: the group of the ranks that differ in this coordinate only."""

    name: str
    size: int
    rank: int
    group: dist.ProcessGroup
    device: torch.device
    """Where the group's collectives take tensors."""
    wire: Wire


@dataclass(frozen=True)
class Mesh:
    """One rank's place in the mesh.

    `storage` is the (replicate, shard, tp) mesh that stored parameters are DTensors on; `shard` is dp x cp.
    The context axis is `ring` x `ulysses`, the latter neighbours (Fang & Zhao 2024).
    Routed experts lie on `expert`, ep x etp neighbours of one stage and replica (Liu et al. 2025, parallel
    folding); ranks that hold the same ones are `expert_data`, and `expert_storage` is the (replicate,
    expert_data, ep, etp) mesh of their DTensors. `sequence` joins the ranks that share sequences, cp x tp,
    and `stage` all of one place in the pipeline. Without experts these four are of one rank.
    Where there are more tensor ranks than key-value heads, `copies` neighbours hold the same head:
    `split_storage` is the (replicate, shard, parts, copies) mesh of those.
    `pipeline` joins the ranks that share the layers; messages between their stages go over `lanes`: the axis
    and the tag of each lane that the schedule uses, none without a pipeline.
    `ends` joins the first and the last rank of the pipeline, where the others have none. `control` is a
    gloo group over all ranks for what the host exchanges (never device tensors); `data` is one over the
    ranks that have the same place on the tensor axis. `background` is one more over all, for checkpoints
    that are written beside training: on one group they would wait for each other.
    """

    layout: Layout
    device: torch.device
    storage: DeviceMesh
    split_storage: DeviceMesh
    expert_storage: DeviceMesh
    wire: Wire
    replicate: Axis
    shard: Axis
    context: Axis
    ring: Axis
    ulysses: Axis
    tensor: Axis
    copies: Axis
    expert: Axis
    expert_data: Axis
    sequence: Axis
    stage: Axis
    pipeline: Axis
    lanes: Mapping[Lane, tuple[Axis, int]]
    ends: Axis | None
    data: Axis
    control: Axis
    background: Axis
    world: Axis

    def storage_of(self, copies: int) -> DeviceMesh:
        """`storage`, or for pieces that tensor ranks hold alike `split_storage`."""
        return self.storage if copies == 1 else self.split_storage

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
) -> Mesh | None:
    """Build the mesh of `layout` over the first `layout.world_size` ranks of the default group.

    `kv_heads` are those of the model, by default as many as any layout can deal out, and `experts` tells
    whether it has any. `groups` are those that other meshes of this process have made.

    Every rank of the default group calls this, since making a group is collective; a rank that is not part of
    the mesh gets None.
    """
    size = layout.world_size
    if dist.get_world_size() < size:
        raise ValueError(f"the layout needs {size} ranks and the process group has {dist.get_world_size()}")
    heads = kv_heads if kv_heads is not None else layout.tp * layout.cp
    copies = layout.kv_copies(heads)
    groups, wire, host = groups or Groups(device.type), Wire(), torch.device("cpu")
    grid = rank_grid(layout)
    heads_grid, expert_grid = grid.unflatten(-1, (-1, copies)), grid.view(_expert_shape(layout))
    storage = groups.device_mesh(grid, ("replicate", "shard", "tp"))
    split = expert_storage = storage
    if experts:
        expert_storage = groups.device_mesh(expert_grid, ("replicate", "expert_data", "ep", "etp"))
    if copies > 1:
        split = groups.device_mesh(heads_grid, ("replicate", "shard", "parts", "copies"))
    of_axes = {
        **_groups_of_layers(layout, grid, heads, groups),
        **_groups_of_experts(layout, grid, groups, experts),
        **_groups_of_stages(layout, grid, groups, device != host),
    }
    lanes = _groups_of_lanes(layout, grid, groups)

    def axis(key: str) -> Axis | None:
        name, group = of_axes[key]
        if group is None:
            return None
        on = host if key in ("data", "control", "background") else device
        return Axis(name, group.size(), group.rank(), group, on, wire)

    if storage is None or split is None or expert_storage is None:
        return None
    axes: dict[str, Any] = {key: axis(key) for key in of_axes}
    pipeline: Axis = axes["pipeline"]
    over = {
        lane: (replace(pipeline, group=group), tag)
        for tag, (lane, group) in enumerate(lanes.items())
        if group is not None
    }
    return Mesh(layout, device, storage, split, expert_storage, wire, lanes=over, **axes)


def rank_grid(layout: Layout) -> Tensor:
    """The numbers of the ranks, (pp, replicate, dp x cp, tp), whatever order they are numbered in."""
    numbered = layout.axes_in_order
    places = [[name for name, _ in numbered].index(name) for name in ("pp", "replicate", "dp", "tp")]
    return torch.arange(layout.world_size).view([size for _, size in numbered]).permute(places).contiguous()


Named = dict[str, tuple[str, dist.ProcessGroup | None]]
"""A field of `Mesh` -> the axis that the wire records, and the group of this rank."""


def _groups_of_layers(layout: Layout, grid: Tensor, heads: int, groups: Groups) -> Named:
    """The axes that share samples, states, tokens and layers' insides."""
    ulysses = layout.ulysses(heads)
    tokens = grid.view(-1, layout.cp, layout.tp)
    rings = grid.view(-1, layout.cp // ulysses, ulysses, layout.tp)
    heads_grid = grid.unflatten(-1, (-1, layout.kv_copies(heads)))
    return {
        "replicate": ("replicate", groups.along(grid, 1)),
        "shard": ("shard", groups.along(grid, 2)),
        "context": ("context", groups.along(tokens, 1, "context")),
        "ring": ("context", groups.along(rings, 1, "context")),
        "ulysses": ("context", groups.along(rings, 2, "context")),
        "tensor": ("tensor", groups.along(grid, 3)),
        "copies": ("tensor", groups.along(heads_grid, 4)),
    }


def _expert_shape(layout: Layout) -> tuple[int, ...]:
    return (layout.pp, layout.replicate, layout.expert_data_ranks, layout.ep, layout.etp)


def _groups_of_experts(layout: Layout, grid: Tensor, groups: Groups, experts: bool) -> Named:
    """The axes of routed experts and of their balance; without experts each rank alone."""
    if not experts:
        alone = groups.along(grid.view(-1, 1), 1)
        return {name: (name, alone) for name in ("expert", "expert_data", "sequence", "stage")}
    expert_grid = grid.view(_expert_shape(layout))
    return {
        "expert": ("expert", groups.along(expert_grid.flatten(3), 3)),
        "expert_data": ("expert_data", groups.along(expert_grid, 2)),
        "sequence": ("sequence", groups.along(grid.view(-1, layout.cp * layout.tp), 1)),
        "stage": ("stage", groups.along(grid.view(layout.pp, -1), 1)),
    }


def _groups_of_stages(layout: Layout, grid: Tensor, groups: Groups, on_device: bool) -> Named:
    """The pipeline's axes, and the groups over all ranks."""
    control = groups.apart(grid, "control")
    return {
        "pipeline": ("pipeline", groups.along(grid, 0)),
        "ends": ("pipeline", groups.along(grid[[0, -1]], 0) if layout.pp > 1 else None),
        "data": ("data", groups.along(grid.view(-1, layout.tp), 0, host=True)),
        "control": ("control", control),
        "background": ("background", groups.apart(grid, "background")),
        "world": ("world", groups.apart(grid, "world", host=False) if on_device else control),
    }


def _groups_of_lanes(layout: Layout, grid: Tensor, groups: Groups) -> dict[Lane, dist.ProcessGroup | None]:
    """A group for each lane of the layout's schedule: communicators that keep their order need their own;
    gloo tells messages on one group apart by tags."""
    lanes = lanes_of(schedule_of(layout, 1).rank_of)
    return {lane: groups.along(grid, 0, f"{lane}" if groups.in_order else "") for lane in lanes}
