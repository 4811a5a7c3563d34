"""The verb distil: a teacher's answers about a run's samples, on disk."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from meshwright import api
from meshwright.cli import output as show
from meshwright.cli.parser import JSON, Call, Flag, verb
from meshwright.cli.runs import NPROC, RUN, spec_of
from meshwright.rank.env import worker
from meshwright.runs.record import write_atomically


@verb(
    "distil",
    RUN,
    NPROC,
    api.distil,
    Flag("result", "write the result to FILE, too", "FILE", Path),
    JSON,
)
def distil(call: Call) -> None:
    """Launch the ranks that ask a teacher, or ask as one of them."""
    place = worker()
    spec = spec_of(call, place.world_size if place else None)
    shown = _tell if not call.json and sys.stderr.isatty() else None
    found = api.distil(spec, call.flags["out"], told=shown)
    if place is not None and place.rank > 0:
        return
    if call.flags["result"] is not None:
        write_atomically(call.flags["result"], json.dumps(found))
    show.result(call, {key: value for key, value in found.items() if key != "files"})


def _tell(done: int, of: int) -> None:
    end = "\n" if done == of else ""
    print(f"\r{done:,} of {of:,} samples", end=end, file=sys.stderr, flush=True)
