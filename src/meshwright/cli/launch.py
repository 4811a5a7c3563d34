"""The verbs launch, status, logs and stop: runs as jobs of a scheduler."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from meshwright import api
from meshwright.api.options import whole
from meshwright.cli import output as show
from meshwright.cli.parser import JSON, Argument, Call, Flag, verb
from meshwright.cli.runs import ADAPTER, FROM, RUN
from meshwright.submit.progress import in_words
from meshwright.units import counted

OUT = Argument("OUT", "the folder of a launched run")
MOST_NAMED = 4
"""Commands that a dry run prints."""
FOLLOW = Flag("follow", "show the log and the job's state until it has ended")


@verb("launch", RUN, FROM, ADAPTER, api.launch, FOLLOW, JSON)
def launch(call: Call) -> int:
    """Submit a run; with --follow the exit code is 1 unless all its runs come to their last step."""
    flags = dict(call.flags)
    goes_on = flags.pop("follow")
    for name in ("from", "adapter"):
        flags.pop(name, None)
    result = api.launch(call.path(), **flags, overrides=call.overrides)
    if flags["dry_run"] and not call.json:
        _print_file(result)
        return 0
    show.result(call, result, _show_launched)
    return _follow(Path(result["folder"])) if goes_on and not flags["dry_run"] else 0


def _print_file(result: Mapping[str, Any]) -> None:
    """Print the file alone on standard output, so that it can be kept, and the rest on standard error."""
    print(result["file"], end="", flush=True)
    told = [*result["told"], *_submitted_by(result["commands"])]
    print("\n".join(f"# {sentence}" for sentence in told), file=sys.stderr)


def _submitted_by(commands: Sequence[Sequence[str]]) -> list[str]:
    """Sentences with the commands that submit a job, the first ones of many."""
    named = [f"submitted by: {shlex.join(words)}" for words in commands[:MOST_NAMED]]
    more = len(commands) - len(named)
    return named + ([f"and {counted(more, 'commands')} like these, which --json lists"] if more else [])


def _show_launched(result: Mapping[str, Any]) -> None:
    for sentence in result["told"]:
        show.line(sentence)
    folder = shlex.quote(result["folder"])
    print(f"{result['scheduler']}: {' '.join(result['ids'])}")
    for name in ("status", "logs", "stop"):
        print(f"{'next' if name == 'status' else '':<6}meshwright {name} {folder}")


def _follow(folder: Path) -> int:
    """Follow a job; Ctrl-C ends that, and the job goes on."""
    ends = api.follow(folder, lambda line: print(line, flush=True))
    return int(any(end != "done" for end in ends))


@verb("status", OUT, JSON)
def status(call: Call) -> None:
    """Print the state of a job and how far its runs are."""
    show.result(call, api.status(Path(call.words[0])), _show_status)


def _show_status(result: Mapping[str, Any]) -> None:
    if result["scheduler"] is not None:
        show.line(f"{result['scheduler']}: {' '.join(result['ids'])}, submitted {result['submitted']}")
    show.table(
        [
            {
                "run": Path(run["out"]).name,
                "job": run["state"],
                "status": run["status"],
                "progress": in_words(run),
                "starts": run["starts"],
            }
            for run in result["runs"]
        ]
    )
    for run in result["runs"]:
        if run["waits_for"]:
            show.line(f"{run['out']}: waits for {run['waits_for']}")
        if run["reason"]:
            show.line(f"{run['out']}: {run['reason']}")


@verb(
    "logs",
    OUT,
    Flag("run", "the run of a sweep, by its number", "N", whole(0), default=0),
    Flag("n", "only the last lines", "N", whole(1)),
    FOLLOW,
)
def logs(call: Call) -> int:
    """Print the log of a job; with --follow the exit code is as of launch."""
    folder = Path(call.words[0])
    if call.flags["follow"]:
        return _follow(folder)
    for line in api.logs(folder, member=call.flags["run"], lines=call.flags["n"]):
        show.prose(line)
    return 0


@verb("stop", OUT, JSON)
def stop(call: Call) -> None:
    """Let a job's runs save and end, without a new start."""
    show.result(call, api.stop(Path(call.words[0])), _show_stopped)


def _show_stopped(result: Mapping[str, Any]) -> None:
    states = ", ".join(dict.fromkeys(result["states"]))
    done = {"running": "is told to save and end", "pending": "is taken out of the queue"}
    told = next((words for state, words in done.items() if state in result["states"]), "had ended before")
    show.line(f"{result['scheduler']}: {' '.join(result['ids'])} {told}; it was {states}")
