"""Process groups along the dims of a grid of ranks: one construction an axis, none for an axis of one rank.

Each construction costs every rank that takes part in it: on NCCL a split of the world's communicator, on gloo
a set of sockets and a thread that wakes a hundred times a second. So groups are few, and their number does
not grow with the number of ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta

import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh

from meshwright.comm.control import Connections
from meshwright.comm.heartbeat import Heartbeat
from meshwright.comm.shared_memory_group import MOST_RANKS, SharedMemoryGroup

TIMEOUT = timedelta(minutes=5)
"""A collective that waits longer has lost a rank; torch's own limit of 30 minutes hides a hang."""

Row = tuple[int, ...]
"""The ranks of one group, ascending."""


class Groups:
    """Makes and keeps the groups of one process; every rank of the default group asks in the same order.

    What goes on in them shows in `heartbeat`.
    """

    def __init__(
        self, device_type: str, timeout: timedelta = TIMEOUT, heartbeat: Heartbeat | None = None
    ) -> None:
        self.device_type, self.timeout = device_type, timeout
        self.heartbeat = heartbeat or Heartbeat()
        self.connections = Connections()
        self.constructions = 0
        """Number of groups that this process has taken part in making."""
        self._made: dict[tuple[str, tuple[Row, ...]], dist.ProcessGroup | None] = {}
        self._memories: dict[dist.ProcessGroup, SharedMemoryGroup] = {}

    @property
    def in_order(self) -> bool:
        """True if a device group runs its operations strictly in the order of posting, as NCCL does."""
        return self.device_type != "cpu"

    def along(self, grid: Tensor, dim: int, purpose: str = "") -> tuple[Row, dist.ProcessGroup | None] | None:
        """The ranks that differ from this one in `dim` of the grid only, with their group.

        The group is None where that is this rank alone, and the result None for a rank that is not in the
        grid. Groups of different `purpose` are different groups, whose messages do not wait for each other.
        """
        rows = [tuple(sorted(row)) for row in grid.movedim(dim, -1).reshape(-1, grid.shape[dim]).tolist()]
        rank = dist.get_rank()
        own = next((row for row in rows if rank in row), None)
        if grid.shape[dim] == 1:
            return None if own is None else (own, None)
        group = self._group(rows, own, purpose)
        return None if own is None else (own, group)

    def world(self, ranks: Row) -> dist.ProcessGroup | None:
        """The group of all ranks of a mesh: the default group, where the mesh takes all of its ranks."""
        if len(ranks) in (1, dist.get_world_size()):
            return dist.group.WORLD
        return self._group([ranks], ranks if dist.get_rank() in ranks else None, "")

    def shared_memory(self, group: dist.ProcessGroup | None) -> SharedMemoryGroup | None:
        """The collectives through shared memory of a group; None for one whose ranks never have any."""
        if group is None or not 1 < group.size() <= MOST_RANKS or dist.get_backend(group) != "gloo":
            return None
        return self._memories.setdefault(group, SharedMemoryGroup(group, self.timeout))

    def are_peers(self, _row: Row) -> bool | None:
        """True if devices of these ranks can read each other's memory, where that is known without asking."""
        return None

    def device_mesh(self, grid: Tensor, names: tuple[str, ...]) -> DeviceMesh | None:
        """torch's mesh over the last dims of the grid, one for each name, but for dims of one rank.

        Where all dims are of one rank, the mesh is this rank alone. None for a rank that is not in the grid.
        """
        first = grid.ndim - len(names)
        found: Mapping[str, tuple[Row, dist.ProcessGroup | None] | None] = {
            name: self.along(grid, first + dim) for dim, name in enumerate(names)
        }
        rank = dist.get_rank()
        part = next((p for p in grid.reshape(-1, *grid.shape[first:]) if bool((p == rank).any())), None)
        if part is None:
            return None
        groups = {name: pair[1] for name, pair in found.items() if pair is not None and pair[1] is not None}
        if not groups:
            alone = part.flatten()[:1]
            return DeviceMesh(self.device_type, alone, mesh_dim_names=names[:1], _init_backend=False)
        own = part[tuple(slice(None) if name in groups else 0 for name in names)]
        return DeviceMesh.from_group(
            list(groups.values()), self.device_type, mesh=own, mesh_dim_names=tuple(groups)
        )

    def limit(self, timeout: timedelta) -> None:
        """Let collectives of the groups made so far, and of the default group, wait no longer than this."""
        for group in {dist.group.WORLD, *self._made.values()} - {None}:
            distributed_c10d._set_pg_timeout(timeout, group)
        for memory in self._memories.values():
            memory.timeout = timeout

    def _group(self, rows: list[Row], own: Row | None, purpose: str) -> dist.ProcessGroup | None:
        """This rank's group of disjoint `rows`, made at the first call; None for a rank in none of them."""
        key = (purpose, tuple(rows))
        if key not in self._made:
            self._made[key] = self._make(rows, own, purpose)
            self.constructions += 1
        return self._made[key]

    def _make(self, rows: list[Row], own: Row | None, purpose: str) -> dist.ProcessGroup | None:
        """Make the groups of all rows, and for each rank that is in none of them a group of its own.

        torch names a group by its ranks and by how many groups a rank has made, so those counts must stay
        equal on all ranks: else the next group that they make, perhaps for another mesh, hangs.
        """
        rank = dist.get_rank()
        if self.device_type == "cuda":
            # One split of the world's communicator makes all of them; every rank takes part in it.
            outside = sorted({*range(dist.get_world_size())} - {member for row in rows for member in row})
            listed = [*map(list, rows), *([each] for each in outside)]
            made = dist.split_group(split_ranks=listed, timeout=self.timeout, group_desc=purpose or None)
        else:
            made = dist.new_group(list(own or (rank,)), self.timeout, "gloo", use_local_synchronization=True)
        return None if own is None else made
