"""The verb goodput: the share of a run's time that failures leave for training; it imports no torch."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from meshwright import api
from meshwright.cli import output as show
from meshwright.cli.parser import JSON, Call, verb
from meshwright.report.format import ABSENT, duration, percent, short
from meshwright.spec import UserError


@verb("goodput", api.goodput, JSON)
def goodput(call: Call) -> None:
    """Find the best checkpoint interval, and show the goodput with it."""
    try:
        result = api.goodput(**call.flags)
    except UserError as error:  # it names the parameters of the API
        names = "|".join(call.flags)
        sentence = re.sub(
            rf"(?<![\w./])({names})(?![\w./])", lambda match: "--" + match[0].replace("_", "-"), str(error)
        )
        raise UserError(sentence) from None
    show.result(call, result, _show)


def _show(result: Mapping[str, Any]) -> None:
    hours, days, cost = result["mtbf_seconds"] / 3600, result["days"], result["cost"]
    best, *known = (duration(result[f"{name}_seconds"]) for name in ("interval", "young", "daly"))
    facts = {
        "failures": f"every {show.text(hours)} h, {show.text(result['failures_per_day'])} a day"
        + ("" if days is None else f", {result['failures']:,.0f} in the run"),
        "save_every": f"{show.count(result['interval_steps'], 'step')}, {best} of training (by Young's "
        f"formula {known[0]}, by Daly's {known[1]})",
        "effective": percent(result["effective"], 2) + " of the time",
        "saving": percent(result["saving"], 2),
        "lost_work": percent(result["lost_work"], 2),
        "restarting": percent(result["restarting"], 2),
        "tokens_a_day": short(result["tokens_per_day"]),
        "run": ABSENT if days is None else f"{show.count(result['steps'], 'step')} in {show.text(days)} days",
        "device_hours": short(result["device_hours"]),
        "cost": ABSENT if cost is None else f"{cost:,.0f} in the price's currency",
    }
    if simulated := result["simulated"]:
        share, error, low, high = (
            percent(simulated[name], 2) for name in ("effective", "standard_error", "low", "high")
        )
        facts["simulated"] = (
            f"{share} effective in {show.count(simulated['runs'], 'run')}, with a standard error of {error}; "
            f"9 of 10 runs from {low} to {high}"
        )
    show.pairs({name: value for name, value in facts.items() if value != ABSENT})
