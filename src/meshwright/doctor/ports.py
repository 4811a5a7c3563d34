"""Ports of this host: that on which the ranks are to meet, and the loopback interface."""

from __future__ import annotations

import errno
import os
import re
import socket
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from meshwright.doctor.finding import Finding
from meshwright.host import content
from meshwright.rank.env import Worker
from meshwright.rank.network import check_loopback
from meshwright.rank.rendezvous import master
from meshwright.spec import UserError

BY_AGENT = "TORCHELASTIC_USE_AGENT_STORE"
"""Set by a torchrun, which holds the port itself."""
_LISTENS = "0A"  # a state of /proc/net/tcp


def loopback(place: Worker | None) -> list[Finding]:
    """A loopback interface on which the ranks of one host cannot meet."""
    if place is not None and place.local_world_size < place.world_size:
        return []
    try:
        check_loopback()
    except UserError as error:
        return [Finding.of_error("ports", error)]
    return []


def master_port(place: Worker | None, given: Mapping[str, str] | None = None) -> list[Finding]:
    """A port where rank 0 cannot listen for the others, in a world that no torchrun has made."""
    given = os.environ if given is None else given
    if place is None or place.launched or given.get(BY_AGENT) == "True":
        return []
    try:
        host, port = master(given)
    except UserError as error:
        return [Finding.of_error("ports", error)]
    if place.rank > 0:
        return []
    try:
        socket.create_server(("", port)).close()
    except OSError as error:
        taken = error.errno == errno.EADDRINUSE
        who = (_holder(port) or "another process") if taken else ""
        reason = f"port {port} is taken by {who}" if taken else f"port {port}: {error.strerror}"
        return [
            Finding(
                "ports",
                True,
                f"rank 0 cannot listen for the other ranks at {host}: {reason}",
                "set MASTER_PORT to a free port in all tasks, or end what holds this one",
            )
        ]
    return []


def _holder(port: int) -> str:
    """The process of this host that listens on a port, in words; "" where it is not to be seen."""
    inodes = set()
    for table in ("tcp", "tcp6"):
        for line in content(Path("/proc/net") / table).splitlines()[1:]:
            fields = line.split()
            if int(fields[1].rpartition(":")[2], 16) == port and fields[3] == _LISTENS:
                inodes.add(f"socket:[{fields[9]}]")
    for descriptor in Path("/proc").glob("[0-9]*/fd/*"):
        with suppress(OSError):  # it has ended, or is another user's
            if os.readlink(descriptor) in inodes:
                process = descriptor.parts[2]
                name = content(Path("/proc") / process / "comm").strip()
                return f"process {process} ({re.sub(r'[^ -~]', '?', name)})"
    return ""
