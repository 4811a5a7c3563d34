"""Verify a run's layout against one device, also through a checkpoint or an export."""

from __future__ import annotations

import json
import math
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from meshwright.api.folders import make_folder
from meshwright.api.models import export, import_hf
from meshwright.api.options import Option, choice, folder_name
from meshwright.api.ranks import Result, run_on_ranks
from meshwright.rank.env import worker
from meshwright.rank.scratch import scratch_folder
from meshwright.runs.record import write_atomically
from meshwright.spec import RunSpec, UserError
from meshwright.spec.other_models import other_models
from meshwright.spec.rules import check_verification, ranks_match
from meshwright.spec.verification import VerifyOptions
from meshwright.units import counted

MODULES = ("meshwright.verify.verify",)
"""Modules that ranks need."""
LIMIT_S = 30.0
"""Longest wait of `verify` in a collective, where `recovery.hang_seconds` sets none."""
COMPILE_LIMIT_S = 270.0
"""Seconds added to it where ranks compile their blocks, each at its own pace."""


def verify(
    spec: RunSpec,
    *,
    nproc: int | None = None,
    steps: int = 3,
    out: Annotated[Path | None, Option(
        "also write the result to DIR/verify.json", "DIR", folder_name)] = None,
    through: Annotated[str | None, Option(
        "save after K steps, load, and compare K more: 'checkpoint', 'snapshot', which a restart takes, or "
        "'export' to an HF folder and import", "WAY", choice("checkpoint", "snapshot", "export"))] = None,
    onto: RunSpec | None = None,
    precision: str = "both",
) -> Result:  # fmt: skip
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
    spec = on_chats(spec)
    ranks_match(spec, spec.layout.world_size if nproc is None else nproc)
    if steps < 1:
        raise UserError(f"steps: {steps} steps compare nothing; give 1 or more")
    check_way(spec, through, onto, precision)
    if through is None:
        return _on_ranks(spec, steps=steps, out=out, precision=precision)
    with scratch_folder() as temporary:
        saved = temporary / "run"
        kept = through if through == "snapshot" else None
        first = _on_ranks(spec, steps=steps, save=saved, through=kept)
        if through == "export":
            through_export(saved, temporary / "exported")
        second = _on_ranks(onto or spec, load=saved, through=through, precision=precision)
    result = _joined(first, second)
    if out is not None:
        make_folder(out)
        write_atomically(out / "verify.json", json.dumps(result))
    return result


def on_chats(spec: RunSpec) -> RunSpec:
    """Return the run with `data.format` "chat" if a corpus has chats: then samples are synthetic chats.

    Those of a run with [preference] are synthetic pairs whatever its corpus says.
    """
    from meshwright.data.chat_source import has_chats

    if spec.preference is not None or spec.data.format != "auto" or not has_chats(spec.data):
        return spec
    return spec.model_copy(update={"data": spec.data.model_copy(update={"format": "chat"})})


def _on_ranks(spec: RunSpec, **options: Any) -> Result:
    call = partial(verify_worker, spec, **options)
    return run_on_ranks(call, spec.layout.world_size, spec=spec, modules=MODULES)


def check_way(spec: RunSpec, through: str | None, onto: RunSpec | None, precision: str) -> None:
    """Raise `UserError` for a way through which a run cannot be verified."""
    from meshwright.exchange.hf_config import write_hf_config

    if onto is not None and through is None:
        raise UserError("--onto: is the layout to load on; add --through checkpoint, or --through export")
    if through is not None and precision == "run":
        raise UserError("--precision run: compares no checkpoints; remove --through or --precision")
    if through is not None and worker() is not None:
        raise UserError("--through: starts the ranks itself, twice; give --save DIR, and then --load DIR")
    check_verification(VerifyOptions(spec, precision, through, onto))
    other_models(spec)  # refuses one that is not known
    if through == "snapshot" and onto is not None and onto.layout.world_size != spec.layout.world_size:
        raise UserError(
            f"--onto: has {counted(onto.layout.world_size, 'ranks')}, and a snapshot is in the memory of "
            f"those {spec.layout.world_size} that kept it; give a layout of as many, or --through checkpoint"
        )
    if through == "export":
        write_hf_config(spec.model, "float64")  # refuses a model that no family of HF's computes


IMPORTED = "imported"
"""Folder, in that of a saved run, of what was exported from it and imported again."""


def through_export(saved: Path, folder: Path) -> None:
    """Export a run that `verify` has saved to the HF folder `folder`, and import that: in several pieces."""
    from meshwright.spec.tiling import tiled
    from meshwright.verify.resume import tiles_of

    with tiled(tiles_of(saved)):
        export(saved, folder)
        import_hf(folder, saved / IMPORTED)


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
    from meshwright.verify.both import with_own_precision
    from meshwright.verify.precision import verify_in_own_precision
    from meshwright.verify.resume import load_part, save_part
    from meshwright.verify.verify import verify as verify_rank

    if load is not None and not (load / "run.json").is_file():
        raise UserError(f"--load: {load} holds no run.json; give the folder of a `meshwright verify --save`")
    if precision == "run" and (save is not None or load is not None):
        raise UserError("--precision run: compares no checkpoints; remove --save and --load")
    way = through or "checkpoint" if save or load else None
    check_verification(VerifyOptions(spec, precision, way))
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
