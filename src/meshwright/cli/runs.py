"""The verbs train, verify, tokenize and data verify."""

from __future__ import annotations

import math
import re
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from meshwright.cli import output as show
from meshwright.cli.ending import Ending, errors_as_json
from meshwright.cli.parser import JSON, Argument, Call, Flag, choice, folder_name, verb, whole
from meshwright.launch.env import Worker, nproc_of, resolve, worker
from meshwright.launch.failure import RanksFailed
from meshwright.spec import RunSpec, UserError
from meshwright.spec.errors import CollectiveError
from meshwright.spec.load import Overrides, from_tree, read_tree
from meshwright.units import duration

RUN = Argument("RUN", "a run file (TOML), or the folder of an earlier run", required=False, keys=True)
NO_VERDICT = "the layout was not compared with one device"
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
    return resolve(*_asked(call, ranks))


def _asked(call: Call, ranks: int | None = None) -> tuple[dict[str, Any], Overrides, int | str | None, str]:
    """Return the run file's content, the dotted flags, the number of processes, and the file's name."""
    path = call.path()
    tree = read_tree(path) if path else {}
    return tree, call.overrides, ranks or call.flags.get("nproc"), str(path or "")


@verb(
    "train",
    "train a model: start the ranks, log, checkpoint, report",
    RUN,
    NPROC,
    Flag("cluster", "hardware to plan a missing layout for; default this machine", "NAME|FILE", str),
    Flag("out", "folder of the run; default a new one under runs/", "DIR", folder_name),
    Flag("resume", "continue from the newest checkpoint, or from a step", "auto|STEP", str),
    Flag("quiet", "no progress lines"),
    Flag(
        "nodes",
        "run on so many hosts, which may leave and join; start the same command on each, with an --out that "
        "all of them have",
        "MIN[:MAX]",
        str,
    ),
    Flag("address", "address of this host that the others reach it at", "IP", str),
    Flag(
        "verify", "first compare the layout with one device, as `verify` does, and only train if it is equal"
    ),
    JSON,
)
def train(call: Call) -> int:
    """Launch the ranks and train, or train as one of them; exit code 1 if --verify finds a difference."""
    place = worker()
    with errors_as_json(call.json and (place is None or place.rank == 0)) as run:
        return _train(call, place, run)


def _train(call: Call, place: Worker | None, ending: Ending) -> int:
    """Train as the rank `place`, or launch the ranks; see `train`."""
    from meshwright import api

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
    if call.flags["address"] is not None:
        raise UserError("--address: only says where other hosts reach this one; add --nodes, or remove it")
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
    if resume is not None and run and out and run.resolve() != out.resolve():
        raise UserError(f"--out: {out} differs from the resumed run {run}; remove --out")
    if out is None and place is None:
        out = api.default_out()
    elif out is None:  # ranks of a torchrun must agree on a folder, and share no clock: the spec names it
        out = Path("runs") / f"{spec.model.preset or spec.model.family}-{spec.digest()[:8]}"
    ending.out, ending.checkpoints = out, spec.checkpoint.folder(out)
    if call.flags["verify"]:
        api.check_start(spec, out, resume)
        if not _is_equal(call, spec, ending):
            return 1
    if place is None:
        result = api.train(spec, out=out, resume=resume, quiet=quiet, supervise=True)
    else:
        result = api.train_worker(spec, out=out, resume=resume, quiet=quiet)
    if place is None or (place.rank == 0 and not place.launched):
        _show_finished(call, result, ending)
    return 0


def _show_finished(call: Call, result: Mapping[str, Any], ending: Ending) -> None:
    """Print the result of a run, with --json together with how it ended."""
    show.result(call, {**ending.described("finished", 0), **result} if call.json else result)


