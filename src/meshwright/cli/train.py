"""The verb train: start the ranks of a run, or train as one of them."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from meshwright import api
from meshwright.api.folders import folder_of
from meshwright.api.initial_weights import initial_weights_told
from meshwright.api.start_checks import check_inputs, check_start, check_writable_folder
from meshwright.cli import output as show
from meshwright.cli.ending import Ending, errors_as_json, shown_at_end
from meshwright.cli.parser import JSON, Call, Flag, verb
from meshwright.cli.runs import ADAPTER, FROM, NPROC, RUN, asked, spec_of
from meshwright.cli.verify import nothing_compared, show_verify
from meshwright.exchange.hf_config import export_remark
from meshwright.rank.env import Worker, nproc_of, worker
from meshwright.rank.launchers import RANK_VARIABLES
from meshwright.spec import RunSpec, UserError
from meshwright.spec.load import from_tree
from meshwright.units import counted


@verb(
    "train",
    RUN,
    FROM,
    ADAPTER,
    NPROC,
    Flag("cluster", "hardware to plan a missing layout for; default this machine", "NAME|FILE", str),
    api.train,
    Flag(
        "nodes",
        "run on so many hosts, which may leave and join; start the same command on each, with an --out that "
        "all of them have",
        "MIN[:MAX]",
        str,
    ),
    Flag(
        "verify", "first compare the layout with one device, as `verify` does, and only train if it is equal"
    ),
    JSON,
)
def train(call: Call) -> int:
    """Launch the ranks and train, or train as one of them; exit code 1 if --verify finds a difference."""
    # Each of several tasks of Slurm or MPI may be a host: --nodes makes one world of them.
    place = worker() if call.flags["nodes"] is None else None
    with errors_as_json(call.json and (place is None or place.rank == 0)) as run:
        return _train(call, place, run)


def _train(call: Call, place: Worker | None, ending: Ending) -> int:
    """Train as the rank `place`, or launch the ranks; see `train`."""
    path = call.path()
    if call.flags["verify"] and (place is not None or call.flags["nodes"] is not None):
        raise UserError(
            "--verify: needs all ranks of the layout on this machine, started by this command; remove it, "
            "and run `meshwright verify` first, on several hosts as `torchrun ... -m meshwright verify` with "
            "this run file and these flags"
        )
    if call.flags["nodes"] is not None:
        _train_with_others(call, ending)
        return 0
    resume, quiet = call.flags["resume"], call.flags["quiet"]
    run = path if path is not None and path.is_dir() else None
    out: Path | None = call.flags["out"] or run
    if place is None and resume is None:
        spec = _planned(call)
    elif call.flags["cluster"] is not None:
        raise UserError(
            "--cluster: only plans layouts of new runs; remove it, or run without --resume and torchrun"
        )
    else:
        spec = spec_of(call, place.world_size if place else None)
    address = call.flags["address"]
    if address is not None and spec.own_step_group is None:
        raise UserError(
            "--address: only says where other hosts reach this one; add --nodes, or --outer.island, or "
            "remove it"
        )
    if call.flags["rendezvous"] is not None:
        raise UserError("--rendezvous: only says where the hosts of --nodes meet; add --nodes, or remove it")
    if resume is not None and run and out and run.resolve() != out.resolve():
        raise UserError(f"--out: {out} differs from the resumed run {run}; remove --out")
    with folder_of(out, spec) as folder:
        ending.out, ending.checkpoints = folder, spec.checkpoint.folder(folder)
        if not quiet and (place is None or place.rank == 0):
            _tell_weights(spec, run, folder, resume)
            if resume is None and (remark := export_remark(spec.model)):
                show.line(remark)
        if call.flags["verify"]:
            check_start(spec, folder, resume)
            if not _is_equal(call, spec, ending):
                return 1
        result = api.train(
            spec, out=folder, resume=resume, quiet=quiet, supervise=True, address=address,
            doctor=call.flags["doctor"],
        )  # fmt: skip
        if place is None or place.rank == 0:
            _show_finished(call, result, ending, spec)
        if place is not None and place.rank == 0:
            show.note("status: done")  # its launcher may hide the exit code
    return 0


def _tell_weights(spec: RunSpec, run: Path | None, out: Path, resume: str | None) -> None:
    """Say in one line which weights a run starts from that goes on from no checkpoint.

    Nothing is said where nobody expects other ones than random.
    """
    goes_on = resume is not None and any(spec.checkpoint.folder(out).glob("step-*"))
    if not goes_on and (told := initial_weights_told(spec, run)):
        for line in told.splitlines():
            show.line(line)


def _show_finished(call: Call, result: Mapping[str, Any], ending: Ending, spec: RunSpec) -> None:
    """Print where a run's files are and what may follow; with --json its result, and how it ended."""
    if call.json:
        show.result(call, {**ending.described("finished", 0), **result})
    elif not call.flags["quiet"]:
        for line in shown_at_end(ending, spec):
            print(line)


