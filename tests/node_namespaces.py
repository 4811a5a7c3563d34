"""Nodes on this machine: network namespaces with names and links of their own, on a bridge of this process.

It takes root, and `ip` (iproute2).
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

NUMBER = 1 + os.getpid() % 250
"""Tells apart the bridges, networks and ports of processes that run tests at the same time."""
BRIDGE, CONTROLLER = f"mw{NUMBER}", f"10.78.{NUMBER}.254"
"""The bridge, and this machine's own address on it."""


def address(number: int) -> str:
    """The address of a node, which are counted from 1."""
    return f"10.78.{NUMBER}.{number}"


@contextmanager
def namespaces(names: Sequence[str]) -> Iterator[None]:
    """A network namespace `BRIDGE-NAME` for each node, in which the nodes' names are known."""
    hosts = "127.0.0.1 localhost\n" + "".join(
        f"{address(number)} {name}\n" for number, name in enumerate(names, start=1)
    )
    try:
        _do("ip", "link", "add", BRIDGE, "type", "bridge")
        _do("ip", "addr", "add", f"{CONTROLLER}/24", "dev", BRIDGE)
        _do("ip", "link", "set", BRIDGE, "up")
        for number, name in enumerate(names, start=1):
            space = f"{BRIDGE}-{name}"
            etc = Path("/etc/netns") / space
            etc.mkdir(parents=True, exist_ok=True)
            (etc / "hosts").write_text(f"{hosts}{CONTROLLER} {os.uname().nodename}\n", encoding="utf-8")
            _do("ip", "netns", "add", space)
            _do("ip", "link", "add", space, "type", "veth", "peer", "eth0", "netns", space)
            _do("ip", "link", "set", space, "master", BRIDGE, "up")
            _do("ip", "-n", space, "addr", "add", f"{address(number)}/24", "dev", "eth0")
            _do("ip", "-n", space, "link", "set", "eth0", "up")
            _do("ip", "-n", space, "link", "set", "lo", "up")
        yield
    finally:
        for name in names:
            space = f"{BRIDGE}-{name}"
            # The link first: a namespace goes later than its name, when nothing of it is in use any more.
            subprocess.run(["ip", "link", "del", space], check=False, stderr=subprocess.DEVNULL)
            subprocess.run(["ip", "netns", "del", space], check=False, stderr=subprocess.DEVNULL)
            shutil.rmtree(Path("/etc/netns") / space, ignore_errors=True)
        subprocess.run(["ip", "link", "del", BRIDGE], check=False, stderr=subprocess.DEVNULL)


def _do(*command: str) -> None:
    subprocess.run(command, check=True)