def _is_equal(call: Call, spec: RunSpec, ending: Ending) -> bool:
    """Compare the layout with one device; print in one line that it is equal, or else the whole result."""
    from meshwright import api

    with _nothing_compared():
        found = api.verify(spec)
    if not found["equal"]:
        reason = "the layout does not equal one device, so nothing was trained"
        show.result(call, {**ending.described("failed", 1, reason), **found}, _show_verify)
    elif not call.flags["quiet"]:
        narrowed = f"; {found['narrowed']}" if found["narrowed"] else ""
        show.line(
            f"verified: {found['layout']} equals one device in float64 over {found['steps']} steps "
            f"({found['compared']} tensors and numbers, the largest relative difference "
            f"{found['worst_relative']:.1e}){narrowed}"
        )
    return bool(found["equal"])


def _train_with_others(call: Call, ending: Ending) -> None:
    """Train as one of several hosts, with --nproc ranks."""
    from meshwright import api

    given = call.flags["nodes"]
    match = re.fullmatch(r"([1-9]\d{0,5})(?::([1-9]\d{0,5}))?", given)
    least, most = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    if match is None:
        raise UserError(f"--nodes: {given!r} is not a number of hosts; give one, as 2, or a range, as 1:4")
    if least > most:
        raise UserError(
            f"--nodes: {given!r} asks for at least {least} hosts and at most {most}; give {most}:{least}"
        )
    if worker() is not None or call.flags["cluster"] is not None:
        raise UserError(
            "--nodes: starts the ranks itself, on the layout of the run file; remove --cluster, and start it "
            "without torchrun"
        )
    tree, overrides, nproc, source = _asked(call)
    spec, ending.out = from_tree(tree, overrides, source), call.flags["out"]
    if ending.out is not None:
        ending.checkpoints = spec.checkpoint.folder(ending.out)
    result = api.train(
        spec,
        nproc=None if nproc is None else nproc_of(nproc),
        out=ending.out,
        resume=call.flags["resume"],
        quiet=call.flags["quiet"],
        nodes=(least, most),
        address=call.flags["address"],
    )
    _show_finished(call, result, ending)


def _planned(call: Call) -> RunSpec:
    """Return the spec of a new run; if it sets no axis, plan its layout and print the reason in one line."""
    from meshwright.launch.auto_layout import planned

    cluster = call.flags["cluster"]
    spec, why = planned(*_asked(call), cluster)
    if cluster is not None and why is None:
        raise UserError("--cluster: only plans a layout, but this run sets its own; remove --cluster")
    if why is not None and not call.flags["quiet"]:
        show.line(why)
    return spec


def _axes(text: str) -> Overrides:
    pairs = [each.partition("=") for each in text.split(",")]
    if not all(key.strip() and value.strip() for key, _, value in pairs):
        raise ValueError("axes with their sizes are needed, such as dp=2,tp=2")
    return [(f"layout.{key.strip()}", value.strip()) for key, _, value in pairs]


