"""All layouts of a number of ranks against one device: the sweep of `meshwright verify`."""

from __future__ import annotations

import json
import math
import shlex
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from meshwright.api.runs import VERIFY_LIMIT_S, Result, launch
from meshwright.launch.failure import RanksFailed
from meshwright.launch.scratch import scratch_folder
from meshwright.spec import RunSpec
from meshwright.spec.differences import differences
from meshwright.spec.errors import CollectiveError

PLAN, FOUND = "sweep.json", "found.json"
"""Files of a sweep's temporary folder: what its ranks shall check, and what they have found so far."""
MOST_FAILURES = 5
"""Layouts that end their ranks until a sweep gives up: each takes new ranks, and maybe the longest wait."""
TellRow = Callable[[int, int, Result], None]
"""Called with the number of a layout, from 1, of how many, and its row."""


def sweep(
    spec: RunSpec,
    ranks: int,
    *,
    steps: int = 2,
    budget: float = math.inf,
    out: Path | None = None,
    run: Sequence[str] = (),
    tell: TellRow | None = None,
) -> Result:
    """Compare layouts of `ranks` ranks that the run allows with one device, as `verify` does.

    Without a `budget` they are a covering array: any two choices that some layout makes together, such as a
    size of an axis and a schedule, are made by one of them. With a budget, none is begun after so many
    seconds, and layouts of all other sizes of the axes follow those, while there is time. `run` is what `meshwright verify` takes for the run, as words, for the command that
    repeats the first failure; `tell` gets each row as it is found. Returns `equal` (None where none is
    unequal but some could not be compared), `layouts` (rows), `checked`, `of`, `pairs_covered`, `pairs`,
    `seconds`, `narrowed` and `first_failure`, and writes them to `out`/verify.json, too. Raises `UserError`.
    """
    from meshwright.report.record import write_atomically
    from meshwright.verify.sweep_layouts import SweepLayouts, describe

    began = time.time()
    layouts = SweepLayouts(spec, ranks)
    runs = [layouts.run(place) for place in range(layouts.needed if math.isinf(budget) else len(layouts.order))]
    rows: list[Result] = []
    failures = 0
    with scratch_folder() as folder:
        while len(rows) < len(runs) and time.time() < began + budget and failures < MOST_FAILURES:
            (folder / FOUND).unlink(missing_ok=True)
            plan = {"first": len(rows), "steps": steps, "until": None if math.isinf(budget) else began + budget}
            plan["runs"] = [each.to_json() for each in runs]
            (folder / PLAN).write_text(json.dumps(plan), encoding="utf-8")
            flags = ["--sweep", str(ranks), "--out", str(folder), *([] if tell is not None else ["--json"])]
            try:
                found = launch("verify", runs[len(rows)], ranks, flags, folder / FOUND)
                rows += found["rows"]
                break
            except (CollectiveError, RanksFailed) as error:
                if not (folder / FOUND).exists():
                    raise
                rows += json.loads((folder / FOUND).read_text(encoding="utf-8"))["rows"]
                failures += 1
                row = {"layout": describe(runs[len(rows)]), "verdict": "failed", "worst": None}
                rows.append(row | {"seconds": None, "sentence": str(error)})
                if tell is not None:
                    tell(len(rows), len(runs), rows[-1])
    verdicts = [row["verdict"] for row in rows]
    result: Result = {
        "equal": False if "UNEQUAL" in verdicts else None if "failed" in verdicts or not rows else True,
        "layouts": rows,
        "checked": len(rows),
        "of": len(runs),
        "pairs_covered": layouts.pairs.covered(layouts.order[: len(rows)]),
        "pairs": layouts.pairs.total,
        "seconds": round(time.time() - began, 3),
        "narrowed": layouts.note,
        "first_failure": None,
    }
    # A layout that is unequal says more than one that could not be compared.
    for wanted in ("UNEQUAL", "failed"):
        if wanted in verdicts and result["first_failure"] is None:
            place = verdicts.index(wanted)
            command = _command(spec, runs[place], run, steps)
            result["first_failure"] = {**rows[place], "command": command}
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        write_atomically(out / "verify.json", json.dumps(result))
    return result


def _command(spec: RunSpec, small: RunSpec, run: Sequence[str], steps: int) -> str:
    """Return the command that compares the `small` run: the words of `spec`, and the keys that differ."""
    words, keys = list(run), {}
    while len(words) > 1 and words[-2].startswith("--"):
        keys[words[-2].removeprefix("--")] = words[-1]
        del words[-2:]
    for key, (_, value) in differences(spec.to_json(), small.to_json()).items():
        if key not in ("model.preset", "model.hf") and value is not None:
            keys[key] = _as_flag(value)
    flags = [word for key, value in keys.items() for word in (f"--{key}", value)]
    return shlex.join(["meshwright", "verify", *words, *flags, "--steps", str(steps)])


def _as_flag(value: Any) -> str:
    """Return a value as a flag has it."""
    if isinstance(value, list):
        return ",".join(map(str, value))
    return value if isinstance(value, str) else json.dumps(value)


def sweep_worker(spec: RunSpec, folder: Path, tell: TellRow) -> None:
    """Check the layouts of the plan in `folder` as one rank; the first leaves there what it finds."""
    import torch.distributed as dist

    from meshwright.launch.world import groups_of, mesh_on
    from meshwright.parallel.control import new_scope
    from meshwright.report.record import write_atomically
    from meshwright.verify.sweep import check_layouts

    plan = json.loads((folder / PLAN).read_text(encoding="utf-8"))
    limit = timedelta(seconds=spec.recovery.hang_seconds or VERIFY_LIMIT_S)
    rows: list[Result] = []

    def note(row: Result | None) -> None:
        if row is not None:
            rows.append(row)
            tell(plan["first"] + len(rows), len(plan["runs"]), row)
        write_atomically(folder / FOUND, json.dumps({"rows": rows}))

    with groups_of(spec) as (device, groups):
        control = groups.connections.control(
            "sweep", dist.get_world_size(), new_scope(), groups.timeout, groups.heartbeat
        )
        check_layouts(
            [RunSpec.model_validate(tree) for tree in plan["runs"][plan["first"] :]],
            plan["steps"],
            math.inf if plan["until"] is None else plan["until"],
            control,
            lambda run: mesh_on(run, device, groups, limit),
            note,
        )
