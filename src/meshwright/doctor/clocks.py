"""Clocks of hosts, compared with each other."""

from __future__ import annotations

import statistics
import time

from meshwright.doctor.finding import Finding
from meshwright.doctor.world import ExaminedWorld
from meshwright.units import seconds

MOST_S = 5.0
"""Seconds that clocks may differ: ranks do not leave a meeting at the same moment, and NTP keeps hosts within
a fraction of one."""


def clocks(world: ExaminedWorld) -> list[Finding]:
    """On rank 0, each host whose clock differs from the median of all. Every rank calls this.

    No step depends on a clock, so a run goes on.
    """
    world.ranks.barrier()
    own = time.time()
    rows = world.ranks.gather(own)
    if not rows:
        return []
    usual = statistics.median_low([rows[rank] for rank in world.leaders])
    found = []
    for leader in world.leaders:
        ahead = rows[leader] - usual
        if abs(ahead) > MOST_S:
            where = "ahead of" if ahead > 0 else "behind"
            ranks = tuple(rank for rank, host in enumerate(world.hosts) if host == world.hosts[leader])
            found.append(
                Finding(
                    "clocks",
                    False,
                    f"the clock of {world.names[leader]} is {seconds(abs(ahead))} {where} that of others",
                    "set it (chronyc makestep, or timedatectl set-ntp true): times in logs, requests to "
                    "object stores, which are signed with a time, and the end of a job go by it",
                    ranks,
                )
            )
    return found
