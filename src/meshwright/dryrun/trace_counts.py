"""Counts of a trace: kernels, copies, messages and waits of the host by what they are."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from meshwright.dryrun.events import Event
from meshwright.dryrun.races import races, told

Row = dict[str, Any]
LAUNCHED = ("kernel", "copy")


def device_work(events: Sequence[Event], microbatches: int = 1) -> dict[str, Any]:
    """Counts of the kernels, copies, messages and waits of a step, most bytes first.

    `kernels` has the count, bytes and FLOPs of each operator that launches work, copies among them, and
    `launches` their number; `empty` counts operators on tensors without elements, which launch nothing;
    `graphs` has the number of graphs that were launched, and of the kernels and messages in them, for which
    the host makes no call; `copies` are by direction; `messages` by axis, operation, process group and
    stream; `host_waits` by what the host waits in; `races` are sentences with their counts, none in a step
    whose streams are in order.
    `elementwise_a_block` are the bytes of kernels that neither multiply matrices, nor attend, nor only move
    numbers, of the block with most, a microbatch.
    """
    launched = [each for each in events if each.kind in LAUNCHED]
    calls = [each for each in events if each.kind == "collective"]
    return {
        "launches": len(launched),
        "graphs": _graphs(events),
        "kernels": _by(launched, ("name",), ("bytes", "flops")),
        "empty": _by((each for each in events if each.kind == "empty"), ("name",), ()),
        "copies": _by((each for each in launched if each.direction), ("direction",), ("bytes",)),
        "messages": _by(calls, ("axis", "name", "group", "ranks", "stream"), ("bytes",)),
        "host_waits": _by(waits(events), ("name", "phase"), ()),
        "races": told(races(events)),
        "elementwise_a_block": max(_elementwise(launched).values(), default=0) / microbatches,
    }


def _graphs(events: Sequence[Event]) -> dict[str, int]:
    """Launches of graphs, and what they hold."""
    held = [each for each in events if each.graph >= 0]
    return {
        "launches": sum(each.kind == "graph" for each in held),
        "kernels": sum(each.kind in LAUNCHED for each in held),
        "messages": sum(each.kind == "collective" for each in held),
    }


def _elementwise(launched: Iterable[Event]) -> Counter[str]:
    """Bytes of memory-bound kernels by block."""
    found = Counter[str]()
    for each in launched:
        if each.module.startswith("blocks.") and each.work is None and not each.direction:
            found[each.module] += int(each.bytes)
    return found


def waits(events: Iterable[Event]) -> Iterator[Event]:
    """The events at which the host waits for the device: not where nothing was launched since the last."""
    busy = False
    for each in events:
        if each.kind in (*LAUNCHED, "collective"):
            busy = True
        elif each.kind == "synchronize" and busy:
            busy = False
            yield each


def _by(events: Iterable[Event], keys: Sequence[str], sums: Sequence[str]) -> list[Row]:
    """The number of events and the sums of fields for each combination of `keys`, largest first."""
    found: defaultdict[tuple[Any, ...], list[float]] = defaultdict(lambda: [0] * (1 + len(sums)))
    for each in events:
        row = found[tuple(getattr(each, key) for key in keys)]
        row[0] += 1
        for place, name in enumerate(sums, 1):
            row[place] += getattr(each, name)
    names = ("count", *sums)
    rows = [
        dict(zip(keys, key, strict=True)) | dict(zip(names, row, strict=True)) for key, row in found.items()
    ]
    return sorted(rows, key=lambda row: [-row[name] for name in (*sums, "count")])
