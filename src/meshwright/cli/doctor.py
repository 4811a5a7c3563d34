"""The verb doctor: examine the hosts of a run before it starts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from meshwright import api
from meshwright.api.diagnosis import in_words
from meshwright.cli import output as show
from meshwright.cli.parser import JSON, Call, verb
from meshwright.cli.runs import FROM, NPROC, RUN, spec_of
from meshwright.rank.env import nproc_of, worker
from meshwright.units import gigabytes, seconds


@verb("doctor", RUN, FROM, NPROC, api.doctor, JSON)
def doctor(call: Call) -> int:
    """Examine the hosts; the exit code is 1 if a run would fail there."""
    place, flags = worker(), dict(call.flags)
    nproc = flags.pop("nproc")
    named, run = bool(call.words or call.overrides), call.path()
    if flags["out"] is None and run is not None and run.is_dir():
        flags["out"] = run  # where a run goes on without --out
    spec = spec_of(call, place.world_size if place else None) if named else None
    found = api.doctor(spec, nproc=None if nproc is None else nproc_of(nproc), **flags)
    if not found:  # the first rank tells it
        return 0
    show.result(call, found, _show)
    return 1 if found["fails"] else 0


def _show(result: Mapping[str, Any]) -> None:
    for each in result["findings"]:
        show.line(f"{'FAILS' if each['fails'] else 'warning'}: {in_words(each)}")
    _show_measured(result["measured"])
    place = f"{show.count(result['ranks'], 'rank')} on {show.count(result['hosts'], 'host')}"
    failing = sum(each["fails"] for each in result["findings"])
    verdict = "nothing found"
    if not result["healthy"]:
        verdict = f"{show.count(len(result['findings']), 'finding')}, {failing} of which a run would fail"
    show.line(f"{verdict}: {place}, {result['seconds']:.1f} s")


def _show_measured(measured: Mapping[str, Any]) -> None:
    if disk := measured.get("disk"):
        words = f"disk: {disk['folder']} takes {gigabytes(disk['bytes_per_second'])}/s of all ranks together"
        if "save_seconds" in disk:
            words += (
                f", a checkpoint of {gigabytes(disk['checkpoint_bytes'])} in {seconds(disk['save_seconds'])}"
            )
        show.line(words)
    show.table(
        [
            {"group": row["axis"], "ranks": row["ranks"], "groups": row["groups"], **_times(row)}
            | {"first": seconds(row["first_seconds"])}
            for row in measured.get("groups", ())
        ]
    )
    show.table(
        [{"link": f"rank {row['from']} to {row['to']}", **_times(row)} for row in measured.get("links", ())]
    )


def _times(row: Mapping[str, Any]) -> dict[str, Any]:
    expected = row["expected_seconds"]
    return {
        "bytes": gigabytes(row["bytes"]),
        "time": seconds(row["seconds"]),
        "expected": "-" if expected is None else seconds(expected),
        "rate": f"{gigabytes(row['bytes'] / row['seconds'])}/s",
    }
