"""The verb goodput: the share of a run's time that failures leave for training; it imports no torch."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from meshwright.cli import output as show
from meshwright.cli.parser import JSON, Call, Flag, number, positive, tokens, verb, whole
from meshwright.report.format import ABSENT, duration, percent, short
from meshwright.spec import UserError

_seconds, _hours = number(0, 1e12), number(1e-6, 1e8)


@verb(
    "goodput",
    Flag("step-seconds", "seconds of a training step", "S", number(1e-6, 1e12), required=True),
    Flag("save-seconds", "seconds that a save stops training", "S", _seconds),
    Flag("restart-seconds", "seconds from a failure to training", "S", _seconds),
    Flag("chaos", "chaos.json of a run under faults, which measured these two", "FILE", Path),
    Flag("background-seconds", "seconds of writing that training overlaps", "S", _seconds, default=0.0),
    Flag("mtbf-hours", "mean hours between failures of the whole system", "H", _hours),
    Flag("device-mtbf-hours", "mean hours of one device, with --devices", "H", _hours),
    Flag("devices", "number of devices", "N", whole(1)),
    Flag("batch-tokens", "tokens of a step, such as 16M, for tokens a day", "N", tokens()),
    Flag("tokens", "tokens of the run, such as 15T; needs --batch-tokens", "N", tokens()),
    Flag("price", "price of a device-hour; needs --tokens and --devices", "AMOUNT", positive),
    Flag("every", "steps between saves, instead of the best number", "STEPS", whole(1)),
    Flag("runs", "also simulate N runs, event by event", "N", whole(2)),
    Flag("seed", "seed of the simulation", "N", whole(0), default=0),
    JSON,
)
def goodput(call: Call) -> None:
    """Find the best checkpoint interval, and show the goodput with it."""
    from meshwright import api

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
