"""All layouts of a number of ranks against one device: the sweep of `meshwright verify`."""

from __future__ import annotations

import json
import math
import shlex
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from meshwright.api.folders import make_folder
from meshwright.api.ranks import Result, run_on_ranks
from meshwright.api.verify_runs import MODULES, longest_wait, on_chats
from meshwright.rank.env import worker
from meshwright.rank.failure import RanksFailed
from meshwright.rank.scratch import scratch_folder
from meshwright.spec import RunSpec, UserError
from meshwright.spec.differences import differences
from meshwright.spec.load import Overrides
from meshwright.spec.rules import check_verification
from meshwright.spec.schema import known_keys
from meshwright.spec.verification import VerifyOptions

FOUND = "found.json"
"""File of a sweep's temporary folder: what its ranks have found so far."""
MOST_FAILURES = 5
"""Layouts that end their ranks until a sweep gives up: each takes new ranks, and maybe the longest wait."""
ShowRow = Callable[[int, int, Result], None]
"""Prints the number of a layout, from 1, of how many, and its row."""


def sweep(
    spec: RunSpec,
    ranks: int,
    *,
    steps: int = 2,
    precision: str = "exact",
    budget: float = math.inf,
    out: Path | None = None,
    given: tuple[Sequence[str], Overrides] = ((), ()),
    show: ShowRow | None = None,
) -> Result:
    """Compare layouts of `ranks` ranks that the run allows with one device, as `verify` does.

    Without a `budget` they are a covering array: any two choices that some layout makes together, such as a
    size of an axis and a schedule, are made by one of them. With a budget, none is begun after so many
    seconds, and layouts of all other sizes of the axes follow those, while there is time. With `precision`
    "run" each layout computes in its own formats, as in `verify`.

    `given` are the words and the dotted flags that the run was made of, for the command that repeats the
    first failure. With `show` the first rank prints each row as it is found, and `show` those of layouts
    that end their ranks. Returns `equal` (None where no layout is unequal but not all could be compared),
    `layouts` (rows), `checked`, `of`, `pairs_covered`, `pairs`, `seconds`, `narrowed` and `first_failure`,
    and writes them to `out`/verify.json, too. Raises `UserError`.
    """
    from meshwright.runs.record import write_atomically
    from meshwright.verify.sweep_layouts import SweepLayouts

    spec = on_chats(spec)
    if worker() is not None:
        raise UserError("--sweep: starts the ranks itself; start it without torchrun")
    check_verification(VerifyOptions(spec, sweep=True))
    began = time.time()
    layouts = SweepLayouts(spec, ranks)
    if out is not None:
        make_folder(out)
    count = layouts.needed if math.isinf(budget) else len(layouts.order)
    runs = [layouts.run(place) for place in range(count)]
    rows = _checked(runs, steps, precision, began + budget, show)
    verdicts = [row["verdict"] for row in rows]
    failure = None
    # A layout that is unequal says more than one that could not be compared.
    if wrong := next((each for each in ("UNEQUAL", "failed") if each in verdicts), None):
        place = verdicts.index(wrong)
        command = command_of(spec, runs[place], given, steps, precision)
        failure = {**rows[place], "command": command}
    result: Result = {
        "equal": False if wrong == "UNEQUAL" else None if wrong or not rows else True,
        "layouts": rows,
        "checked": len(rows),
        "of": len(runs),
        "pairs_covered": layouts.pairs.covered(layouts.order[: len(rows)]),
        "pairs": layouts.pairs.total,
        "seconds": round(time.time() - began, 3),
        "narrowed": layouts.note,
        "first_failure": failure,
    }
    if out is not None:
        write_atomically(out / "verify.json", json.dumps(result))
    return result


def _checked(
    runs: Sequence[RunSpec], steps: int, precision: str, until: float, show: ShowRow | None
) -> list[Result]:
    """Start ranks that check the runs, and others for the rest where a run ends them; returns the rows."""
    from meshwright.verify.sweep_layouts import describe

    rows: list[Result] = []
    failures, ranks = 0, runs[0].layout.world_size
    with scratch_folder() as folder:
        found = folder / FOUND
        while len(rows) < len(runs) and time.time() < until and failures < MOST_FAILURES:
            found.unlink(missing_ok=True)
            check = partial(sweep_worker, runs, len(rows), steps, precision, until, found, show)
            try:
                return rows + run_on_ranks(check, ranks, spec=runs[len(rows)], modules=MODULES)
            except (UserError, RanksFailed) as error:
                if not found.exists():  # no run was begun
                    raise
                rows += json.loads(found.read_text(encoding="utf-8"))
                if len(rows) == len(runs):
                    raise
                failures += 1
                row = {"layout": describe(runs[len(rows)]), "verdict": "failed", "worst": None}
                rows.append(row | {"seconds": None, "sentence": str(error)})
                if show is not None:
                    show(len(rows), len(runs), rows[-1])
    return rows


def command_of(
    spec: RunSpec, small: RunSpec, given: tuple[Sequence[str], Overrides], steps: int, precision: str
) -> str:
    """Return the command that compares the `small` run; the `given` words and dotted flags make `spec`."""
    words, flags, known = given[0], dict(given[1]), known_keys()
    for key, (_, value) in differences(spec.to_json(), small.to_json()).items():
        if value is None and key in known and not known[key].optional:
            flags.pop(key, None)  # a key of another recompute policy
        elif key not in ("model.preset", "model.hf", "model.weights"):
            flags[key] = _as_flag(value)
    if small.recompute.policy != spec.recompute.policy:  # on which the default schedule depends
        flags["layout.schedule"] = small.layout.schedule
    pairs = (word for key, text in flags.items() for word in (f"--{key}", text))
    own = ["--precision", precision] if precision == "run" else []
    return shlex.join(["meshwright", "verify", *words, *pairs, "--steps", str(steps), *own])


def _as_flag(value: Any) -> str:
    """Return a value as a flag has it."""
    if isinstance(value, list):
        return ",".join(map(str, value))
    return value if isinstance(value, str) else "none" if value is None else json.dumps(value)


def sweep_worker(
    runs: Sequence[RunSpec],
    first: int,
    steps: int,
    precision: str,
    until: float,
    found: Path,
    show: ShowRow | None,
) -> list[Result]:
    """Check the runs from the number `first` on, as one rank; the first rank returns a row for each.

    It leaves the rows in the file `found` from the begin of the first run on, for a launcher whose ranks end.
    """
    import torch.distributed as dist

    from meshwright.comm.control import new_scope
    from meshwright.rank.world import groups_of, mesh_on
    from meshwright.runs.record import write_atomically
    from meshwright.verify.sweep import check_layouts

    limit = longest_wait(runs[first], precision)
    rows: list[Result] = []

    def note(row: Result | None) -> None:
        if row is not None:
            rows.append(row)
            if show is not None:
                show(first + len(rows), len(runs), row)
        write_atomically(found, json.dumps(rows))

    with groups_of(runs[first]) as (device, groups):
        control = groups.connections.control(
            "sweep", dist.get_world_size(), new_scope(), groups.timeout, groups.heartbeat
        )
        on_mesh = partial(mesh_on, device=device, groups=groups, limit=limit)
        check_layouts(runs[first:], steps, precision, until, control, on_mesh, note)
    return rows