@verb(
    "verify",
    "compare the layout with one device in float64: loss, gradients, norm, parameters",
    RUN,
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
    Flag(
        "through",
        "save after K steps, load, and compare K more: 'checkpoint', or 'export' to an HF folder and import",
        "WAY",
        choice("checkpoint", "export"),
    ),
    Flag("onto", "with --through: layout to load on, such as dp=2,tp=2; default the same", "AXES", _axes),
    Flag(
        "precision",
        "'exact' compares in float64, uncompiled; 'run' in the run's own formats, compiled if it is",
        "FORMATS",
        choice("exact", "run"),
        default="exact",
    ),
    Flag("locate", "list all differences of the first step that has one, in the order of the step"),
    Flag("save", "the first part of --through alone: save in DIR", "DIR", folder_name),
    Flag("load", "its second part alone: go on from what --save has left in DIR", "DIR", folder_name),
    Flag("out", "also write the result to DIR/verify.json", "DIR", folder_name),
    JSON,
)
def verify(call: Call) -> int:
    """Compare the layout with one device; the exit code is 1 if they differ."""
    from meshwright import api

    place, flags = worker(), dict(call.flags)
    ranks, budget, locate = flags.pop("sweep"), flags.pop("budget"), flags.pop("locate")
    if ranks is not None:
        return _sweep(call)
    if budget is not None:
        raise UserError("--budget: is the time of a sweep; add --sweep N, or remove it")
    flags["steps"] = flags["steps"] or 3
    spec = spec_of(call, place.world_size if place else None)
    del flags["nproc"]  # the layout says it
    save, load, onto = flags.pop("save"), flags.pop("load"), flags.pop("onto")
    parts = {"save": save, "load": load}
    _check_parts(parts, flags["through"], spec.layout.world_size if place is None else 0)
    if place is not None and place.launched:  # its launcher reports a failure
        api.verify_worker(spec, **parts, **flags)
        return 0
    if onto is not None:
        if place is not None or load is not None:
            raise UserError("--onto: starts ranks of another layout; give --load that layout instead")
        onto = from_tree({**spec.to_json(), "layout": {}}, onto)
    with _nothing_compared():
        if place is not None or save is not None or load is not None:
            result = api.verify_worker(spec, **parts, **flags)
        else:
            result = api.verify(spec, onto=onto, **flags)
    if place is not None and place.rank > 0:
        return 0
    show.result(call, result, partial(_show_verify, locate=locate))
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
    from meshwright import api

    place, flags = worker(), call.flags
    for name in ("nproc", "through", "onto", "save", "load"):
        if flags[name] is not None:
            raise UserError(f"--{name}: does not go with --sweep, which chooses the layouts; remove it")
    if flags["locate"]:
        raise UserError("--locate: is of one layout; give it to the command that repeats a failure")
    show_row = None if call.json else _show_row
    if place is not None:
        if not place.launched:
            raise UserError("--sweep: starts the ranks itself; start it without torchrun")
        api.sweep_worker(spec_of(call), flags["out"], show_row)
        return 0
    with _nothing_compared():
        result = api.sweep(
            spec_of(call),
            flags["sweep"],
            steps=flags["steps"] or 2,
            precision=flags["precision"],
            budget=flags["budget"] or math.inf,
            out=flags["out"],
            given=(call.words, call.overrides),
            show=show_row,
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
def _nothing_compared() -> Iterator[None]:
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


def _show_verify(result: Mapping[str, Any], locate: bool = False) -> None:
    show.table(result.get("rows", []))
    if narrowed := result.get("narrowed"):
        show.line(narrowed)
    verdict = "equal" if result["equal"] else "UNEQUAL"
    precision = result.get("precision", "float64")
    beside = "" if precision == "float64" else f" beside its tolerance of {result['tolerance']:.1e}"
    worst = "infinite" if result["worst_relative"] is None else f"{result['worst_relative']:.1e}"
    show.line(
        f"{verdict}: {result['compared']} tensors and numbers compared with one device in {precision}; the "
        f"largest relative difference{beside} is {worst}, of {result['worst_name']}"
    )
    if first := result["first"]:
        if locate:
            show.table(result["differences"])
        show.line(first["sentence"])


@verb(
    "tokenize",
    "turn text, JSONL or source files into a folder of tokens for data.corpus",
    RUN,
    Flag("out", "folder to write", "DIR", folder_name, required=True),
    JSON,
)
def tokenize(call: Call) -> None:
    """Turn a corpus into a folder of token shards."""
    spec = spec_of(call)
    if spec.data.mixture:
        raise UserError("data.mixture: only one corpus can be tokenized at a time; give it as --data.corpus")
    from meshwright import api

    counts = api.tokenize(
        spec.data.corpus,
        spec.data.tokenizer,
        call.flags["out"],
        vocab_size=spec.model.vocab_size,
        text_key=spec.data.text_key,
        val_fraction=spec.data.val_fraction,
    )
    show.result(call, counts.to_json())


@verb(
    "data verify",
    "hash every file of a folder of tokens again",
    Argument("FOLDER", "a folder made by `meshwright tokenize`"),
    JSON,
)
def data_verify(call: Call) -> int:
    """Hash every file of a folder of tokens; the exit code is 1, with a line on stderr, if one is damaged."""
    from meshwright import api

    result = api.data_verify(Path(call.words[0]))
    show.result(call, result)
    return show.problems(result["problems"])
