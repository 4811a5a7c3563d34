"""Tensors between ranks of different worlds: each rank has a mailbox, which any other may write to.

A mailbox is a `StoreServer` in the rank's own process, whose thread takes what comes while the rank computes.
Only who knows the secret of those worlds reaches it. What is sent is there as a whole once its last key is. A
rank that dies takes its mailbox along: who sends to it, or asks whether it lives, is told by an error of the
connection.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.comm.control import PART_BYTES
from meshwright.comm.store import AuthenticatedStore
from meshwright.comm.store_endpoint import endpoint_of
from meshwright.comm.store_server import StoreServer, Table

T = TypeVar("T")
CONNECT_S = 5.0
"""Longest wait for a connection."""
ANSWER_S = 10.0
"""Longest wait for an answer, such as to a part of a message; a process that is stopped gives none."""


class Address(NamedTuple):
    """Where a mailbox is, and a word that it knows: another process may get its port once it is gone."""

    host: str
    port: int
    word: str


class Mailbox:
    """The mailbox of this rank at an address of this host; others reach it at `address`, with the secret."""

    def __init__(self, host: str, secret: bytes) -> None:
        self._server = StoreServer(host, secret)
        self.address = Address(host, self._server.port, secrets.token_hex(8))
        self._server.use(lambda table: table.append(self.address.word.encode(), b""))

    def has(self, name: str) -> bool:
        """True once a message is there as a whole."""
        return self._server.use(lambda table: _key(name, "bytes") in table.values)

    def take(self, name: str, like: Sequence[Tensor]) -> list[Tensor]:
        """The tensors of a message that is there, of the forms and the device of `like`; it is removed."""
        content = self._server.use(lambda table: _taken(table, name))
        expected = sum(tensor.nbytes for tensor in like)
        if len(content) != expected:
            raise ValueError(f"message {name} has {len(content)} bytes and not {expected}")
        whole, found, start = torch.frombuffer(content, dtype=torch.uint8), list[Tensor](), 0
        for tensor in like:
            part = whole[start : start + tensor.nbytes].clone().view(tensor.dtype).view(tensor.shape)
            found.append(part.to(tensor.device))
            start += tensor.nbytes
        return found

    def drop(self, name: str) -> None:
        """Remove a message, or the part of it that has come."""
        self._server.use(lambda table: _taken(table, name))

    def close(self) -> None:
        """Take no messages any more."""
        self._server.close()


def _key(name: str, part: object) -> bytes:
    return f"{name}/{part}".encode()


def _taken(table: Table, name: str) -> bytearray:
    """Remove what there is of a message, and return its parts in order."""
    table.values.pop(_key(name, "bytes"), None)
    found, part = bytearray(), 0
    while (cut := table.values.pop(_key(name, part), None)) is not None:
        found += cut
        part += 1
    return found


class LostPeerError(RuntimeError):
    """A mailbox that is gone, or does not answer."""


class Peer:
    """The mailbox of another rank, at `address`; every method raises `LostPeerError` where it is lost."""

    def __init__(self, address: Address, secret: bytes) -> None:
        self._endpoint, self._word = endpoint_of(address.host, address.port), address.word
        self._store = self._answered(
            lambda: AuthenticatedStore(self._endpoint, secret, timedelta(), CONNECT_S, ANSWER_S)
        )
        self.ask()

    def send(self, name: str, tensors: Sequence[Tensor]) -> None:
        """Send a message; returns when it has come."""
        flat = torch.cat(
            [tensor.detach().cpu().contiguous().view(-1).view(torch.uint8) for tensor in tensors]
        )
        content = flat.numpy()
        for part in range(math.ceil(len(content) / PART_BYTES)):
            cut = content[part * PART_BYTES : (part + 1) * PART_BYTES].tobytes()
            self._answered(lambda part=part, cut=cut: self._store.set(f"{name}/{part}", cut))  # type: ignore[misc]
        self._answered(lambda: self._store.set(f"{name}/bytes", str(len(content))))

    def ask(self) -> None:
        """Return if the rank is there."""
        if not self._answered(lambda: self._store.check([self._word])):
            raise LostPeerError(f"another process has the mailbox at {self._endpoint}")

    def _answered(self, work: Callable[[], T]) -> T:
        try:
            return work()
        except dist.DistError as error:
            raise LostPeerError(f"the mailbox at {self._endpoint} does not answer") from error
