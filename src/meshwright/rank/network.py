"""IPv4 addresses of this host, and the one that other hosts reach it at (Linux)."""

from __future__ import annotations

import fcntl
import socket
import struct
import sys
from collections.abc import Sequence
from contextlib import suppress

from meshwright.spec import UserError

_SIOCGIFADDR = 0x8915  # <linux/sockios.h>


def own_address(given: str | None = None) -> tuple[str, str]:
    """Return (address, interface) of this host: those of `given`, or else the only ones beside loopback.

    Raises `UserError` for an address that is of IPv6 or not this host's, and where there is a choice.
    """
    found = _addresses()
    if given is not None and given.startswith("127.") and "127.0.0.1" in found:
        found[given] = found["127.0.0.1"]  # all of 127.0.0.0/8 is this host
    listed = ", ".join(f"{address} ({interface})" for address, interface in found.items()) or "none"
    if given is not None:
        if ":" in given:
            raise UserError(
                f"--address: {given} is an IPv6 address, and hosts meet over IPv4; this one has {listed}"
            )
        if given not in found:
            raise UserError(f"--address: {given} is not an address of this host; it has {listed}")
        return given, found[given]
    outside = {address: name for address, name in found.items() if not address.startswith("127.")}
    if len(outside) != 1:
        raise UserError(
            f"--address: this host has {listed}; give the address that the other hosts reach it at, on the "
            f"fastest network that they share"
        )
    return next(iter(outside.items()))


def only_address(interfaces: Sequence[str]) -> str | None:
    """The address of the first of some interfaces that has one, or else the only one beside loopback."""
    found = {name: address for address, name in _addresses().items()}
    given = next((found[name] for name in interfaces if name in found), None)
    outside = [address for address in found.values() if not address.startswith("127.")]
    return given or (outside[0] if len(outside) == 1 else None)


def interface_towards(host: str) -> str | None:
    """The interface on which this host reaches another, where its own name does not lead to one.

    Gloo listens at the address of this host's name. Where that is a loopback address, or another host's, as
    in a container, no other host can connect; None where the name is good, or nothing is reached outside.
    """
    found = _addresses()
    with suppress(OSError):
        own = {str(each[4][0]) for each in socket.getaddrinfo(socket.gethostname(), 0, socket.AF_INET)}
        if any(address in found and not address.startswith("127.") for address in own):
            return None
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))  # no packet is sent: the kernel chooses the route
        address = str(probe.getsockname()[0])
        return None if address.startswith("127.") else found.get(address)
    return None


def check_loopback() -> None:
    """Raise `UserError` if the loopback interface, on which ranks of this host meet, has no address."""
    if sys.platform == "linux" and "lo" not in (found := _addresses()).values():
        listed = ", ".join(f"{interface} ({address})" for address, interface in found.items()) or "none"
        raise UserError(
            f"GLOO_SOCKET_IFNAME: lo, the loopback interface, on which ranks of this host meet, has no "
            f"address (those with one: {listed}); bring it up (ip link set lo up), or name another one"
        )


def _addresses() -> dict[str, str]:
    """Return the interface of each address of this host."""
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # it is down, or has no address
                answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                found[socket.inet_ntoa(answer[20:24])] = name
    return found
