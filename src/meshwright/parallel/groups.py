"""Process groups along the dims of a grid of ranks, each set of ranks made once.

Groups are few on purpose: each gloo group has threads of its own, and one wakes a hundred times a second.
"""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

TIMEOUT = timedelta(minutes=5)
"""A collective that waits longer has lost a rank; torch's own limit of 30 minutes hides a hang."""


class Groups:
    """Makes groups; every rank of the default group asks for the same ones in the same order."""

    def __init__(self, device_type: str, timeout: timedelta = TIMEOUT) -> None:
        self.device_type, self.timeout = device_type, timeout
        self._made: dict[tuple[str, str | None, tuple[int, ...]], dist.ProcessGroup | None] = {}

    @property
    def in_order(self) -> bool:
        """Whether a device group runs its operations strictly in the order of posting, as NCCL does."""
        return self.device_type != "cpu"

    def along(
        self, grid: Tensor, dim: int, purpose: str = "", host: bool = False
    ) -> dist.ProcessGroup | None:
        """The group of the ranks that differ in `dim` of the grid only; None for a rank that is not in it.

        Groups of another `purpose` are others, so that what they carry does not wait for each other. `host`
        asks for one that carries CPU tensors.
        """
        rows = grid.movedim(dim, -1).reshape(-1, grid.shape[dim]).tolist()
        made = [self._make(tuple(row), purpose, host) for row in rows]
        return next((group for group in made if group is not None), None)

    def apart(self, grid: Tensor, purpose: str, host: bool = True) -> dist.ProcessGroup | None:
        """A group of all ranks of the grid that serves `purpose` and nothing else."""
        return self._make(tuple(grid.flatten().tolist()), purpose, host)

    def device_mesh(self, grid: Tensor, names: tuple[str, ...]) -> DeviceMesh | None:
        """torch's mesh over the groups along the last dims, as many as names, with this rank's place in the
        others; None for a rank that is not in the grid."""
        groups = [self.along(grid, dim) for dim in range(grid.ndim - len(names), grid.ndim)]
        mine = [group for group in groups if group is not None]
        if len(mine) < len(groups):
            return None
        parts = grid.reshape(-1, *grid.shape[grid.ndim - len(names) :])
        (own,) = [part for part in parts if bool((part == dist.get_rank()).any())]
        return DeviceMesh.from_group(mine, self.device_type, mesh=own, mesh_dim_names=names)

    def _backend(self, host: bool) -> str | None:
        """What carries a group's messages; None for what the default group has."""
        return "gloo" if host or self.device_type == "cpu" else None

    def _make(self, ranks: tuple[int, ...], purpose: str, host: bool) -> dist.ProcessGroup | None:
        backend = self._backend(host)
        key = (purpose, backend, ranks)
        if key not in self._made:
            made = dist.new_group(list(ranks), timeout=self.timeout, backend=backend)
            self._made[key] = made if dist.get_rank() in ranks else None
        return self._made[key]