def _is_equal(call: Call, spec: RunSpec, ending: Ending) -> bool:
    """Compare the layout with one device; print in one line that it is equal, or else the whole result."""
    with nothing_compared():
        found = api.verify(spec)
    if not found["equal"]:
        reason = "the layout does not equal one device, so nothing was trained"
        show.result(call, {**ending.described("failed", 1, reason), **found}, show_verify)
    elif not call.flags["quiet"]:
        narrowed = f"; {found['narrowed']}" if found["narrowed"] else ""
        own = f", and then in {found['own']['precision']}" if "own" in found else ""
        steps = counted(found["steps"], "steps")
        show.line(
            f"verified: {found['layout']} equals one device in float64 over {steps}{own} "
            f"({found['compared']} tensors and numbers, the largest relative difference "
            f"{found['worst_relative']:.1e}){narrowed}"
        )
    return bool(found["equal"])


def _train_with_others(call: Call, ending: Ending) -> None:
    """Train as one of several hosts, with --nproc ranks."""
    given = call.flags["nodes"]
    match = re.fullmatch(r"([1-9]\d{0,5})(?::([1-9]\d{0,5}))?", given)
    least, most = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    if match is None:
        raise UserError(f"--nodes: {given!r} is not a number of hosts; give one, as 2, or a range, as 1:4")
    if least > most:
        raise UserError(
            f"--nodes: {given!r} asks for at least {least} hosts and at most {most}; give {most}:{least}"
        )
    if any(name in os.environ for name in RANK_VARIABLES) or call.flags["cluster"] is not None:
        raise UserError(
            "--nodes: starts the ranks itself, on the layout of the run file; remove --cluster, and start it "
            "without torchrun"
        )
    tree, overrides, nproc, source = asked(call)
    path, spec = call.path(), from_tree(tree, overrides, source)
    ending.out = call.flags["out"]
    if ending.out is not None:
        ending.checkpoints = spec.checkpoint.folder(ending.out)
        if not call.flags["quiet"]:
            run = path if path is not None and path.is_dir() else None
            _tell_weights(spec, run, ending.out, call.flags["resume"])
    result = api.train(
        spec,
        nproc=None if nproc is None else nproc_of(nproc),
        out=ending.out,
        resume=call.flags["resume"],
        quiet=call.flags["quiet"],
        nodes=(least, most),
        address=call.flags["address"],
        rendezvous=call.flags["rendezvous"],
        doctor=call.flags["doctor"],
    )
    _show_finished(call, result, ending, spec)


def _planned(call: Call) -> RunSpec:
    """Return the spec of a new run; if it sets no axis, plan its layout and print the reason in one line."""
    from meshwright.rank.auto_layout import planned

    cluster = call.flags["cluster"]
    check_writable_folder(call.flags["out"])
    spec, why = planned(*asked(call), cluster, check_inputs)
    if cluster is not None and why is None:
        raise UserError("--cluster: only plans a layout, but this run sets its own; remove --cluster")
    if why is not None and not call.flags["quiet"]:
        show.line(why)
    return spec
