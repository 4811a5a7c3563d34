"""Where the launchers of a run's hosts meet: in its folder, or at a store on one of them (`--rendezvous`)."""

from __future__ import annotations

import socket
import warnings
from contextlib import suppress

from meshwright.spec import UserError

FOLDER_HOSTS = 64
"""Most hosts that should meet in a folder, where each reads the files of all of them four times a second."""
STORE_PORT = 29400
"""The port of the store in jobs that `meshwright launch` submits."""


def parse_rendezvous(given: str) -> tuple[str, int]:
    """The host and the port of HOST:PORT. Raises `UserError`."""
    host, _, port = given.rpartition(":")
    if not host or ":" in host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise UserError(
            f"--rendezvous: {given!r} is not HOST:PORT; give the name or the IPv4 address of one of the "
            f"hosts, and a port that is free there, as node1:{STORE_PORT}"
        )
    return host, int(port)


def check_rendezvous(given: str | None, most: int) -> None:
    """Raise `UserError` for what is not HOST:PORT; warn of `most` hosts that are too many for a folder."""
    if given is not None:
        parse_rendezvous(given)
    elif most > FOLDER_HOSTS:
        warnings.warn(
            f"--nodes: {most} hosts each read the words of all others in the folder of --out four times a "
            f"second, which may be too much for its server above {FOLDER_HOSTS}; add --rendezvous HOST:PORT, "
            f"where HOST is one of them",
            stacklevel=2,
        )


def address_here(host: str, own: str) -> str | None:
    """The address at which this host listens as `host`; None where that is another host, or none.

    `own` is the address that the others reach this host at. A host's name may stand for its loopback
    interface there, as on Debian, and then means that one.
    """
    loopback = host == "localhost" or host.startswith("127.")
    try:
        found = {str(each[4][0]) for each in socket.getaddrinfo(host, 0, socket.AF_INET)}
    except OSError:  # nobody knows the name, or not yet
        return None
    for address in sorted(found):
        with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            probe.bind((address, 0))  # fails for an address of another host
            return own if address.startswith("127.") and not loopback else address
    return None
