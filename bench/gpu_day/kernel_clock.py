"""The seconds of a kernel on the device, and what they are of its datasheet."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch

from gpu_day.results import Row

WARM_UP, ROUNDS = 3, 10


def seconds_of(work: Callable[[], object], rounds: int = ROUNDS) -> float:
    """The median of the device's seconds in `rounds` calls, after some that warm up."""
    for _ in range(WARM_UP):
        work()
    events = [(_event(), _event()) for _ in range(rounds)]
    for start, end in events:
        start.record()
        work()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) for start, end in events) / 1e3


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)


def rate_of(flops: float, seconds: float, peak: float | None) -> Row:
    """Fields of a row: seconds, TFLOP/s, and their share of the datasheet's peak, where that is known."""
    share = flops / seconds / peak if peak else None
    return {
        "seconds": round(seconds, 9),
        "tflops": round(flops / seconds / 1e12, 2),
        "share_of_datasheet": None if share is None else round(share, 4),
    }
