"""Hosts for a bench: the machine as it is, or two network namespaces on it with a slow link between them."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

RANKS = 4
_PORT = 29517


@dataclass
class Hosts:
    """Where ranks run: for each host what comes before a command, and the interface that carries messages."""

    interface: list[str]
    before: list[list[str]] = field(default_factory=lambda: [[]])
    address: str = "127.0.0.1"

    def torchrun(self, arguments: list[str], ranks: int = RANKS) -> None:
        """Run torchrun with these arguments on all hosts, `ranks` ranks in all. Raises where one fails."""
        count = len(self.before)
        port = _free_port() if count == 1 else _PORT
        started = []
        for host, before in enumerate(self.before):
            command = [*before, sys.executable, "-m", "torch.distributed.run", "--nnodes", str(count)]
            command += ["--node-rank", str(host), "--nproc-per-node", str(ranks // count)]
            command += ["--master-addr", self.address, "--master-port", str(port), *arguments]
            environment = {**os.environ, "GLOO_SOCKET_IFNAME": self.interface[host], "OMP_NUM_THREADS": "1"}
            started.append(subprocess.Popen(command, env=environment))
        codes = [process.wait() for process in started]
        if any(codes):
            raise SystemExit(f"hosts ended with {codes}")


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


@contextmanager
def here() -> Iterator[Hosts]:
    """The machine as it is."""
    yield Hosts(["lo"])


def missing() -> str | None:
    """Why there can be no namespaces here, or None."""
    if os.geteuid() != 0:
        return "network namespaces take root"
    lacking = [tool for tool in ("ip", "tc", "taskset") if shutil.which(tool) is None]
    if lacking:
        return f"there is no {lacking[0]} here"
    if len(os.sched_getaffinity(0)) < 2:
        return "two hosts take two cores"
    return None


@contextmanager
def two_hosts(gbit: float) -> Iterator[Hosts]:
    """Two namespaces, each with half of the cores, joined by a link of `gbit` Gb/s; gone afterwards."""
    why = missing()
    if why is not None:
        raise SystemExit(f"skipped: {why}")
    names = [f"mw{os.getpid()}{side}" for side in "ab"]
    cores = sorted(os.sched_getaffinity(0))
    half = len(cores) // 2
    shares = (cores[:half], cores[half : 2 * half])
    before = [
        ["ip", "netns", "exec", name, "taskset", "-c", ",".join(map(str, share))]
        for name, share in zip(names, shares, strict=True)
    ]
    try:
        for name in names:
            _do("ip", "netns", "add", name)
        _do(
            "ip",
            "link",
            "add",
            names[0],
            "netns",
            names[0],
            "type",
            "veth",
            "peer",
            names[1],
            "netns",
            names[1],
        )
        for number, name in enumerate(names, start=1):
            inside = ("ip", "-n", name)
            _do(*inside, "addr", "add", f"10.77.0.{number}/24", "dev", name)
            _do(*inside, "link", "set", name, "up")
            _do(*inside, "link", "set", "lo", "up")
            limit = ("rate", f"{gbit}gbit", "burst", "256kb", "latency", "50ms")
            _do("tc", "-n", name, "qdisc", "add", "dev", name, "root", "tbf", *limit)
        yield Hosts(names, before, "10.77.0.1")
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False, stderr=subprocess.DEVNULL)


def _do(*command: str) -> None:
    subprocess.run(command, check=True)
