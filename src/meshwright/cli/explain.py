"""The verb explain, which gives the reasons for a layout; it imports no torch."""

from __future__ import annotations

from pathlib import Path

from meshwright.cli import output as show
from meshwright.cli.parser import JSON, Call, Flag, Verb, file_name
from meshwright.cli.runs import RUN, spec_of


def explain(call: Call) -> int:
    """Explain the layout of a run on a cluster."""
    from meshwright import api
    from meshwright.planner.explain.text import text

    flags = call.flags
    out = Path(flags["out"]) if flags["out"] else None
    explanation = api.explain(spec_of(call), cluster=flags["cluster"], stack=flags["stack"], out=out)
    if flags["json"]:
        show.as_json(explanation.to_json())
        return 0
    print(text(explanation), *([] if out is None else [f"wrote {out}"]), sep="\n")
    return 0


VERBS = (
    Verb(
        "explain",
        "explain a run's layout on a cluster: time, memory, links, and why others are worse",
        explain,
        (RUN,),
        (
            Flag("cluster", "a cluster by name, or a hardware file", "NAME", str, required=True),
            Flag("stack", "the software that runs it", "NAME", str, default="meshwright"),
            Flag("out", "page to write, which opens offline", "FILE.html", file_name(".html")),
            JSON,
        ),
        keys=True,
    ),
)
