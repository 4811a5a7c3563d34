"""How the ranks of an examination meet: at the run's store first, and only then in a process group.

A run joins both at once. Here most checks are over before sockets between ranks are tried, which a host
without a free port, or a network that lets nothing through, would leave to wait.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from meshwright.comm.control import Connections, Control, new_scope
from meshwright.rank.env import Worker
from meshwright.rank.rendezvous import world_store

MEET_S = timedelta(seconds=60)
"""The longest wait for a rank that does not come, or stays in a check."""


@contextmanager
def met(
    place: Worker | None, folder: Path | None, patience: timedelta = MEET_S
) -> Iterator[tuple[Control, Any]]:
    """Messages between all ranks, and the store that they meet at, None for a process alone.

    `folder` is one that all ranks have. Raises `UserError` where they cannot meet, and `MissingRanksError`
    where one does not come within `patience`.
    """
    if dist.is_initialized():
        size = dist.get_world_size()
        yield Connections().control("doctor", size, new_scope(), patience), None
        return
    if place is None or (place.launched and place.world_size == 1):
        yield Control(), None
        return
    with world_store(place, patience, folder) as store:

        def connect() -> PrefixStore:
            return PrefixStore("meshwright/doctor", store)

        yield Control("doctor", place.rank, place.world_size, connect, patience), store
