"""How the ranks of a world meet: at the store that their supervisor holds, or with the help of torchrun's.

Whoever starts the run makes a secret, which the run's store asks of everybody (`parallel/store_server.py`).
A supervisor gives it to its ranks with their environment. Under a torchrun of the user's, rank 0 holds the
store and puts the secret into a file for this user alone; torchrun's own store, which does what anybody says
who reaches its port, passes on no more than where both are. Who changes that keeps ranks from meeting, and
can do nothing else.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING

from meshwright.launch.network import own_address
from meshwright.launch.scratch import scratch_folder
from meshwright.parallel.authentication import AuthenticationError, new_secret, read_secret, write_secret
from meshwright.parallel.store_server import StoreServer
from meshwright.spec import UserError

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

    from meshwright.launch.env import Worker
    from meshwright.parallel.store import AuthenticatedStore

STORE = "MESHWRIGHT_STORE"
"""Set in ranks that have a supervisor, to the endpoint of the world's store."""
SECRET = "MESHWRIGHT_SECRET"
"""The secret of the world's store: set in ranks that have a supervisor, or by the user on all hosts."""
KEY = "meshwright/store"
LEAVE_S = 5.0
"""The store is kept so long for ranks that have not left the world yet."""
SEEN_S = 10.0
"""A file of one host is seen on another so soon, or it is not in a common folder."""


@contextmanager
def world_store(
    place: Worker, timeout: timedelta, folder: Path | None = None
) -> Iterator[AuthenticatedStore]:
    """The store of a world of several ranks, for as long as the context lasts; `place` is this process's.

    `folder` is one that all ranks have, such as the run's, which need not exist yet. Raises `UserError` where
    the ranks cannot meet.
    """
    import torch.distributed as dist
    from torch.distributed.rendezvous import rendezvous

    from meshwright.parallel.store import AuthenticatedStore

    with ExitStack() as stack:
        where = os.environ[STORE] if place.launched else _master(os.environ)
        try:
            if place.launched:
                store = AuthenticatedStore(where, bytes.fromhex(os.environ[SECRET]), timeout)
            else:
                told, _, _ = next(rendezvous("env://", place.rank, place.world_size, timeout=timeout))
                store = AuthenticatedStore(*_meet(told, place, folder, stack), timeout)
            if store.add(f"{KEY}/joined", 1) == place.world_size:
                store.set(f"{KEY}/all", "")
            store.wait([f"{KEY}/all"])
            told = None  # where rank 0 has that store, it listened until now
        except (dist.DistNetworkError, dist.DistStoreError) as error:
            reason = str(error).splitlines()[0].rstrip(".")
            failed = (
                f"rank {place.rank} of {place.world_size} could not meet the others at {where} ({reason})"
            )
            if place.launched:
                raise UserError(f"{failed}; see that all hosts of the run can reach that address") from error
            raise UserError(
                f"MASTER_ADDR, MASTER_PORT: {failed}; give the address of rank 0's host and a free port "
                f"there, and see that all ranks are started"
            ) from error
        stack.callback(store.close)
        yield store


def _meet(told: Store, place: Worker, folder: Path | None, stack: ExitStack) -> tuple[str, bytes]:
    """The endpoint and the secret of the store that rank 0 holds; other ranks are `told` by torchrun's."""
    given = os.environ.get(SECRET)
    secret = None if given is None else hashlib.sha256(given.encode()).digest()
    one_host = place.local_world_size == place.world_size
    if place.rank == 0:
        private = stack.enter_context(scratch_folder())
        secret = secret or new_secret()
        server = StoreServer(private if one_host else _reached_at(os.environ["MASTER_ADDR"]), secret)
        stack.callback(server.close, LEAVE_S)
        file = None
        if given is None:
            file = (private if one_host else _common(folder)) / f".meshwright-{secrets.token_hex(8)}"
            write_secret(file, secret)
            stack.callback(file.unlink, missing_ok=True)
        told.set(KEY, json.dumps([server.endpoint, file and str(file)]))
        return server.endpoint, secret
    endpoint, path = json.loads(told.get(KEY))
    return endpoint, secret or _read(Path(str(path)), place, folder)


def _read(file: Path, place: Worker, folder: Path | None) -> bytes:
    """The secret in a file that rank 0 has written. Raises `UserError`."""
    trusted = folder is not None and file.parent in (folder.absolute(), *folder.absolute().parents)
    limit = time.monotonic() + SEEN_S
    while True:
        try:
            return read_secret(file, trusted=trusted)
        except (OSError, ValueError, AuthenticationError) as error:
            if time.monotonic() > limit or not isinstance(error, FileNotFoundError):
                reason = error.strerror if isinstance(error, OSError) else error
                raise UserError(
                    f"{SECRET}: rank {place.rank} on {socket.gethostname()} cannot read in {file} the secret "
                    f"that rank 0 wrote there ({reason}); give all hosts a common --out, or set {SECRET} to "
                    f"the same word on each"
                ) from error
        time.sleep(0.1)


def _common(folder: Path | None) -> Path:
    """The folder for a secret that all hosts are to read: at or above `folder`, or else the user's home."""
    listed = [] if folder is None else [folder.absolute(), *folder.absolute().parents]
    return next((each for each in listed if each.is_dir() and os.access(each, os.W_OK)), Path.home())


def _reached_at(master: str) -> str:
    """The address of this host, that of rank 0, at which other hosts reach it.

    It is what MASTER_ADDR says if that is an address of this host. Where it is a loopback address, as in some
    containers, or a service's, it is this host's only other address; else the loopback address.
    """
    found = []
    with suppress(OSError):
        for *_, address in socket.getaddrinfo(master, 0, socket.AF_UNSPEC, socket.SOCK_STREAM):
            host = ip_address(str(address[0]).partition("%")[0])
            family = socket.AF_INET if host.version == 4 else socket.AF_INET6
            with suppress(OSError), socket.create_server((str(host), 0), family=family):
                found.append(host)
    outside = next((host for host in found if not host.is_loopback), None)
    if outside is not None:
        return str(outside)
    try:
        return own_address()[0]
    except UserError:
        if not found:
            raise
        return str(found[0])


def _master(given: Mapping[str, str]) -> str:
    """Return host:port of rank 0 from MASTER_ADDR and MASTER_PORT. Raises `UserError` where one is wrong."""
    host, port = given.get("MASTER_ADDR", ""), given.get("MASTER_PORT", "")
    if not host:
        raise UserError(
            "MASTER_ADDR: it is not set; give the address of rank 0's host, or start with torchrun"
        )
    if not (port.isdecimal() and 0 < int(port) < 1 << 16):
        raise UserError(
            f"MASTER_PORT: {port!r} is not a port; give a free one of {host}, from 1 to 65535, or start with "
            f"torchrun"
        )
    return f"{host}:{port}"
