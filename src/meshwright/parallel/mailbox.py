"""Tensors between ranks of different worlds: each rank has a mailbox, which any other may write to.

A mailbox is the server of a `torch.distributed.TCPStore`, whose threads take what comes while the rank
computes. What is sent is there as a whole once its last key is. A rank that dies takes its mailbox along: who
sends to it, or asks whether it lives, is told by an error of the connection.
"""

from __future__ import annotations

import math
import secrets
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from datetime import timedelta
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import TCPStore

from meshwright.parallel.control import PART_BYTES

T = TypeVar("T")
CONNECT = timedelta(seconds=5)
"""Longest wait for a connection."""
ANSWER_S = 10.0
"""Longest wait for an answer, such as to a part of a message; a process that is stopped gives none."""


class Address(NamedTuple):
    """Where a mailbox is, and a word that it knows: another process may get its port once it is gone."""

    host: str
    port: int
    word: str


class Mailbox:
    """The mailbox of this rank; others reach it at `address`."""

    def __init__(self, host: str) -> None:
        self._store = TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=CONNECT)
        self.address = Address(host, self._store.port, secrets.token_hex(8))
        self._store.set(self.address.word, "")

    def has(self, name: str) -> bool:
        """True once a message is there as a whole."""
        return bool(self._store.check([f"{name}/bytes"]))

    def take(self, name: str, like: Sequence[Tensor]) -> list[Tensor]:
        """The tensors of a message that is there, of the forms and the device of `like`; it is removed."""
        size = int(self._store.get(f"{name}/bytes"))
        expected = sum(tensor.nbytes for tensor in like)
        if size != expected:
            raise ValueError(f"message {name} has {size} bytes and not {expected}")
        content = bytearray().join(
            self._store.get(f"{name}/{part}") for part in range(math.ceil(size / PART_BYTES))
        )
        self.drop(name)
        whole, found, start = torch.frombuffer(content, dtype=torch.uint8), list[Tensor](), 0
        for tensor in like:
            part = whole[start : start + tensor.nbytes].clone().view(tensor.dtype).view(tensor.shape)
            found.append(part.to(tensor.device))
            start += tensor.nbytes
        return found

    def drop(self, name: str) -> None:
        """Remove a message, or the part of it that has come."""
        self._store.delete_key(f"{name}/bytes")
        part = 0
        while self._store.delete_key(f"{name}/{part}"):
            part += 1


class LostPeerError(RuntimeError):
    """A mailbox that is gone, or does not answer."""


class Peer:
    """The mailbox of another rank, at `address`; every method raises `LostPeerError` where it is lost."""

    def __init__(self, address: Address) -> None:
        self._address = address
        self._store: Any = self._within(lambda: _client(address))
        self.ask()

    def send(self, name: str, tensors: Sequence[Tensor]) -> None:
        """Send a message; returns when it has come."""
        flat = torch.cat(
            [tensor.detach().cpu().contiguous().view(-1).view(torch.uint8) for tensor in tensors]
        )
        content = flat.numpy().tobytes()
        for part in range(math.ceil(len(content) / PART_BYTES)):
            cut = content[part * PART_BYTES : (part + 1) * PART_BYTES]
            self._within(lambda part=part, cut=cut: self._put(f"{name}/{part}", cut))  # type: ignore[misc]
        self._within(lambda: self._put(f"{name}/bytes", str(len(content))))

    def ask(self) -> None:
        """Return if the rank is there."""
        if not self._within(lambda: self._store.check([self._address.word])):
            raise LostPeerError(f"another process has the mailbox at {self._name}")

    @property
    def _name(self) -> str:
        return f"{self._address.host}:{self._address.port}"

    def _put(self, key: str, value: str | bytes) -> None:
        self._store.set(key, value)
        self._store.check([key])  # the answer says that the value has come

    def _within(self, work: Callable[[], T]) -> T:
        """The result of an operation, which may block for ever where the other process is stopped."""
        done: Future[T] = Future()

        def run() -> None:
            try:
                done.set_result(work())
            except Exception as error:  # it is raised by `result`
                done.set_exception(error)

        threading.Thread(target=run, name="mailbox", daemon=True).start()
        try:
            return done.result(ANSWER_S)
        except (dist.DistError, TimeoutError) as error:
            raise LostPeerError(f"the mailbox at {self._name} does not answer") from error


def _client(address: Address) -> TCPStore:
    host, port, _ = address
    return TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=CONNECT)
