"""The store of a run, as torch and the ranks use it: a client of `store_server.py`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta

import torch.distributed as dist
from torch._C._distributed_c10d import Store

from meshwright.comm.store_client import StoreClient, StoreLostError
from meshwright.comm.store_server import DONE

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
        self._clones: list[AuthenticatedStore] = []
        """torch holds the C++ part of a clone alone, which needs this one."""
        with _as_torch():
            self._client = StoreClient(endpoint, secret, connect_s, answer_s)

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
        for each in self._clones:
            each.close()
        self._client.close()

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
        with _as_torch():
            return self._client.exchange(parts, seconds)


@contextmanager
def _as_torch() -> Iterator[None]:
    """Raise what torch's own stores do where the server is lost."""
    try:
        yield
    except StoreLostError as error:
        raise dist.DistNetworkError(str(error)) from error


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)
