"""Bytes that one rank sends in one optimiser step, by axis and operation."""

from __future__ import annotations

from collections.abc import Sequence

from meshwright.planner.rank_view import Traffic
from meshwright.planner.traffic.messages import Copies, messages, totals
from meshwright.spec import RunSpec


def traffic(spec: RunSpec, pipeline_rank: int = 0, copies: Sequence[Copies] | None = None) -> Traffic:
    """(axis, operation) -> bytes, forward to update; arguments as those of `messages`."""
    listed = messages(spec, pipeline_rank, copies)
    return totals(((m.axis, m.operation), m.count * m.sent) for m in listed)
