"""Verify a run's layout against one device, also through a checkpoint or an export."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path

from meshwright.api.folders import make_folder
from meshwright.api.models import export, import_hf
from meshwright.api.runs import Result, launch
from meshwright.rank.scratch import scratch_folder
from meshwright.spec import RunSpec, UserError
from meshwright.spec.other_models import other_models
from meshwright.spec.rules import check_verification, ranks_match
from meshwright.spec.verification import Verification

LIMIT_S = 30.0
"""Longest wait of `verify` in a collective, where `recovery.hang_seconds` sets none."""
COMPILE_LIMIT_S = 270.0
"""Seconds added to it where ranks compile their blocks, each at its own pace."""


def verify(
    spec: RunSpec,
    *,
    nproc: int | None = None,
    steps: int = 3,
    out: Path | None = None,
    through: str | None = None,
    onto: RunSpec | None = None,
    precision: str = "both",
) -> Result:
    """Compare the layout with one device in float64 over `steps` optimiser steps, and then in the run's own
    formats, compiled if the run is, where each row has a `tolerance` of its own, which rounding was measured
    to need.

    With `precision` "exact" only the first is done, with "run" only the second, over as many steps. The
    second part's result is `own` in that of both.

    With `through` "checkpoint", "snapshot" or "export" the run is saved after so many steps, loaded, from the
    snapshot that a restart takes or from the HF folder that it was exported to, and takes as many steps
    again, on the layout of `onto` if that is given. Returns `equal`, `worst_relative`, `worst_name`, `first`,
    `compared`, `tolerance`, `narrowed` (a sentence, or None) and `rows`, one for each kind of value, and
    writes them to `out`/verify.json, too.
    Raises `UserError`.
    """

    from meshwright.exchange.hf_config import write_hf_config
    from meshwright.runs.record import write_atomically

    ranks = spec.layout.world_size if nproc is None else nproc
    ranks_match(spec, ranks)
    if steps < 1:
        raise UserError(f"steps: {steps} steps compare nothing; give 1 or more")
    if onto is not None and through is None:
        raise UserError("--onto: is the layout to load on; add --through checkpoint, or --through export")
    if precision == "run" and through is not None:
        raise UserError("--precision run: compares no checkpoints; remove --through or --precision")
    check_verification(Verification(spec, precision, through, onto))
    other_models(spec)  # refuses one that is not known
    if through == "snapshot" and onto is not None and onto.layout.world_size != spec.layout.world_size:
        raise UserError(
            f"--onto: has {onto.layout.world_size} ranks, and a snapshot is in the memory of those "
            f"{spec.layout.world_size} that kept it; give a layout of as many, or --through checkpoint"
        )
    if through == "export":
        write_hf_config(spec.model, "float64")  # refuses a model that no family of HF's computes
    if out is not None:
        make_folder(out)
    if ranks == 1 and through is None:
        return verify_worker(spec, steps=steps, out=out, precision=precision)
    with scratch_folder() as temporary:
        if through is None:
            result = _verify_part(spec, temporary, ["--steps", str(steps), "--precision", precision])
        else:
            saved = temporary / "run"
            kept = ["--through", through] if through == "snapshot" else []
            first = _verify_part(spec, temporary, ["--steps", str(steps), "--save", str(saved), *kept])
            if through == "export":
                through_export(saved, temporary / "exported")
            flags = ["--load", str(saved), "--through", through, "--precision", precision]
            second = _verify_part(onto or spec, temporary, flags)
            result = _joined(first, second)
    if out is not None:
        write_atomically(out / "verify.json", json.dumps(result))
    return result


IMPORTED = "imported"
"""Folder, in that of a saved run, of what was exported from it and imported again."""


def through_export(saved: Path, folder: Path) -> None:
    """Export a run that `verify` has saved to the HF folder `folder`, and import that: in several pieces."""
    from meshwright.spec.tiling import tiled
    from meshwright.verify.resume import tiles_of

    with tiled(tiles_of(saved)):
        export(saved, folder)
        import_hf(folder, saved / IMPORTED)


def _verify_part(spec: RunSpec, folder: Path, flags: Sequence[str]) -> Result:
    result = folder / "verify.json"
    return launch("verify", spec, spec.layout.world_size, [*flags, "--out", str(folder)], result)


def _joined(first: Result, second: Result) -> Result:
    """Return the result of two parts of one comparison."""
    # One that is not finite is None.
    worst = max(first, second, key=lambda part: math.inf if (at := part["worst_relative"]) is None else at)
    return {
        **first,
        "equal": first["equal"] and second["equal"],
        "worst_relative": worst["worst_relative"],
        "worst_name": worst["worst_name"],
        "first": first["first"] or second["first"],
        "differences": first["differences"] or second["differences"],
        "compared": first["compared"] + second["compared"],
        "rows": first["rows"] + second["rows"],
        "layout": f"{first['layout']}, then {second['layout']}",
        "steps": first["steps"] + second["steps"],
        **({"own": second["own"]} if "own" in second else {}),
    }


def verify_worker(
    spec: RunSpec,
    *,
    steps: int = 3,
    out: Path | None = None,
    save: Path | None = None,
    load: Path | None = None,
    through: str | None = None,
    precision: str = "both",
) -> Result:
    """Run `verify` as one rank: the first returns the result and writes `out`/verify.json; others give {}.

    With `save` the run is saved in that folder; with `load` it goes on from the one in that folder, or with
    `through` "export" from what was imported there, and with "snapshot" from the snapshot.
    """
    from meshwright.rank.world import mesh_of
    from meshwright.runs.record import write_atomically
    from meshwright.verify.both import with_own_precision
    from meshwright.verify.precision import verify_in_own_precision
    from meshwright.verify.resume import load_part, save_part
    from meshwright.verify.verify import verify as verify_rank

    if load is not None and not (load / "run.json").is_file():
        raise UserError(f"--load: {load} holds no run.json; give the folder of a `meshwright verify --save`")
    if precision == "run" and (save is not None or load is not None):
        raise UserError("--precision run: compares no checkpoints; remove --save and --load")
    way = through or "checkpoint" if save or load else None
    check_verification(Verification(spec, precision, way))
    with mesh_of(spec, longest_wait(spec, precision)) as mesh:
        for made in (out, save):
            if made is not None:
                mesh.control.on_first(partial(make_folder, made))
        if save is not None:
            verdict = save_part(spec, mesh, steps, save, through == "snapshot")
        elif load is not None:
            folder = load / IMPORTED if through == "export" else load
            verdict = load_part(spec, mesh, load, folder, through == "snapshot")
        elif precision == "run":
            verdict = verify_in_own_precision(spec, mesh, steps)
        else:
            verdict = verify_rank(spec, mesh, steps)
        if precision == "both" and save is None:
            verdict = with_own_precision(verdict, spec, mesh)
        if out is not None:
            mesh.control.on_first(lambda: write_atomically(out / "verify.json", json.dumps(verdict)))
    return verdict or {}


def longest_wait(spec: RunSpec, precision: str) -> timedelta:
    """Return the longest wait of a rank in a collective of a comparison in this `precision`."""
    compiles = precision != "exact" and spec.train.compile
    return timedelta(seconds=spec.recovery.hang_seconds or LIMIT_S + compiles * COMPILE_LIMIT_S)
