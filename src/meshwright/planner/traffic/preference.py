"""Messages of a loss of pairs of answers, and of the forwards that it takes of a step's samples before the
step (`parallel/preference.py`)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

from meshwright.planner.group_shapes import step_world
from meshwright.planner.rank_view import RankView
from meshwright.planner.traffic.layer_shape import LayerShape
from meshwright.planner.traffic.message import Message, Phase

_NUMBER = 8
"""Bytes of a float64 sum."""


def messages(
    view: RankView,
    shape: LayerShape,
    states: Iterable[Message],
    passes: Callable[[RankView], Iterable[Message]],
) -> Iterator[Message]:
    """Those of the forward phase of each pass, once more for each forward ahead, and log-probabilities of
    whole samples, which context ranks gather for the loss and in each such forward.

    `states` are the messages of units in a step, `passes` gives those of activations of a view. With ZeRO-3 a
    forward without gradients gathers each unit anew for each microbatch, in pipelines, too.
    """
    spec = view.spec
    if spec.preference is None:
        return
    often, ahead = spec.microbatches, spec.forwards_ahead
    if view.head:
        size = shape.tokens * spec.layout.cp, shape.exact, shape.groups.context
        yield Message("context", "all_gather", *size, Phase.FORWARD, "loss", often * (1 + len(ahead)))
    if spec.preference.judged:
        yield Message("world", "scalars", 2, _NUMBER, step_world(spec), Phase.STEP, "step")
    gathered = [m for m in states if m.operation == "all_gather" and spec.layout.zero == 3]
    for each in ahead:
        yield from (replace(m, count=often) for m in gathered)
        own = passes(replace(view, spec=spec.in_forward(each)))
        yield from (m for m in own if m.phase is Phase.FORWARD)
