"""All checks in order, on every rank, and what they have found together.

What a rank can see alone comes first, so that it is told even where ranks cannot meet; then what they compare
by messages over the store; last, if hosts reach each other, what takes a process group.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from meshwright.comm.control import Control, MissingRanksError
from meshwright.doctor import limits, ports
from meshwright.doctor.clocks import clocks
from meshwright.doctor.collectives import group_rates
from meshwright.doctor.disk_rate import saves, write_rate
from meshwright.doctor.finding import Finding, first_line, merged, of_ranks
from meshwright.doctor.free_space import free_space
from meshwright.doctor.links import link_rates
from meshwright.doctor.meeting import met
from meshwright.doctor.reachability import reachability
from meshwright.doctor.shared_folder import files, nearest, shared
from meshwright.doctor.timing import MessageError
from meshwright.doctor.versions import software, versions
from meshwright.doctor.world import ExaminedWorld, world_of
from meshwright.hardware.cluster import Cluster
from meshwright.rank.env import Worker, limit_threads, worker
from meshwright.rank.failure import errors_unrecorded
from meshwright.rank.gpu import device_index
from meshwright.rank.process_group import process_group
from meshwright.rank.rendezvous import master
from meshwright.spec import RunSpec, UserError
from meshwright.spec.layout import Layout

LIMIT = timedelta(seconds=20)
"""Longest time of a collective."""
REMEDY = (
    "see that GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME, where they are set, name interfaces of each host, "
    "and look first at a rank whose reason is no timeout: the others have waited for it"
)


@dataclass
class Examination:
    """An examination, with what this rank has found and measured so far.

    `spec` is the run that is to start, None without one; `folder` is that of its checkpoints, `cluster` the
    hardware that is expected.
    """

    spec: RunSpec | None
    folder: Path
    cluster: Cluster | None = None
    found: list[Finding] = field(default_factory=list)
    measured: dict[str, Any] = field(default_factory=dict)
    begun: float = field(default_factory=time.perf_counter)
    place: Worker | None = field(default_factory=worker)

    def run(self) -> dict[str, Any]:
        """Ask all checks. Every rank calls this.

        Returns on rank 0 `healthy`, `fails`, `ranks`, `hosts`, `findings`, `measured` and `seconds`, and on
        the others {}; a rank that cannot meet the others returns what it has found by itself.
        """
        if not self.may_meet():
            return self.alone()
        try:
            with met(self.place, self.folder) as (ranks, store):
                return self.together(ranks, store)
        except UserError as error:
            self.found.append(Finding.of_error("ports", error))
        except MissingRanksError as error:
            self.found.append(
                Finding("ports", True, f"a rank has ended or hangs: {error}", "look at that rank's output")
            )
        return self.alone()

    def may_meet(self) -> bool:
        """Ask what a rank can see alone; False where it cannot meet others."""
        cuda = torch.cuda.is_available()
        local_ranks = self.place.local_world_size if self.place is not None else 1
        limit_threads(local_ranks)
        self.found += limits.open_files(self._layout(), cuda) + limits.locked_memory()
        self.found += limits.shared_memory(local_ranks, cuda)
        self.found += ports.loopback(self.place)
        # In a group that is there already, rank 0 listens at that port itself.
        taken = [] if dist.is_initialized() else ports.master_port(self.place)
        self.found[:0] = taken
        return not taken

    def together(self, ranks: Control, store: Any) -> dict[str, Any]:
        """Ask what ranks find out together, which have met at `store`; return as `run` does.

        Raises `MissingRanksError` where a rank has ended, or hangs.
        """
        world, cuda = world_of(ranks), torch.cuda.is_available()
        self._compare(world, cuda)
        self._disk(world)
        self._network(world, store, cuda)
        rows = ranks.gather([each.to_json() for each in self.found])
        if not rows:
            return {}
        found = merged([[_finding(each) for each in row] for row in rows])
        return self._told(found, world.names, len(world.leaders))

    def _layout(self) -> Layout:
        """The run's layout, or where there is none of so many ranks, one of data ranks alone."""
        joined = dist.get_world_size() if dist.is_initialized() else 1
        ranks = self.place.world_size if self.place is not None else joined
        if self.spec is not None and self.spec.layout.world_size == ranks:
            return self.spec.layout
        return Layout(dp=ranks)

    def _compare(self, world: ExaminedWorld, cuda: bool) -> None:
        """Software and clocks."""
        self.found += versions(world, software(self.spec, cuda)) + clocks(world)

    def _disk(self, world: ExaminedWorld) -> None:
        """The folder, its room and its rate."""
        there = nearest(self.folder)
        if world.leads:
            self.found += (own := files(there))
            if self.spec is not None and not any(each.fails for each in own):
                self.found += free_space(self.spec, there, self.folder)
        if world.ranks.any(any(each.check in ("folder", "space") and each.fails for each in self.found)):
            return
        self.found += shared(world, there)
        rate, found = write_rate(world, there)
        self.found += found
        if rate is not None:
            self.measured["disk"] = {"folder": str(there), "bytes_per_second": rate}
            if self.spec is not None:
                facts, found = saves(self.spec, rate, self.cluster)
                self.measured["disk"] |= facts
                self.found += found

    def _network(self, world: ExaminedWorld, store: Any, cuda: bool) -> None:
        """Which host reaches which, each group's first collective, and each link, with their rates."""
        place, layout = self.place, self._layout()
        given = place is not None and not place.launched and not dist.is_initialized()
        blocked = reachability(world, master(os.environ)[0]) if given else []
        self.found += blocked
        others = any(each.check == "versions" and each.fails for each in self.found)
        if world.ranks.any(bool(blocked) or others) or world.ranks.size == 1:
            return
        experts = self.spec is not None and self.spec.model.moe is not None
        kind = "cuda" if cuda else "cpu"
        try:
            if dist.is_initialized():
                self._rates(world, layout, experts, torch.device(kind))
                return
            # Keys of its own: the run's group, of ranks that are examined as it starts, has the same store.
            met_at = None if store is None else PrefixStore("meshwright/doctor/group", store)
            with errors_unrecorded(), process_group(place, kind, met_at=met_at, timeout=LIMIT):
                index = device_index(place.local_rank) if cuda and place is not None else 0
                self._rates(world, layout, experts, torch.device(kind, index) if cuda else torch.device(kind))
        except MessageError as error:
            self.found += error.found
        except UserError as error:
            self.found.append(Finding.of_error("collectives", error))
        except RuntimeError as error:  # of gloo or NCCL, as they connect
            self.found.append(
                Finding("collectives", True, f"no group of all ranks: {first_line(error)}", REMEDY)
            )

    def _rates(self, world: ExaminedWorld, layout: Layout, experts: bool, device: torch.device) -> None:
        rows, found = group_rates(world, layout, experts, device, self.cluster, LIMIT)
        self.measured["groups"] = rows
        self.found += found
        links, found = link_rates(world, device, self.cluster)
        self.measured["links"] = links
        self.found += found

    def alone(self) -> dict[str, Any]:
        """The result of a rank that has not met the others."""
        rank, ranks = (self.place.rank, self.place.world_size) if self.place is not None else (0, 1)
        names = [os.uname().nodename] * ranks
        rows: list[list[Finding]] = [[] for _ in range(rank)]
        return self._told(merged([*rows, self.found]), names, 1) | {"rank": rank}

    def _told(self, found: list[Finding], names: Any, hosts: int) -> dict[str, Any]:
        return {
            "healthy": not found,
            "fails": any(each.fails for each in found),
            "ranks": len(names),
            "hosts": hosts,
            "findings": [each.to_json() | {"where": of_ranks(each.ranks, names)} for each in found],
            "measured": self.measured,
            "seconds": time.perf_counter() - self.begun,
        }


def _finding(row: dict[str, Any]) -> Finding:
    return Finding(**row | {"ranks": tuple(row["ranks"])})
