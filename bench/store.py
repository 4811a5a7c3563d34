"""Time of an operation of the run's store beside torch's, and processor time on both sides of it.

One client adds to a number over the loopback interface or a Unix socket; both servers take turns, each in a
process of its own.

    python bench/store.py --operations 5000 --rounds 3
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch.distributed as dist

from meshwright.comm.store import AuthenticatedStore
from meshwright.comm.store_server import StoreServer

SERVERS = ("torch's TCPStore", "the run's, TCP", "the run's, Unix socket")


def serve(kind: str) -> None:
    """Be a server until the standard input ends; write its processor time for each line that comes."""
    if kind == SERVERS[0]:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        told = [str(store.port), ""]
    else:
        server = StoreServer("127.0.0.1" if kind == SERVERS[1] else Path(tempfile.mkdtemp()))
        told = [server.endpoint, server.secret.hex()]
    print(json.dumps(told), flush=True)
    for _ in sys.stdin:
        print(time.process_time(), flush=True)


class Server:
    """A server of one kind, and a client of it in this process."""

    def __init__(self, kind: str) -> None:
        command = [sys.executable, __file__, "--serve", kind]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        endpoint, secret = json.loads(self.process.stdout.readline())
        self.client: Any = (
            AuthenticatedStore(endpoint, bytes.fromhex(secret))
            if secret
            else dist.TCPStore("127.0.0.1", int(endpoint), is_master=False, wait_for_workers=False)
        )

    def processor_seconds(self) -> float:
        """Processor time of the server until now."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return float(self.process.stdout.readline())

    def time(self, operations: int) -> tuple[float, float, float]:
        """Microseconds of an operation: by the clock, of the client's processor, of the server's."""
        client, clock, server = time.process_time(), time.perf_counter(), self.processor_seconds()
        for _ in range(operations):
            self.client.add("count", 1)
        spent = time.perf_counter() - clock, time.process_time() - client, self.processor_seconds() - server
        return tuple(1e6 * seconds / operations for seconds in spent)  # type: ignore[return-value]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--operations", type=int, default=5000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--serve", choices=SERVERS)
    options = parser.parse_args()
    if options.serve:
        serve(options.serve)
        os._exit(0)
    servers = {kind: Server(kind) for kind in SERVERS}
    rows: dict[str, list[tuple[float, float, float]]] = {kind: [] for kind in SERVERS}
    for _ in range(options.rounds):
        for kind, server in servers.items():
            rows[kind].append(server.time(options.operations))
    for kind, found in rows.items():
        wall, client, server_side = (statistics.median(column) for column in zip(*found, strict=True))
        print(
            f"{kind:24} {wall:6.0f} us, client {client:5.0f}, server {server_side:5.0f} of their processors"
        )
    for server in servers.values():
        server.process.kill()


if __name__ == "__main__":
    main()
