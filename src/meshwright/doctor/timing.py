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
SHORTEST_S, SHORTEST_S_CUDA = 20e-3, 1e-3
"""A message that takes no longer is not called slow: on processors a rank may wait for a core."""
IN_A_ROW = 3
"""Messages of a pass: ranks do not begin at the same moment, which the first of them takes up."""
LONG_S = 0.5
"""Beside a message of so many seconds no beginning counts: where there is one, a pass is of one message."""
MOST_S = 6.0
"""No pass begins later than this after the first."""
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


def is_slow(seconds: float, expected: float | None, device: torch.device) -> bool:
    """True for a message between devices that takes far longer than expected."""
    shortest = SHORTEST_S if device.type == "cpu" else SHORTEST_S_CUDA
    return expected is not None and seconds > max(SLOWER * expected, shortest)


def timed(call: Callable[[], object], count: int, device: torch.device) -> float:
    """Seconds of the shortest of some calls, each until what it queued is done."""

    def once() -> float:
        begun = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.current_stream().synchronize()
        return time.perf_counter() - begun

    return min(once() for _ in range(count))


def settled(
    world: ExaminedWorld,
    send: Callable[[int, list[Finding]], float],
    judge: Callable[[list[float]], list[Finding]],
) -> tuple[list[float], list[Finding]]:
    """On rank 0, the shortest time of each rank and what `judge` finds in them; nothing on others.

    Each rank sends as many messages as it is told, and returns the seconds of the shortest, or adds a finding
    of what failed to the list that it is given. Every rank calls this. Raises `MessageError` on all ranks
    where one has failed.
    """

    def one_pass(count: int) -> list[float]:
        failed: list[Finding] = []
        times = world.ranks.gather(send(count, failed))
        if world.ranks.any(bool(failed)):
            raise MessageError(failed)
        return times

    is_long = world.ranks.broadcast(max(one_pass(1), default=0.0) > LONG_S)  # they connect
    count, begun = 1 if is_long else IN_A_ROW, time.perf_counter()
    best = one_pass(count)
    found = judge(best) if best else []
    for _ in range(PASSES - 1):
        if not world.ranks.broadcast(bool(found) and time.perf_counter() - begun < MOST_S):
            break
        best = [min(pair) for pair in zip(best, one_pass(count), strict=True)]
        found = judge(best) if best else []
    return best, found
