"""Messages that are timed, and timed again while one of them looks slow.

Other work on a host only ever adds to a time, in bursts, so of several the shortest counts, and only a link
is called slow that has been slow each time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch

from meshwright.doctor.finding import Finding
from meshwright.doctor.world import ExaminedWorld

BYTES, BYTES_CUDA = 4 << 20, 64 << 20
"""Bytes of a message whose rate counts."""
PASSES = 4
"""Times that messages are sent at most, after the first ones, by which ranks connect."""
SLOWER = 4.0
"""Times as long as expected that a message may take: machines that others use, too, vary by two."""
SHORTEST_S = 5e-3
"""A message that takes no longer is not called slow: on processors a rank may wait for a core."""
LEAST_COMPARED = 3
"""Groups, or links, of which the median is what each of them is compared with."""
REMEDY = (
    "look at these hosts' interfaces and cables (ethtool, ibstat), at what else uses them, and at "
    "GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME, or leave the hosts out"
)


class MessageError(Exception):
    """Messages between ranks have failed, with what was found of it on this rank: no others are tried."""

    def __init__(self, found: Sequence[Finding]) -> None:
        super().__init__("messages between ranks have failed")
        self.found = found


def message_bytes(device: torch.device) -> int:
    """Bytes of a message between devices."""
    return BYTES if device.type == "cpu" else BYTES_CUDA


def is_slow(seconds: float, expected: float | None) -> bool:
    """True for a message that takes far longer than expected."""
    return expected is not None and seconds > max(SLOWER * expected, SHORTEST_S)


def timed(call: Callable[[], object], device: torch.device) -> float:
    """Seconds of a call, until what it queued is done."""
    begun = time.perf_counter()
    call()
    if device.type == "cuda":
        torch.cuda.current_stream().synchronize()
    return time.perf_counter() - begun


def settled(
    world: ExaminedWorld,
    send: Callable[[list[Finding]], float],
    judge: Callable[[list[float]], list[Finding]],
) -> tuple[list[float], list[Finding]]:
    """On rank 0, the shortest time of each rank and what `judge` finds in them; nothing on others.

    Each rank sends and returns seconds, or adds a finding of what failed to the list that it is given. Every
    rank calls this. Raises `MessageError` on all ranks where one has failed.
    """
    best: list[float] = []
    found: list[Finding] = []
    for turn in range(1 + PASSES):
        failed: list[Finding] = []
        times = world.ranks.gather(send(failed))
        if world.ranks.any(bool(failed)):
            raise MessageError(failed)
        if turn == 0:
            continue
        best = [min(pair) for pair in zip(best, times, strict=True)] if best else times
        found = judge(best) if best else []
        if not world.ranks.broadcast(bool(found)):
            break
    return best, found
