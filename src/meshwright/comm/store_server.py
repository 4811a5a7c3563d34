"""The server of a run's store: keys and values that the processes of a run share, and nobody else.

It takes the place of the server of `torch.distributed.TCPStore`, which does what anybody says who reaches its
port. Whoever connects has to prove that it knows the run's secret (`authentication.py`). A thread answers all
connections; the process that starts it needs no torch. `store_client.py` has the other side, and `store.py`
that of torch.
"""

from __future__ import annotations

import heapq
import hmac
import itertools
import os
import secrets
import selectors
import socket
import threading
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from meshwright.comm.authentication import (
    NONCE_BYTES,
    PROOF_BYTES,
    AuthenticationError,
    Codec,
    new_secret,
    pack,
    proof,
    unpack,
)
from meshwright.comm.store_endpoint import listen, peer_name

T = TypeVar("T")
DONE, TIMED_OUT = b"", b"timeout"
"""First part of an answer."""
HANDSHAKE_S = 10.0
"""A connection that has not proved by then that it knows the secret is closed."""
MOST_STRANGERS = 1024
"""Connections without that proof, beyond which the oldest one is closed."""
MOST_TOLD = 8
"""Strangers that warnings name."""
MOST_ENDED = 1000
"""Waits that have ended and are still among the deadlines, beside two for each connection."""
PAUSE_S = 0.1
"""Where no descriptor is free for a new connection, none is accepted for so long."""
LONGEST_TURN_S = 3600.0
READ_BYTES = 1 << 20


class Table:
    """Keys and values, with the semantics of `torch.distributed.Store`; for one thread at a time."""

    def __init__(self) -> None:
        self.values: dict[bytes, bytes] = {}

    def add(self, key: bytes, amount: int) -> bytes:
        """Add to a number, which is 0 if it is not there; returns the sum."""
        self.values[key] = found = str(int(self.values.get(key, b"0")) + amount).encode()
        return found

    def append(self, key: bytes, value: bytes) -> None:
        """Add to the end of a value, which is empty if it is not there."""
        self.values[key] = self.values.get(key, b"") + value

    def compare_set(self, key: bytes, expected: bytes, value: bytes) -> bytes:
        """Set a value that is as expected, or not there where nothing is expected; returns what is there."""
        found = self.values.get(key)
        if found == expected or (found is None and not expected):
            self.values[key] = value
            return value
        return expected if found is None else found


class _Connection:
    """A connection to the server; without a codec it is a stranger's as yet."""

    def __init__(self, opened: socket.socket, address: object, now: float) -> None:
        self.socket, self.address, self.since = opened, address, now
        self.nonce = secrets.token_bytes(NONCE_BYTES)
        self.codec: Codec | None = None
        self.got, self.to_send = bytearray(), bytearray(self.nonce)
        self.waits: tuple[int, list[bytes], bool] | None = None
        """Number of a wait, the keys that are missing or asked for, and whether their values are wanted."""


