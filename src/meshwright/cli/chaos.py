"""The verb chaos: a run under faults, beside its twin without any."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from meshwright import api
from meshwright.api.folders import folder_of
from meshwright.cli import output as show
from meshwright.cli.ending import errors_as_json
from meshwright.cli.parser import JSON, Call, verb
from meshwright.cli.runs import NPROC, RUN, spec_of
from meshwright.units import percent, seconds


@verb("chaos", RUN, NPROC, api.chaos, JSON)
def chaos(call: Call) -> int:
    """Run under faults; the exit code is 1 if something does not hold that must."""
    with errors_as_json(call.json) as ending, folder_of(call.flags["out"]) as out:
        flags = {name: value for name, value in call.flags.items() if name != "nproc"} | {"out": out}
        ending.out = out
        result = api.chaos(spec_of(call), **flags)
        code, reason = 0 if result["holds"] else 1, ""
        if code:
            reason = f"does not hold: {_broken(result)}" + (f" ({result['end']})" if result["end"] else "")
        if call.json:
            result = {**ending.described("finished", code, reason), **result}
        files = [out / f"chaos.{kind}" for kind in ("json", "jsonl", "html")]
        show.result(call, result, _show, files)
        return code


def _broken(result: Mapping[str, Any]) -> str:
    """Return the oracles that do not hold, in words."""
    from meshwright.chaos.verdict import ORACLES

    return "; ".join(ORACLES[name] for name, value in result["oracles"].items() if value is False)


def _show(result: Mapping[str, Any]) -> None:
    show.table(result["kinds"])
    early = ", before all were injected" if result["injected"] < result["planned"] else ""
    steps = show.count(result["steps"], "step")
    show.line(
        f"{result['injected']} of {show.count(result['planned'], 'fault')} in {steps} and "
        f"{seconds(result['seconds'])}: the run ended{early}"
    )
    figures: dict[str, str] = {}
    if (effective := result["effective"]) is not None:
        figures["effective"] = f"{percent(effective)} of the time"
    for name, key in (("noticed", "detection_seconds"), ("training again", "restart_seconds")):
        if (value := result[key]) is not None:
            figures[name] = f"after {seconds(value)} on average"
    show.pairs(figures)
    show.line("all holds that must" if result["holds"] else f"DOES NOT HOLD: {_broken(result)}")
    for sentence in (result["end"], *result["unexplained"], *result["left_behind"]):
        if sentence:
            show.line(f"  {sentence}")
