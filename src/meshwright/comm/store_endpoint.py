"""Where the server of a run's store listens, and whose process a connection comes from."""

from __future__ import annotations

import os
import secrets
import socket
import struct
from contextlib import suppress
from ipaddress import ip_address
from pathlib import Path

LONGEST_PATH = 100
"""Bytes of a path that a Unix socket can have on every system."""
_ESTABLISHED = "01"  # <net/tcp_states.h>
_CREDENTIALS = struct.Struct("iII")


def endpoint_of(host: str, port: int) -> str:
    """The endpoint of a server at a TCP port."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def listen(at: str | Path, port: int = 0) -> tuple[str, socket.socket]:
    """The endpoint and the listening socket at an address and a port, or at a Unix socket in a folder.

    Port 0 stands for one that is free.

    A folder that can have no socket, such as one with too long a path, gives a port of the loopback
    interface.
    """
    if isinstance(at, Path):
        path = str(at / f"store-{secrets.token_hex(4)}")
        if hasattr(socket, "AF_UNIX") and len(os.fsencode(path)) <= LONGEST_PATH:
            listener = socket.socket(socket.AF_UNIX)
            try:
                listener.bind(path)
                os.chmod(path, 0o600)
                listener.listen(4096)
                return path, listener
            except OSError:  # a file system without sockets
                listener.close()
        at = "127.0.0.1"
    family = socket.AF_INET6 if ":" in at else socket.AF_INET
    listener = socket.create_server((at, port), family=family, backlog=4096)
    return endpoint_of(at, listener.getsockname()[1]), listener


def peer_name(opened: socket.socket, address: object) -> str:
    """The other side of a connection: its address, or the user where that is on this host."""
    if opened.family == socket.AF_UNIX:
        if not hasattr(socket, "SO_PEERCRED"):
            return "a process of this host"
        pid, uid, _ = _CREDENTIALS.unpack(
            opened.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        )
        return f"process {pid} of user {uid}"
    assert isinstance(address, tuple)
    host = str(address[0])
    user = None
    if host == opened.getsockname()[0] or ip_address(host.partition("%")[0]).is_loopback:
        user = _user_of(opened.family == socket.AF_INET6, address[1])
    return host if user is None else f"user {user} of this host"


def _user_of(v6: bool, port: int) -> str | None:
    """The user whose connected TCP socket of this host has the local `port`; None if that cannot be told."""
    with suppress(OSError):
        for line in Path(f"/proc/net/tcp{'6' if v6 else ''}").read_text().splitlines()[1:]:
            columns = line.split()
            if int(columns[1].rpartition(":")[2], 16) == port and columns[3] == _ESTABLISHED:
                return columns[7]
    return None
