"""A connection to a run's store (`store_server.py`), for processes that have no torch."""

from __future__ import annotations

import socket
import threading
from collections.abc import Sequence
from contextlib import suppress

from meshwright.comm.authentication import AuthenticationError, Codec, greet, pack, unpack
from meshwright.comm.store_server import READ_BYTES


class StoreLostError(ConnectionError):
    """A store that is gone, does not answer, or is not the run's."""


class StoreClient:
    """Requests to the `StoreServer` at `endpoint`, over a connection that both sides have proved by a secret.

    One thread at a time uses the connection, also while it waits. It must come about within `connect_s`, and
    an answer within `answer_s` after the time that it may wait for keys. Raises `StoreLostError`; the next
    request then makes a new connection.
    """

    def __init__(self, endpoint: str, secret: bytes, connect_s: float, answer_s: float) -> None:
        self.endpoint, self._secret = endpoint, secret
        self._limits = connect_s, answer_s
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self._closed = False
        self._codec: Codec
        with self._lock:
            self._connect()

    def exchange(self, parts: Sequence[bytes], seconds: float = 0.0) -> list[bytes]:
        """Send a request, which may wait for keys so long; return the answer, whose first part is its status.

        A connection that anything interrupted is not used again.
        """
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
                raise StoreLostError(f"the store at {self.endpoint}: {error}") from error
            finally:
                if not whole:
                    self._socket = None
                    opened.close()

    def peek(self, keys: Sequence[str]) -> list[bytes]:
        """The values of keys now; empty for those that are not there."""
        return self.exchange([b"peek", *(key.encode() for key in keys)])[1:]

    def set_and_peek(self, key: str, value: bytes, keys: Sequence[str]) -> list[bytes]:
        """Set a value, and return those of keys then, in one exchange; empty for those that are not there."""
        return self.exchange([b"set_and_peek", key.encode(), value, *(each.encode() for each in keys)])[1:]

    def create(self, key: str, value: bytes) -> bytes:
        """Set a value that is not there yet; returns what is there."""
        return self.exchange([b"compare_set", key.encode(), b"", value])[1]

    def delete(self, key: str) -> None:
        """Remove a key, if it is there."""
        self.exchange([b"delete", key.encode()])

    def close(self) -> None:
        """Hang up for good."""
        self._closed = True
        if (opened := self._socket) is not None:
            with suppress(OSError):
                opened.shutdown(socket.SHUT_RDWR)  # who waits on it gives up
        with self._lock:
            if self._socket is not None:
                self._socket.close()
            self._socket = None

    def _connect(self) -> None:
        opened: socket.socket | None = None
        try:
            if self._closed:
                raise ConnectionAbortedError("it was closed here")
            opened = _dial(self.endpoint, self._limits[0])
            self._codec = greet(opened, self._secret)
        except (OSError, AuthenticationError) as error:
            if opened is not None:
                opened.close()
            raise StoreLostError(f"the store at {self.endpoint}: {error}") from error
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
