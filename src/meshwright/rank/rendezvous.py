"""How the ranks of a world meet: at the store that their supervisor holds, or with the help of torchrun's.

Whoever starts the run makes a secret, which the run's store asks of everybody (`comm/store_server.py`).
A supervisor gives it to its ranks with their environment. Under a torchrun of the user's, srun or mpirun,
rank 0 holds the store and puts the secret into a file for this user alone; torchrun's own store, or that in
its place, which does what anybody says who reaches its port, passes on no more than where both are. Who
changes that keeps ranks from meeting, and can do nothing else.
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

from meshwright.comm.authentication import AuthenticationError, read_secret, write_secret
from meshwright.comm.store_endpoint import endpoint_of
from meshwright.comm.store_server import StoreServer
from meshwright.rank.launchers import launcher_of
from meshwright.rank.network import only_address
from meshwright.rank.scratch import scratch_folder
from meshwright.spec import UserError

if TYPE_CHECKING:
    from meshwright.comm.store import AuthenticatedStore
    from meshwright.rank.env import Worker

STORE = "MESHWRIGHT_STORE"
"""Set in ranks that have a supervisor, to the endpoint of the world's store."""
SECRET = "MESHWRIGHT_SECRET"
"""The secret of the world's store: set in ranks that have a supervisor, or by the user on all hosts."""
SHORTEST_WORD = 16
FILE = ".meshwright-secret-"
"""Start of the name of a file with a secret."""
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

    from meshwright.comm.store import AuthenticatedStore

    with ExitStack() as stack:
        host, port = ("", 0) if place.launched else master(os.environ)
        where = os.environ[STORE] if place.launched else f"{host}:{port}"
        try:
            if place.launched:
                store = AuthenticatedStore(where, bytes.fromhex(os.environ[SECRET]), timeout)
                _meet(store, place)
            else:
                with _told(place, (host, port), timeout, folder, stack) as (endpoint, secret):
                    store = AuthenticatedStore(endpoint, secret, timeout)
                    _meet(store, place)
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


def _meet(store: AuthenticatedStore, place: Worker) -> None:
    """Return when all ranks have come to the store."""
    if store.add(f"{KEY}/joined", 1) == place.world_size:
        store.set(f"{KEY}/all", "")
    store.wait([f"{KEY}/all"])


@contextmanager
def _told(
    place: Worker, master: tuple[str, int], timeout: timedelta, folder: Path | None, stack: ExitStack
) -> Iterator[tuple[str, bytes]]:
    """The endpoint and the secret of the store that rank 0 holds until `stack` ends.

    Other ranks are told by torchrun's store, or by one that rank 0 has at `master` in the place of it;
    neither that nor the file of the secret is needed once all have met, when the context ends.
    """
    from torch.distributed.rendezvous import rendezvous

    at = f"tcp://{master[0]}:{master[1]}" if "RANK" not in os.environ else "env://"  # a torchrun may hold it
    told, _, _ = next(rendezvous(at, place.rank, place.world_size, timeout=timeout))
    secret, one_host = _given_secret(), place.local_world_size == place.world_size
    if place.rank > 0:
        endpoint, file = json.loads(told.get(KEY))
        yield endpoint, secret or _read(Path(str(file)), place, folder)
        return
    private = stack.enter_context(scratch_folder())
    listens, host = (private, "") if one_host else _reached_at(master[0])
    server = StoreServer(listens, secret)
    stack.callback(server.close, LEAVE_S)
    endpoint, file = endpoint_of(host, server.port) if host else server.endpoint, None
    if secret is None:
        file = (private if one_host else _common(folder)) / f"{FILE}{secrets.token_hex(8)}"
        try:
            write_secret(file, server.secret)
        except OSError as error:
            raise UserError(
                f"{SECRET}: the secret of the run cannot be written to {file} ({error.strerror}); give a "
                f"common --out, or set {SECRET} to the same word on all hosts"
            ) from error
    try:
        told.set(KEY, json.dumps([endpoint, file and str(file)]))
        yield server.endpoint, server.secret
    finally:
        if file is not None:
            file.unlink(missing_ok=True)


def _given_secret() -> bytes | None:
    """The secret of the word that the user has set on all hosts. Raises `UserError` for a short one."""
    word = os.environ.get(SECRET)
    if word is None:
        return None
    if len(word) < SHORTEST_WORD:
        raise UserError(
            f"{SECRET}: a word of {len(word)} characters can be guessed; set the same one of {SHORTEST_WORD} "
            f"or more on all hosts, drawn at random, such as by openssl rand -hex 32, or unset it"
        )
    return hashlib.sha256(word.encode()).digest()


def _read(file: Path, place: Worker, folder: Path | None) -> bytes:
    """The secret in a file that rank 0 has written. Raises `UserError`.

    What tells its path may be anybody's: no other file than such a one is read.
    """
    known = folder is not None and file.parent in (folder.absolute(), *folder.absolute().parents)
    trusted = known and file.parent.is_dir() and not file.parent.stat().st_mode & 0o022
    limit = time.monotonic() + SEEN_S
    while True:
        try:
            if not file.name.startswith(FILE):
                raise AuthenticationError("it has another name")
            return read_secret(file, trusted=trusted)
        except (OSError, AuthenticationError) as error:
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
    return next((each for each in listed if each.is_dir() and os.access(each, os.W_OK)), _home())


def _home() -> Path:
    try:
        return Path.home()
    except RuntimeError:  # this user has none
        return Path.cwd()


def _reached_at(master: str) -> tuple[str, str]:
    """(address to listen on, host that others connect to) of this host, that of rank 0.

    Both are what MASTER_ADDR says, if that is an address of this host. Where it is a loopback address, as a
    host's own name may be, or a service's, they are the address of the interface that ranks are to meet on,
    or this host's only other one; else every address is listened on, and others take MASTER_ADDR as they read
    it.
    """
    with suppress(OSError):
        for *_, address in socket.getaddrinfo(master, 0, socket.AF_UNSPEC, socket.SOCK_STREAM):
            host = ip_address(str(address[0]).partition("%")[0])
            family = socket.AF_INET if host.version == 4 else socket.AF_INET6
            with suppress(OSError), socket.create_server((str(host), 0), family=family):
                if not host.is_loopback:
                    return str(host), str(host)
    found = only_address([os.environ.get(name, "") for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")])
    return ("0.0.0.0", master) if found is None else (found, found)


def master(given: Mapping[str, str]) -> tuple[str, int]:
    """Host and port of rank 0, of MASTER_ADDR and MASTER_PORT, or as a launcher's variables tell.

    Raises `UserError` where one is wrong, or nothing tells it.
    """
    if "RANK" not in given and (started := launcher_of(given)) is not None:
        launcher, task = started
        return launcher.master(task, given)
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
    return host, int(port)
