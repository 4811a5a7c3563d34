"""The store of a run, as torch and the ranks use it: a client of `store_server.py`."""

from __future__ import annotations

import socket
import threading
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import Store

from meshwright.comm.authentication import AuthenticationError, Codec, greet, pack, unpack
from meshwright.comm.store_server import DONE, READ_BYTES

CONNECT_S = 60.0
"""Longest wait for a connection."""
ANSWER_S = 60.0
"""A server that has not answered so long after the time limit of a request is gone, or stopped."""


class AuthenticatedStore(Store):
    """A client of the `StoreServer` at `endpoint`, over a connection that both sides have proved by a secret.

    Methods wait for keys no longer than `timeout`, or the time that they are given. Raises `DistStoreError`
    where that is over, and `DistNetworkError` where the server is gone or is not the run's. One thread at a
    time uses the connection, also while it waits; `clone` gives another connection. A connection must come
    about within `connect_s`, and an answer within `answer_s` after the time that it may wait for keys.
    """

    def __init__(
        self,
        endpoint: str,
        secret: bytes,
        timeout: timedelta = timedelta(minutes=5),
        connect_s: float = CONNECT_S,
        answer_s: float = ANSWER_S,
    ) -> None:
        super().__init__()
        self.endpoint, self._secret, self._timeout = endpoint, secret, timeout
        self._limits = connect_s, answer_s
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self._closed = False
        self._codec: Codec
        self._clones: list[AuthenticatedStore] = []
        """torch holds the C++ part of a clone alone, which needs this one."""
        with self._lock:
            self._connect()

    # The operations of a store: torch calls them by these names -----------------------------------------

    def set(self, key: str, value: str | bytes) -> None:
        """Set a value."""
        self._ask(b"set", key.encode(), _bytes(value))

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        """Set several values at once."""
        pairs = zip(keys, values, strict=True)
        self._ask(b"set", *(part for key, value in pairs for part in (key.encode(), _bytes(value))))

    def get(self, key: str) -> bytes:
        """The value of a key, once it is there."""
        return self.multi_get([key])[0]

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """The values of keys, once they are there."""
        return self._ask_in_time(b"get", keys, self._timeout)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Return once all keys are there."""
        self._ask_in_time(b"wait", keys, self._timeout if timeout is None else timeout)

    def add(self, key: str, amount: int) -> int:
        """Add to a number, which is 0 if it is not there; returns the sum."""
        return int(self._ask(b"add", key.encode(), str(amount).encode())[0])

    def append(self, key: str, value: str | bytes) -> None:
        """Add to the end of a value, which is empty if it is not there."""
        self._ask(b"append", key.encode(), _bytes(value))

    def check(self, keys: Sequence[str]) -> bool:
        """True if all keys are there."""
        return self._ask(b"check", *(key.encode() for key in keys)) == [b"1"]

    def compare_set(self, key: str, expected: str | bytes, value: str | bytes) -> bytes:
        """Set a value that is as expected, or not there where nothing is expected; returns what is there."""
        return self._ask(b"compare_set", key.encode(), _bytes(expected), _bytes(value))[0]

    def delete_key(self, key: str) -> bool:
        """Remove a key; True if it was there."""
        return self._ask(b"delete", key.encode()) == [b"1"]

    def num_keys(self) -> int:
        """The number of keys."""
        return int(self._ask(b"count")[0])

    deleteKey, getNumKeys = delete_key, num_keys  # noqa: N815  the names by which torch's C++ calls them

    def has_extended_api(self) -> bool:
        """True: `append`, `multi_get` and `multi_set` are there."""
        return True

    @property
    def timeout(self) -> timedelta:
        """Longest wait for a key."""
        return self._timeout

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the longest wait for a key."""
        self._timeout = timeout

    def clone(self) -> AuthenticatedStore:
        """Another client of this store, with a connection of its own."""
        made = AuthenticatedStore(self.endpoint, self._secret, self._timeout, *self._limits)
        self._clones.append(made)
        return made

    def close(self) -> None:
        """Hang up for good, and let clones do so."""
        self._closed = True
        for each in self._clones:
            each.close()
        if (opened := self._socket) is not None:
            with suppress(OSError):
                opened.shutdown(socket.SHUT_RDWR)  # who waits on it gives up
        with self._lock:
            if self._socket is not None:
                self._socket.close()
            self._socket = None

    # The connection ------------------------------------------------------------------------------------

    def _ask_in_time(self, operation: bytes, keys: Sequence[str], timeout: timedelta) -> list[bytes]:
        seconds = timeout.total_seconds()
        status, *found = self._exchange(
            [operation, str(seconds).encode(), *(k.encode() for k in keys)], seconds
        )
        if status != DONE:
            listed = ", ".join(keys[:4])
            raise dist.DistStoreError(f"wait timeout after {seconds * 1000:.0f}ms, keys: {listed}")
        return found

    def _ask(self, *parts: bytes) -> list[bytes]:
        return self._exchange(parts, 0.0)[1:]

    def _exchange(self, parts: Sequence[bytes], seconds: float) -> list[bytes]:
        """Send a request, and return the answer; a connection that anything interrupted is not used again."""
        with self._lock:
            if self._socket is None:
                self._connect()
            opened, whole = self._socket, False
            assert opened is not None
            try:
                opened.settimeout(seconds + self._limits[1])
                opened.sendall(self._codec.seal(pack(parts)))
                got = bytearray()
                while (content := self._codec.open(got)) is None:
                    part = opened.recv(READ_BYTES)
                    if not part:
                        raise ConnectionResetError("Connection closed by peer")
                    got += part
                whole = True
                return unpack(content)
            except (OSError, AuthenticationError) as error:
                raise dist.DistNetworkError(f"the store at {self.endpoint}: {error}") from error
            finally:
                if not whole:
                    self._socket = None
                    opened.close()

    def _connect(self) -> None:
        opened: Any = None
        try:
            if self._closed:
                raise ConnectionAbortedError("it was closed here")
            opened = _dial(self.endpoint, self._limits[0])
            self._codec = greet(opened, self._secret)
        except (OSError, AuthenticationError) as error:
            if opened is not None:
                opened.close()
            raise dist.DistNetworkError(f"the store at {self.endpoint}: {error}") from error
        self._socket = opened


def _dial(endpoint: str, seconds: float) -> socket.socket:
    if endpoint.startswith("/"):
        opened = socket.socket(socket.AF_UNIX)
        opened.settimeout(seconds)
        opened.connect(endpoint)
        return opened
    host, _, port = endpoint.rpartition(":")
    opened = socket.create_connection((host.strip("[]"), int(port)), seconds)
    opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return opened


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)
