"""Which hosts reach which by TCP, at the addresses and ports that ranks would take.

gloo and NCCL listen on ports that the kernel chooses, so that a firewall with a few open ports lets ranks
meet at the store and not in a group, where they would wait for minutes.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress

from meshwright.doctor.finding import Finding
from meshwright.doctor.world import ExaminedWorld
from meshwright.rank.network import only_address

CONNECT_S = 5.0
"""Longest wait for a connection."""
INTERFACES = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"
"""Variables by which a user names the interface that ranks meet on."""


def reachability(world: ExaminedWorld, master: str) -> list[Finding]:
    """On the first rank of each host, the hosts that it does not reach. Every rank calls this.

    A host tries those that are 1, 2, 4, ... hosts further on, the first after the last again. `master` is an
    address of rank 0's host.
    """
    if len(world.leaders) == 1:
        return []
    with ExitStack() as stack:
        port = stack.enter_context(_listening()) if world.leads else 0
        own = [_address(master), port] if world.leads else None
        places = world.ranks.broadcast(world.ranks.gather(own))
        found: list[Finding] = []
        if world.leads:
            hosts, at = len(world.leaders), world.leaders.index(world.rank)
            for step in (1 << power for power in range((hosts - 1).bit_length())):
                other = world.leaders[(at + step) % hosts]
                found += _reach(world, other, *places[other])
        world.ranks.barrier()
    return found


def _reach(world: ExaminedWorld, other: int, address: str, port: int) -> list[Finding]:
    try:
        socket.create_connection((address, port), CONNECT_S).close()
    except OSError as error:
        return [
            Finding(
                "ports",
                True,
                f"{world.names[world.rank]} does not reach {world.named(other)} at {address}:{port} "
                f"({error.strerror or error}), where ranks meet on ports that the kernel chooses",
                "let hosts of a run reach each other on all ports of net.ipv4.ip_local_port_range, or name "
                f"the interface of a network on which they do by {' and '.join(INTERFACES)}",
            )
        ]
    return []


def _address(master: str) -> str:
    """This host's address on the interface that the user names, or else on the way to the master.

    On the master's own host that is the master's address, unless it is a loopback one.
    """
    if named := [os.environ[name] for name in INTERFACES if name in os.environ]:
        return only_address(named) or master
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((master, 9))  # no packet is sent: the kernel chooses the route
        address = str(probe.getsockname()[0])
        return (only_address([]) or address) if address.startswith("127.") else address
    return only_address([]) or master


@contextmanager
def _listening() -> Iterator[int]:
    """Accept connections on a port that the kernel chooses, which is yielded, and close them."""
    with socket.create_server(("", 0)) as server:

        def accept() -> None:
            with suppress(OSError):  # the server is closed
                while True:
                    server.accept()[0].close()

        threading.Thread(target=accept, daemon=True).start()
        yield int(server.getsockname()[1])
        with suppress(OSError):
            server.shutdown(socket.SHUT_RDWR)
