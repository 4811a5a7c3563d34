"""The verb verify: compare a layout, or many, with one device."""

from __future__ import annotations

import math
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from meshwright import api
from meshwright.api.options import choice, folder_name, whole
from meshwright.api.verify_runs import verify_worker
from meshwright.cli import output as show
from meshwright.cli.parser import JSON, Call, Flag, verb
from meshwright.cli.runs import FROM, NPROC, RUN, spec_of
from meshwright.rank.env import worker
from meshwright.rank.failure import RanksFailed
from meshwright.spec import UserError
from meshwright.spec.errors import CollectiveError
from meshwright.spec.load import Overrides, from_tree
from meshwright.units import duration

NO_VERDICT = "the layout was not compared with one device"


def _axes(text: str) -> Overrides:
    pairs = [each.partition("=") for each in text.split(",")]
    if not all(key.strip() and value.strip() for key, _, value in pairs):
        raise ValueError("axes with their sizes are needed, such as dp=2,tp=2")
    return [(f"layout.{key.strip()}", value.strip()) for key, _, value in pairs]


@verb(
    "verify",
    RUN,
    FROM,
    NPROC,
    Flag("steps", "optimiser steps to compare; default 3, with --sweep 2", "K", whole(1)),
    Flag(
        "sweep",
        "compare layouts of N ranks: any two choices of axes, schedules, modes, ... that the run allows",
        "N",
        whole(1),
    ),
    Flag(
        "budget",
        "with --sweep: begin no layout after this time; if it is long, other sizes follow",
        "TIME",
        duration,
    ),
    api.verify,
    Flag("onto", "with --through: layout to load on, such as dp=2,tp=2; default the same", "AXES", _axes),
    Flag(
        "precision",
        "'exact' compares in float64, uncompiled; 'run' in the run's own formats, compiled if it is; 'both' "
        "one after the other; default both, with --sweep exact",
        "FORMATS",
        choice("both", "exact", "run"),
    ),
    Flag("locate", "list all differences of the first step that has one, in the order of the step"),
    Flag("verbose", "also print a row for each kind of value: how many, the largest difference, and whose"),
    Flag("save", "the first part of --through alone: save in DIR", "DIR", folder_name),
    Flag("load", "its second part alone: go on from what --save has left in DIR", "DIR", folder_name),
    JSON,
)
def verify(call: Call) -> int:
    """Compare the layout with one device; the exit code is 1 if they differ."""
    place, flags = worker(), dict(call.flags)
    ranks, budget = flags.pop("sweep"), flags.pop("budget")
    shown = {name: flags.pop(name) for name in ("locate", "verbose")}
    if ranks is not None:
        return _sweep(call)
    if budget is not None:
        raise UserError("--budget: is the time of a sweep; add --sweep N, or remove it")
    flags["steps"] = flags["steps"] or 3
    flags["precision"] = flags["precision"] or "both"
    spec = spec_of(call, place.world_size if place else None)
    del flags["nproc"]  # the layout says it
    save, load, onto = flags.pop("save"), flags.pop("load"), flags.pop("onto")
    parts = {"save": save, "load": load}
    _check_parts(parts, flags["through"], spec.layout.world_size if place is None else 0)
    if onto is not None:
        if place is not None or load is not None:
            raise UserError("--onto: starts ranks of another layout; give --load that layout instead")
        onto = from_tree({**spec.to_json(), "layout": {}}, onto)
    with nothing_compared():
        if save is not None or load is not None:
            result = verify_worker(spec, **parts, **flags)
        else:
            result = api.verify(spec, onto=onto, **flags)
    if place is not None and place.rank > 0:
        return 0
    show.result(call, result, partial(show_verify, **shown))
    return 0 if result["equal"] else 1


def _check_parts(parts: Mapping[str, Path | None], through: str | None, missing: int) -> None:
    """Refuse parts of --through that do not go together, or whose ranks are not there: so many `missing`."""
    given = [name for name, folder in parts.items() if folder is not None]
    for name in given:
        if len(given) > 1 or (through is not None and missing):
            raise UserError(
                f"--{name}: is one part of --through alone; give one of --save, --load, --through"
            )
        if missing > 1:
            raise UserError(
                f"--{name}: does not start the {missing} ranks of the layout; start it with torchrun, or let "
                f"--through checkpoint save and load in one command"
            )


