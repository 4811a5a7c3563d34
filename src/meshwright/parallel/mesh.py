"""The mesh of devices: an object that is passed, with one group of ranks for each axis.

Ranks are laid out (pp, replicate, dp, cp, tp), the last fastest: what talks most sits closest
(Narayanan et al. 2021, §3; Grattafiori et al. 2024, §3.3.2).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from meshwright.spec.layout import Layout


@dataclass
class Wire:
    """What crossed each axis: (axis, operation) -> bytes that one rank sends, and the number of calls.

    Bytes are those of a bandwidth-optimal algorithm over n ranks and a whole tensor of S bytes: all-gather
    and reduce-scatter S (n-1)/n, all-reduce 2 S (n-1)/n (Thakur et al. 2005).
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

    `storage` is the (replicate, shard) mesh that stored parameters are DTensors on; `shard` is dp x cp.
    `control` is a gloo group over all ranks for what the host exchanges (never device tensors); `background`
    is another, for checkpoints that are written beside training: on one group they would wait for each other.
    """

    layout: Layout
    device: torch.device
    storage: DeviceMesh
    replicate: Axis
    shard: Axis
    world: Axis
    control: Axis
    background: Axis
    wire: Wire

    @property
    def data_rank(self) -> int:
        """Which of `layout.data_ranks` readers of samples this rank is."""
        return self.replicate.rank * self.layout.dp + self.shard.rank // self.layout.cp


def build_mesh(layout: Layout, device: torch.device) -> Mesh | None:
    """Build the mesh of `layout` over the first `layout.world_size` ranks of the default group.

    Every rank of the default group calls this, since making a group is collective; a rank that is not part of
    the mesh gets None. The layout's tp and pp are 1 here (`spec.rules`).
    """
    size = layout.world_size
    if dist.get_world_size() < size:
        raise ValueError(f"the layout needs {size} ranks and the process group has {dist.get_world_size()}")
    ranks = list(range(size))
    grid = torch.tensor(ranks).view(layout.replicate, layout.shard_ranks)
    storage = DeviceMesh(device.type, grid, mesh_dim_names=("replicate", "shard"))
    control = dist.new_group(ranks, backend="gloo")
    background = dist.new_group(ranks, backend="gloo")
    world = control if device.type == "cpu" else dist.new_group(ranks)
    if dist.get_rank() >= size:
        return None
    wire, host = Wire(), torch.device("cpu")

    def axis(name: str) -> Axis:
        group = storage.get_group(name)
        return Axis(name, group.size(), group.rank(), group, device, wire)

    rank = dist.get_rank()
    return Mesh(
        layout=layout,
        device=device,
        storage=storage,
        replicate=axis("replicate"),
        shard=axis("shard"),
        world=Axis("world", size, rank, world, device, wire),
        control=Axis("control", size, rank, control, host, wire),
        background=Axis("background", size, rank, background, host, wire),
        wire=wire,
    )
