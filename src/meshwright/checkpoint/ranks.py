"""What ranks tell each other about a checkpoint: small JSON messages over the store's own process group.

No pickle crosses the wire. With one process there is no group and nothing is sent.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.nn.functional as F

from meshwright.checkpoint.errors import BadCheckpointError, CheckpointError
from meshwright.spec.errors import UserError

T = TypeVar("T")
# What may fail on one rank and must then fail on all, in the order in which one failure hides another.
_KINDS: dict[str, type[Exception]] = {
    "other": RuntimeError,
    "user": UserError,
    "checkpoint": CheckpointError,
    "bad": BadCheckpointError,
}


class Ranks:
    """The ranks that write and read a checkpoint together. ``group`` must carry CPU tensors (gloo)."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group = group
        self.rank = 0 if group is None else dist.get_rank(group)
        self.size = 1 if group is None else dist.get_world_size(group)

    def gather(self, message: Any) -> list[Any]:
        """Every rank's message, in rank order, on rank 0; an empty list on the others."""
        if self.size == 1:
            return [message]
        payload = _encode(message)
        lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        dist.all_gather(lengths, torch.tensor([payload.numel()]), group=self.group)
        longest = int(max(int(length) for length in lengths))
        padded = torch.zeros(longest, dtype=torch.uint8)
        padded[: payload.numel()] = payload
        received = [torch.zeros_like(padded) for _ in range(self.size)] if self.rank == 0 else None
        dist.gather(padded, received, group=self.group, group_dst=0)
        if received is None:
            return []
        return [_decode(data[: int(length)]) for data, length in zip(received, lengths, strict=True)]

    def broadcast(self, message: Any) -> Any:
        """Rank 0's message, on every rank."""
        if self.size == 1:
            return message
        payload = _encode(message) if self.rank == 0 else torch.zeros(0, dtype=torch.uint8)
        length = torch.tensor([payload.numel()])
        dist.broadcast(length, group=self.group, group_src=0)
        if self.rank != 0:
            payload = torch.zeros(int(length), dtype=torch.uint8)
        dist.broadcast(payload, group=self.group, group_src=0)
        return _decode(payload)

    def scatter(self, messages: list[Any]) -> Any:
        """This rank's own one of rank 0's ``messages`` (one per rank; ignored on the others)."""
        if self.size == 1:
            return messages[0]
        payloads = [_encode(message) for message in messages] if self.rank == 0 else []
        lengths = self.broadcast([payload.numel() for payload in payloads])
        received = torch.zeros(max(lengths), dtype=torch.uint8)
        padded = [F.pad(payload, (0, max(lengths) - payload.numel())) for payload in payloads]
        dist.scatter(received, padded or None, group=self.group, group_src=0)
        return _decode(received[: lengths[self.rank]])

    def any(self, flag: bool) -> bool:
        """Whether the flag is set on any rank."""
        if self.size == 1:
            return flag
        count = torch.tensor([int(flag)])
        dist.all_reduce(count, group=self.group)
        return bool(count)

    def together(self, work: Callable[[], T]) -> T:
        """Run ``work`` on every rank; when it fails anywhere, every rank raises the same error.

        ``work`` makes no collective call. Where several ranks fail, the gravest error of the lowest rank is
        the one that all raise: first a bug, then a user's mistake, a disk's failure, damaged data.
        """
        value, failure = None, None
        try:
            value = work()
        except Exception as error:
            failure = error
        if self.any(failure is not None):
            self._raise_first(failure)
        return value  # type: ignore[return-value]  # None only when `work` returned it

    def on_first(self, work: Callable[[], T]) -> T:
        """Run ``work`` on rank 0 alone and return its (JSON) value everywhere; its failure is everyone's."""
        value = self.together(lambda: work() if self.rank == 0 else None)
        return self.broadcast(value)

    def _raise_first(self, failure: Exception | None) -> None:
        report = None if failure is None else [_kind(failure), _sentence(failure)]
        reports = [report for report in self.gather(report) if report is not None]
        kind, sentence = self.broadcast(
            min(reports, key=lambda report: list(_KINDS).index(report[0])) if reports else None
        )
        if failure is not None and [kind, sentence] == [_kind(failure), _sentence(failure)]:
            raise failure
        raise _KINDS[kind](sentence) from failure


def _kind(error: Exception) -> str:
    """The most special kind that the error is; "other" for whatever is not a UserError."""
    for name in ("bad", "checkpoint", "user"):
        if isinstance(error, _KINDS[name]):
            return name
    return "other"


def _sentence(error: Exception) -> str:
    return str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"


def _encode(message: Any) -> torch.Tensor:
    return torch.frombuffer(bytearray(json.dumps(message).encode()), dtype=torch.uint8)


def _decode(payload: torch.Tensor) -> Any:
    return json.loads(payload.numpy().tobytes())
