"""The world that is examined: its ranks, the host of each, and the first rank of each host."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from meshwright.comm.control import Control
from meshwright.host import host_id


@dataclass(frozen=True)
class ExaminedWorld:
    """All ranks as one of them sees them; `hosts` and `names` are in the order of ranks.

    Ranks of one kernel and network have the same host.
    """

    ranks: Control
    hosts: Sequence[str]
    names: Sequence[str]

    @property
    def rank(self) -> int:
        """This rank's number."""
        return self.ranks.rank

    @cached_property
    def leaders(self) -> list[int]:
        """The first rank of each host, ascending."""
        return [rank for rank, host in enumerate(self.hosts) if self.hosts.index(host) == rank]

    @property
    def leads(self) -> bool:
        """True on the first rank of a host."""
        return self.rank in self.leaders

    @property
    def local_ranks(self) -> int:
        """Ranks of this host."""
        return list(self.hosts).count(self.hosts[self.rank])

    def named(self, rank: int) -> str:
        """A rank with its host, in words."""
        return f"rank {rank} on {self.names[rank]}"


def world_of(ranks: Control) -> ExaminedWorld:
    """The world of some ranks. Every rank calls this."""
    rows = ranks.broadcast(ranks.gather([host_id(), socket.gethostname()]))
    hosts, names = zip(*rows, strict=True)
    return ExaminedWorld(ranks, hosts, names)