class StoreServer:
    """A server that listens at `at`: an IPv4 or IPv6 address of this host, or a folder for a Unix socket.

    Clients reach it at `endpoint` and need `secret`. Raises `OSError`, such as for a `port` that is taken; 0
    stands for one that is free.
    """

    def __init__(self, at: str | Path, secret: bytes | None = None, port: int = 0) -> None:
        self.secret = new_secret() if secret is None else secret
        self.endpoint, self._listener = listen(at, port)
        self.table = Table()
        self.refused = 0
        """Connections without the proof that were closed."""
        self._told: set[str] = set()
        self._paused: float | None = None
        """When it stopped to accept connections, as no descriptor was free."""
        self._lock = threading.Lock()
        self._waiting: dict[bytes, set[_Connection]] = defaultdict(set)
        self._deadlines: list[tuple[float, int, _Connection]] = []
        self._strangers: dict[_Connection, None] = {}
        self._members: set[_Connection] = set()
        """Connections with the proof."""
        self._numbers = itertools.count()
        self._selector = selectors.DefaultSelector()
        self._wakes, self._wake = socket.socketpair()
        self._listener.setblocking(False)
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._wakes, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._serve, name="store server", daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        """The TCP port; 0 for a Unix socket."""
        return 0 if self.endpoint.startswith("/") else int(self.endpoint.rpartition(":")[2])

    def use(self, work: Callable[[Table], T]) -> T:
        """The result of `work` on the table, between two requests of clients."""
        with self._lock:
            return work(self.table)

    def close(self, patience_s: float = 0.0) -> None:
        """Listen no longer, and hang up on everybody, at the latest after so many seconds."""
        until = time.monotonic() + patience_s
        while self._members and time.monotonic() < until:
            time.sleep(0.005)
        self._wake.close()
        if self._thread is not threading.current_thread():
            self._thread.join()

    # The thread -------------------------------------------------------------------------------------

    def _serve(self) -> None:
        try:
            while self._turn():
                pass
        finally:
            self._listener.close()
            for key in [*self._selector.get_map().values()]:
                key.fileobj.close()  # type: ignore[union-attr]
            self._selector.close()
            if self.endpoint.startswith("/"):
                with suppress(OSError):
                    os.unlink(self.endpoint)

    def _turn(self) -> bool:
        """Answer what has come; False once the server is closed."""
        for key, events in self._selector.select(self._until_next(time.monotonic())):
            if key.fileobj is self._wakes:
                return False
            if key.fileobj is self._listener:
                self._accept()
            else:
                self._answer(key.data, events)
        self._end_waits(time.monotonic())
        return True

    def _until_next(self, now: float) -> float | None:
        times = [self._deadlines[0][0]] if self._deadlines else []
        times += [next(iter(self._strangers)).since + HANDSHAKE_S] if self._strangers else []
        times += [self._paused + PAUSE_S] if self._paused is not None else []
        return min(max(0.0, min(times) - now), LONGEST_TURN_S) if times else None

    def _accept(self) -> None:
        try:
            opened, address = self._listener.accept()
        except (BlockingIOError, ConnectionError):  # gone again
            return
        except OSError:  # no descriptor is free; strangers have some, or others are given back soon
            if self._strangers:
                self._refuse(next(iter(self._strangers)))
            self._selector.unregister(self._listener)
            self._paused = time.monotonic()
            return
        try:
            opened.setblocking(False)
            if opened.family != socket.AF_UNIX:
                opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection = _Connection(opened, address, time.monotonic())
            self._selector.register(opened, selectors.EVENT_READ, connection)
        except OSError:
            opened.close()
            return
        self._strangers[connection] = None
        self._send(connection)
        if len(self._strangers) > MOST_STRANGERS:
            self._refuse(next(iter(self._strangers)))

    def _answer(self, connection: _Connection, events: int) -> None:
        """Take what a connection has sent, and send it what it is due."""
        try:
            if events & selectors.EVENT_READ:
                part = connection.socket.recv(READ_BYTES)
                if not part:
                    self._close(connection)
                    return
                connection.got += part
                self._take(connection)
            if connection.to_send:
                self._send(connection)
        except AuthenticationError:
            self._refuse(connection)
        except BlockingIOError:
            return
        except Exception:  # of this connection alone: the others need the server
            self._close(connection)

    def _take(self, connection: _Connection) -> None:
        """Answer all requests of a connection that have come as a whole."""
        if connection.codec is None:
            if len(connection.got) < NONCE_BYTES + PROOF_BYTES:
                return
            nonces = connection.nonce + bytes(connection.got[:NONCE_BYTES])
            theirs = bytes(connection.got[NONCE_BYTES : NONCE_BYTES + PROOF_BYTES])
            if not hmac.compare_digest(theirs, proof(self.secret, b"client", nonces)):
                raise AuthenticationError("a stranger")
            del connection.got[: NONCE_BYTES + PROOF_BYTES]
            connection.codec = Codec(self.secret, nonces, client=False)
            connection.to_send += proof(self.secret, b"server", nonces)
            del self._strangers[connection]
            self._members.add(connection)
        while (content := connection.codec.open(connection.got)) is not None:
            with self._lock:
                self._do(connection, *unpack(content))

    def _do(self, connection: _Connection, operation: bytes, *given: bytes) -> None:
        table, values = self.table, self.table.values
        answer: Sequence[bytes] = ()
        if operation == b"set":
            for key, value in zip(given[::2], given[1::2], strict=True):
                values[key] = value
                self._wake_up(key)
        elif operation == b"add":
            answer = [table.add(given[0], int(given[1]))]
            self._wake_up(given[0])
        elif operation == b"append":
            table.append(*given)
            self._wake_up(given[0])
        elif operation == b"check":
            answer = [b"1" if all(key in values for key in given) else b"0"]
        elif operation == b"peek":
            answer = [values.get(key, b"") for key in given]
        elif operation == b"set_and_peek":
            values[given[0]] = given[1]
            self._wake_up(given[0])
            answer = [values.get(key, b"") for key in given[2:]]
        elif operation == b"delete":
            answer = [b"1" if values.pop(given[0], None) is not None else b"0"]
        elif operation == b"compare_set":
            answer = [table.compare_set(*given)]
            self._wake_up(given[0])
        elif operation == b"count":
            answer = [str(len(values)).encode()]
        elif operation in (b"get", b"wait"):
            seconds, *keys = given
            self._begin_wait(connection, keys, float(seconds), operation == b"get")
            return
        else:
            raise ValueError(f"no operation {operation!r}")
        self._reply(connection, [DONE, *answer])

    def _reply(self, connection: _Connection, parts: Sequence[bytes]) -> None:
        assert connection.codec is not None
        connection.to_send += connection.codec.seal(pack(parts))

    # Waits ------------------------------------------------------------------------------------------

    def _begin_wait(self, connection: _Connection, keys: list[bytes], seconds: float, values: bool) -> None:
        """Answer at once if all keys are there, or else when they are, or the time is over."""
        missing = [key for key in keys if key not in self.table.values]
        if not missing:
            self._reply(connection, [DONE, *([self.table.values[key] for key in keys] if values else [])])
            return
        number = next(self._numbers)
        connection.waits = number, keys, values
        for key in missing:
            self._waiting[key].add(connection)
        if not seconds >= 0:
            raise ValueError(f"no time to wait: {seconds}")
        heapq.heappush(self._deadlines, (time.monotonic() + seconds, number, connection))
        if len(self._deadlines) > 2 * len(self._members) + MOST_ENDED:
            self._deadlines = [each for each in self._deadlines if _waits(each[2], each[1])]
            heapq.heapify(self._deadlines)

    def _wake_up(self, key: bytes) -> None:
        """Answer those who wait for `key` and have all others."""
        if key not in self._waiting:
            return
        for connection in self._waiting.pop(key):
            if connection.waits is None:
                continue
            _, keys, wanted = connection.waits
            if all(each in self.table.values for each in keys):
                self._forget_wait(connection)
                found = [self.table.values[each] for each in keys] if wanted else []
                self._reply(connection, [DONE, *found])
                self._send(connection)

    def _end_waits(self, now: float) -> None:
        """Answer waits whose time is over, and close connections that have not proved anything by now."""
        with self._lock:
            while self._deadlines and self._deadlines[0][0] <= now:
                _, number, connection = heapq.heappop(self._deadlines)
                if _waits(connection, number):
                    self._forget_wait(connection)
                    self._reply(connection, [TIMED_OUT])
                    self._send(connection)
        if self._paused is not None and self._paused + PAUSE_S <= now:
            self._paused = None
            self._selector.register(self._listener, selectors.EVENT_READ)
        while self._strangers and (oldest := next(iter(self._strangers))).since + HANDSHAKE_S <= now:
            self._refuse(oldest)

    def _forget_wait(self, connection: _Connection) -> None:
        if connection.waits is None:
            return
        for key in connection.waits[1]:
            if (others := self._waiting.get(key)) is not None:
                others.discard(connection)
                if not others:
                    del self._waiting[key]
        connection.waits = None

    # Connections ------------------------------------------------------------------------------------

    def _send(self, connection: _Connection) -> None:
        """Send as much as the connection takes now, and the rest when it takes more."""
        try:
            sent = connection.socket.send(connection.to_send)
        except BlockingIOError:
            sent = 0
        except OSError:
            self._close(connection)
            return
        del connection.to_send[:sent]
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if connection.to_send else 0)
        if self._selector.get_key(connection.socket).events != events:
            self._selector.modify(connection.socket, events, connection)

    def _refuse(self, connection: _Connection) -> None:
        """Close a connection whose other side is none of the run's, and say so once for each address."""
        if connection.socket.fileno() < 0:
            return
        self.refused += 1
        who = peer_name(connection.socket, connection.address) if len(self._told) < MOST_TOLD else None
        self._close(connection)
        if who is not None and who not in self._told:
            self._told.add(who)
            sentence = (
                f"{who} connected to the store of this run at {self.endpoint} without knowing its secret, "
                f"and was refused; the run is not affected"
            )
            # A thread of its own: output may block, and a filter may make warnings errors.
            threading.Thread(target=warnings.warn, args=(sentence,), daemon=True).start()

    def _close(self, connection: _Connection) -> None:
        if connection.socket.fileno() < 0:
            return
        self._strangers.pop(connection, None)
        self._members.discard(connection)
        self._forget_wait(connection)
        self._selector.unregister(connection.socket)
        connection.socket.close()


def _waits(connection: _Connection, number: int) -> bool:
    """True if a connection is still in its wait of this number."""
    return connection.waits is not None and connection.waits[0] == number