def _sweep(call: Call) -> int:
    """Compare many layouts; the exit code is 1 if one is unequal, or else 70 if one could not be compared."""
    flags = call.flags
    for name in ("nproc", "through", "onto", "save", "load"):
        if flags[name] is not None:
            raise UserError(f"--{name}: does not go with --sweep, which chooses the layouts; remove it")
    for name in ("locate", "verbose"):
        if flags[name]:
            raise UserError(f"--{name}: is of one layout; give it to the command that repeats a failure")
    with nothing_compared():
        result = api.sweep(
            spec_of(call),
            flags["sweep"],
            steps=flags["steps"] or 2,
            precision=flags["precision"] or "exact",
            budget=flags["budget"] or math.inf,
            out=flags["out"],
            given=(call.words, call.overrides),
            show=None if call.json else _show_row,
        )
    show.result(call, result, _show_sweep)
    return {True: 0, False: 1, None: CollectiveError.code}[result["equal"]]


def _show_row(number: int, count: int, row: Mapping[str, Any]) -> None:
    worst = "-" if row["worst"] is None else f"{row['worst']:.1e}"
    seconds = "-" if row["seconds"] is None else f"{row['seconds']:.1f} s"
    place = f"{number:>{len(str(count))}}/{count}"
    show.line(f"{place}  {row['verdict']:<7}  {worst:>7}  {seconds:>7}  {row['layout']}", indent=8)
    if row["sentence"]:
        show.line(f"        {row['sentence']}", indent=8)


def _show_sweep(result: Mapping[str, Any]) -> None:
    if narrowed := result["narrowed"]:
        show.line(narrowed)
    verdict = {True: "equal", False: "UNEQUAL", None: "NOT COMPARED"}[result["equal"]]
    wrong = sum(row["verdict"] != "equal" for row in result["layouts"])
    show.line(
        f"{verdict}: {result['checked']} of {result['of']} layouts checked in {result['seconds']:.0f} s, "
        f"{wrong} of them not equal; they make {result['pairs_covered']:,} of {result['pairs']:,} pairs of "
        f"choices"
    )
    if failure := result["first_failure"]:
        show.line(f"first failure: {failure['layout']}: {failure['sentence']}")
        print(f"repeat it with: {failure['command']}")


SIGNALLED = 128
"""Exit codes above this are of processes that a signal ended."""


@contextmanager
def nothing_compared() -> Iterator[None]:
    """Let errors in the context say that there is no verdict, and have another exit code than "unequal"."""
    try:
        yield
    except UserError as error:
        if error.code == UserError.code:
            raise
        raise type(error)(f"{error}; {NO_VERDICT}") from error
    except RanksFailed as error:
        code = error.code if error.code > SIGNALLED else CollectiveError.code
        raise RanksFailed(f"{error}; {NO_VERDICT}", code, error.details) from error
    except Exception as error:
        sentence = f"{type(error).__name__}: {error}; {NO_VERDICT}"
        raise RanksFailed(sentence, CollectiveError.code, traceback.format_exc()) from error


def show_verify(result: Mapping[str, Any], locate: bool = False, verbose: bool = False) -> None:
    """Print a comparison: the verdict, its figures, and what differs first.

    With `verbose` it has a table of the kinds of values, with `locate` one of all differences.
    """
    parts = [result, result["own"]] if "own" in result else [result]
    show.line(_verdict(result))
    for narrowed in dict.fromkeys(part.get("narrowed") for part in parts):
        if narrowed:
            show.line(narrowed)
    show.table([_figures(part) for part in parts])
    for part in parts if verbose else ():
        print(f"\n{_precision(part)}, by kind:")
        show.table(part["rows"])
    if first := result["first"]:
        if locate:
            show.table(result["differences"])
        show.line(first["sentence"])


def _verdict(result: Mapping[str, Any]) -> str:
    """Return a comparison's verdict in a sentence."""
    layout, precision = result["layout"], _precision(result)
    if result["equal"]:
        steps = show.count(result["steps"], "step")
        own = f", and then in {_precision(result['own'])}" if "own" in result else ""
        return f"equal: {layout} equals one device in {precision} over {steps}{own}"
    if "own" in result:  # the second part follows equality
        return f"UNEQUAL: {layout} equals one device in {precision}, but not in {_precision(result['own'])}"
    return f"UNEQUAL: {layout} does not equal one device in {precision}"


def _figures(part: Mapping[str, Any]) -> dict[str, Any]:
    """Return the row of one part: how much was compared, and the largest difference."""
    worst = "infinite" if part["worst_relative"] is None else f"{part['worst_relative']:.1e}"
    return {
        "precision": _precision(part),
        "compared": part["compared"],
        "relative difference": worst,
        "tolerance": f"{part['tolerance']:.1e}",
        "name": part["worst_name"],
    }


def _precision(part: Mapping[str, Any]) -> str:
    return str(part.get("precision", "float64"))
