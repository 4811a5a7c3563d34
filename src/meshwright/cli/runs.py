"""The verbs train, verify, tokenize and data verify."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from meshwright.cli import output as show
from meshwright.cli.parser import JSON, Argument, Call, Flag, Verb, folder_name, whole
from meshwright.launch.env import Worker, resolve, worker
from meshwright.spec import RunSpec, UserError
from meshwright.spec.load import one_line, read_tree

RUN = Argument("RUN", "a run file (TOML), or the folder of an earlier run", required=False)
NPROC = Flag(
    "nproc",
    "processes on this machine: a number, or 'auto' for its GPUs or cores; default the layout's world "
    "size; sets layout.dp if no axis is set",
    "N|auto",
    str,
)


def spec_of(call: Call, ranks: int | None = None) -> RunSpec:
    """Return the spec of a command line, with its layout fitted to the number of processes.

    `ranks`, the number that torchrun has started, takes the place of --nproc.
    """
    path = call.path()
    tree = read_tree(path) if path else {}
    nproc = ranks if ranks is not None else call.flags.get("nproc")
    return resolve(tree, call.overrides, nproc, str(path) if path else "")


def train(call: Call) -> int:
    """Launch the ranks and train, or train as one of them."""
    from meshwright import api

    place = worker()
    out, resume, quiet = _out(call), call.flags["resume"], bool(call.flags["quiet"])
    spec = _planned(call, quiet) if place is None and resume is None else _given(call, place)
    run = call.path() if resume is not None else None
    if out is not None and run is not None and run.is_dir() and run.resolve() != out.resolve():
        raise UserError(f"--out: {out} differs from the resumed run {run}; remove --out")
    if place is None:
        result = api.train(spec, out=out, resume=resume, quiet=quiet)
    else:
        result = api.train_worker(spec, out=out or _shared_out(spec), resume=resume, quiet=quiet)
    if place is None or (place.rank == 0 and not place.launched):
        show.result(call.flags["json"], result)
    return 0


def _given(call: Call, place: Worker | None) -> RunSpec:
    """Return the spec of a torchrun rank or a resumed run, whose layout is not planned."""
    if call.flags["cluster"] is not None:
        raise UserError(
            "--cluster: only plans layouts of new runs; remove it, or run without --resume and torchrun"
        )
    return spec_of(call, place.world_size if place else None)


def _planned(call: Call, quiet: bool) -> RunSpec:
    """Return the spec of a new run; if it sets no axis, plan its layout and print the reason in one line."""
    from meshwright.launch.auto_layout import planned

    path = call.path()
    tree = read_tree(path) if path else {}
    source, nproc, cluster = str(path) if path else "", call.flags["nproc"], call.flags["cluster"]
    spec, why = planned(tree, call.overrides, nproc, source, cluster)
    if cluster is not None and why is None:
        raise UserError("--cluster: only plans a layout, but this run sets its own; remove --cluster")
    if why is not None and not quiet:
        show.line(why)
    return spec


def _out(call: Call) -> Path | None:
    """Return --out, else the folder of the named run, else None for a new one."""
    if call.flags["out"] is not None:
        return Path(call.flags["out"])
    path = call.path()
    return path if path is not None and path.is_dir() else None


def _shared_out(spec: RunSpec) -> Path:
    """Return a folder whose name all ranks of a torchrun agree on: from the spec, as they share no clock."""
    return Path("runs") / f"{spec.model.preset or spec.model.family}-{spec.digest()[:8]}"


def verify(call: Call) -> int:
    """Compare the layout with one device; the exit code is 1 if they differ."""
    from meshwright import api

    place = worker()
    spec = spec_of(call, place.world_size if place else None)
    steps, out = call.flags["steps"], Path(call.flags["out"]) if call.flags["out"] else None
    if place is not None:
        result = api.verify_worker(spec, steps=steps, out=out)
        if place.launched or place.rank > 0:
            return 0
    else:
        result = api.verify(spec, steps=steps)
    show.result(call.flags["json"], result, _show_verify)
    if place is None and out is not None:
        api.write_verdict(result, out)
    return 0 if result["equal"] else 1


def _show_verify(result: dict[str, Any]) -> None:
    show.table(result.get("rows", []))
    if narrowed := result.get("narrowed"):
        show.line(narrowed)
    verdict = "equal" if result["equal"] else "UNEQUAL"
    show.line(
        f"{verdict}: {result['compared']} tensors and numbers compared with one device in float64; "
        f"the largest relative difference is {result['worst_relative']:.1e}, of {result['worst_name']}"
    )


def tokenize(call: Call) -> int:
    """Turn a corpus into a folder of token shards."""
    spec = spec_of(call)
    if spec.data.mixture:
        raise UserError("data.mixture: only one corpus can be tokenized at a time; give it as --data.corpus")
    from meshwright import api

    counts = api.tokenize(
        spec.data.corpus,
        spec.data.tokenizer,
        Path(call.flags["out"]),
        vocab_size=spec.model.vocab_size,
        text_key=spec.data.text_key,
        val_fraction=spec.data.val_fraction,
    )
    show.result(call.flags["json"], counts.to_json())
    return 0


def data_verify(call: Call) -> int:
    """Hash every file of a folder of tokens; the exit code is 1, with a line on stderr, if one is damaged."""
    from meshwright import api

    result = api.data_verify(Path(call.words[0]))
    show.result(call.flags["json"], result)
    for problem in result["problems"]:
        print(f"meshwright: error: {one_line(problem)}", file=sys.stderr)
    return 1 if result["problems"] else 0


VERBS = (
    Verb(
        "train",
        "train a model: start the ranks, log, checkpoint, report",
        train,
        (RUN,),
        (
            NPROC,
            Flag("cluster", "hardware to plan a missing layout for; default this machine", "NAME|FILE", str),
            Flag("out", "folder of the run; default a new one under runs/", "DIR", folder_name),
            Flag("resume", "continue from the newest checkpoint, or from a step", "auto|STEP", str),
            Flag("quiet", "no progress lines"),
            JSON,
        ),
        keys=True,
    ),
    Verb(
        "verify",
        "compare the layout with one device in float64: loss, gradients, norm, parameters",
        verify,
        (RUN,),
        (
            NPROC,
            Flag("steps", "optimiser steps to compare", "K", whole(1), default=3),
            Flag("out", "also write the result to DIR/verify.json", "DIR", folder_name),
            JSON,
        ),
        keys=True,
    ),
    Verb(
        "tokenize",
        "turn text, JSONL or source files into a folder of tokens for data.corpus",
        tokenize,
        (RUN,),
        (Flag("out", "folder to write", "DIR", folder_name, required=True), JSON),
        keys=True,
    ),
    Verb(
        "data verify",
        "hash every file of a folder of tokens again",
        data_verify,
        (Argument("FOLDER", "a folder made by `meshwright tokenize`"),),
        (JSON,),
    ),
)
