"""Train a run whose islands are worlds of their own, all on this host."""

from __future__ import annotations

import json
import os
import shutil
from collections import Counter, defaultdict
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from signal import SIGINT, Signals
from typing import Any

from rich.console import Console

from meshwright.checkpoint.reader import newest_state
from meshwright.islands.island_log import Entry, IslandLog, island_folder
from meshwright.launch.island_supervisor import Island, IslandsSupervisor, shares_of_cores
from meshwright.rank.failure import KINDS, RanksFailed
from meshwright.report.run_page import write_report
from meshwright.runs.record import (
    EVENTS,
    RESULT,
    RUN,
    append_event,
    read_object,
    write_atomically,
)
from meshwright.runs.status import going_on
from meshwright.spec import RunSpec, UserError
from meshwright.spec.errors import REQUEUE, CorruptionError, Stopped
from meshwright.spec.hf.special_tokens import copy_side_files, side_files
from meshwright.train.island_world import ISLANDS

Result = dict[str, Any]
LOGS = "island.{}.log"
"""File in the run's folder with what the processes of an island print."""


def train_islands(spec: RunSpec, out: Path, resume: str | None, quiet: bool) -> Result:
    """Train all islands of a run in the folder `out`, and return the result of the one that ended last.

    Its checkpoints become those of `out`. `islands` of the result has a row for each island: its number, exit
    code, `starts` of its process, `steps`, the `exchanges` that it has followed in all, and the `lateness` of
    its parts and `restarts` of its ranks since it was last started. Raises `Stopped`, and `UserError` or
    `RanksFailed` where an island did not come to its end; where others did, the result is written first.
    """
    if resume not in (None, "auto"):
        raise UserError(
            f"--resume: islands have checkpoints of their own, and step {resume} is none of the run's; give "
            f"auto"
        )
    before = (out / RUN).read_text(encoding="utf-8") if resume and (out / RUN).is_file() else None
    if before is not None:
        earlier = (read_object(out / RUN) or {}).get("spec")
        if not isinstance(earlier, dict):
            raise UserError(f"{out / RUN}: holds no spec of a run; the file is damaged, move it away")
        if (earlier.get("outer") or {}).get("quorum") is None:
            _part(spec, out)
        else:
            _check_as_many(spec, earlier, out)
    write_atomically(out / RUN, json.dumps({"spec": spec.to_json()}, indent=2) + "\n")
    (out / EVENTS).touch()
    order = sorted(range(spec.step_groups), key=lambda island: -_merged(spec, island_folder(out, island)))
    cores = shares_of_cores(spec.step_groups)
    islands = [
        Island(
            number,
            ["train", str(out / RUN), "--outer.island", str(number), "--out", str(out), "--quiet"],
            cores[number],
            out / LOGS.format(number),
        )
        for number in order
    ]
    log = IslandLog(out / ISLANDS)
    log.secret()  # an island that could not read it would be started again
    watch = LogWatch(log, None if quiet else Console())
    tell = partial(append_event, out, alone=False)
    supervisor = IslandsSupervisor(islands, spec.recovery.max_restarts, watch.done, tell)
    signal = supervisor.run(resume)
    if signal:
        _give_model(
            spec, out, max(range(spec.step_groups), key=lambda k: _merged(spec, island_folder(out, k)))
        )
        raise _stopped(signal, islands, out)
    failed = sorted((island for island in islands if island.code), key=lambda island: island.number)
    if len(failed) == len(islands):
        if failed[0].code == UserError.code and before is not None:
            write_atomically(out / RUN, before)  # islands refuse what they are to go on with
        raise _failure(failed, "no island came to its end")
    result = _joined(spec, out, {island.number: island for island in islands})
    if failed:
        with suppress(UserError):  # such as of a record that the island refused, too
            write_report(out)
        ended = sorted(island.number for island in islands if not island.code)
        what = f"the model in {out} is of island{'s' * (len(ended) > 1)} {', '.join(map(str, ended))} alone"
        raise _failure(failed, f"{what}, and --resume auto goes on with all")
    write_report(out)
    return result


def _failure(failed: Sequence[Island], what: str) -> UserError | RanksFailed:
    """Return the error of islands that did not come to their ends; a mistake of the user's says most."""
    sentence = "; ".join(f"island {island.number}: {island.last_words()}" for island in failed)
    codes = [island.code for island in failed if island.code is not None]
    code = next((code for code in codes if code in KINDS), codes[0])
    if code in KINDS:
        return KINDS[code](f"{sentence}; {what}")
    return RanksFailed(f"{sentence}; {what}", 128 - code if code < 0 else code)


def _stopped(number: int, islands: Sequence[Island], out: Path) -> Stopped:
    """Return the end of a run in `out` that the signal `number` has stopped; it names islands that did not
    save."""
    name, saved = Signals(number).name, 128 + number if number == SIGINT else REQUEUE
    lost = [island for island in islands if not island.saved]
    if not lost:
        go_on = f"go on with {going_on(out)}"
        return Stopped(f"stopped by {name}, and each island is saved; {go_on}", saved)
    words = "; ".join(f"island {island.number}: {island.last_words()}" for island in lost)
    return Stopped(f"stopped by {name}, and not all islands are saved: {words}", 128 + number)


class LogWatch:
    """The log of islands as it grows, each exchange of which is printed on a console."""

    def __init__(self, log: IslandLog, console: Console | None) -> None:
        self._log, self._console = log, console
        self._next = self._exchanges = 0
        self._joins: Counter[int] = Counter()
        self._parts: Counter[int] = Counter()

    def done(self, island: int) -> tuple[int, int]:
        """How often an island has joined, and the exchanges that it was part of."""
        while (entry := self._log.read(self._next)) is not None:
            self._next += 1
            self._joins[entry.island] += entry.kind == "join"
            self._parts.update(row[0] for row in entry.contributions)
            self._exchanges += entry.kind == "exchange"
            self._print(entry)
        return self._joins[island], self._parts[island]

    def _print(self, entry: Entry) -> None:
        if self._console is None:
            return
        text = f"island {entry.island} {entry.reason or 'joins'}"
        if entry.kind == "exchange":
            parts = [
                f"{island} (late by {self._exchanges - 1 - base})" for island, base, *_ in entry.contributions
            ]
            text = f"exchange {self._exchanges} of island{'s' * (len(parts) > 1)} {', '.join(parts)}"
        self._console.print(text, soft_wrap=True, markup=False, highlight=False)


def _merged(spec: RunSpec, folder: Path) -> int:
    """Exchanges that the newest checkpoint of an island has followed; -1 without one."""
    state = newest_state(spec.checkpoint.folder(folder))
    return -1 if state is None else int(state.get("merged", 0))


def _part(spec: RunSpec, out: Path) -> None:
    """Give each island the checkpoints of a run that had one world, which become its own from now on."""
    shared = spec.checkpoint.folder(out)
    if spec.checkpoint.dir is not None:
        raise UserError(
            f"checkpoint.dir: {spec.checkpoint.dir} is one folder, and islands have one each; leave it "
            f"out to go on with islands (outer.quorum = {spec.outer.quorum})"
        )
    for island in range(spec.step_groups):
        own = island_folder(out, island)
        if shared.is_dir() and not (own / shared.name).exists():
            own.mkdir(exist_ok=True)
            described = json.loads((out / RUN).read_text(encoding="utf-8"))
            described.pop("starts", None)  # the rows of its steps until now are in the run's own record
            write_atomically(own / RUN, json.dumps(described, indent=2) + "\n")
            copied = own / f"{shared.name}.copied"
            shutil.rmtree(copied, ignore_errors=True)
            shutil.copytree(shared, copied, copy_function=os.link)  # checkpoints' files never change
            copied.rename(own / shared.name)
    if shared.is_dir() and not shared.is_symlink():
        shutil.rmtree(shared)
        shared.symlink_to(Path(island_folder(out, 0).name) / shared.name)


def _joined(spec: RunSpec, out: Path, islands: dict[int, Island]) -> Result:
    """Write the result of the run, and give its folder the model of the island that ended last.

    Raises `CorruptionError` where islands ended with other models.
    """
    ended = [number for number, island in islands.items() if not island.code]
    results = {
        island: json.loads((island_folder(out, island) / RESULT).read_text(encoding="utf-8"))
        for island in ended
    }
    last = max(ended, key=lambda island: results[island]["exchanges"])
    kept = ("steps", "exchanges", "lateness", "restarts")
    rows = [
        {
            "island": number,
            "code": island.code or 0,
            "starts": island.starts,
            **{key: results.get(number, {}).get(key) for key in kept},
        }
        for number, island in islands.items()
    ]
    late: Counter[str] = Counter()
    for result in results.values():
        late.update(result["lateness"])
    result = {
        **results[last],
        "lateness": dict(sorted(late.items(), key=lambda row: int(row[0]))),
        "islands": rows,
    }
    write_atomically(out / RESULT, json.dumps(result, indent=2) + "\n")
    _give_model(spec, out, last)
    _check_models(out, results)
    return result


def _check_models(out: Path, results: dict[int, Result]) -> None:
    """Raise `CorruptionError` where islands that ended after the same exchanges have other models."""
    of_exchanges: dict[int, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    for island, result in sorted(results.items()):
        of_exchanges[result["exchanges"]][result["parameters_sha256"]].append(island)
    for exchanges, models in of_exchanges.items():
        if len(models) > 1:
            listed = "; ".join(f"{', '.join(map(str, k))}: {digest[:12]}" for digest, k in models.items())
            sentence = (
                f"islands ended with other models after the same {exchanges} exchanges ({listed}): memory or "
                f"arithmetic of a machine is at fault; go on from earlier checkpoints of one island"
            )
            append_event(out, "divergence", {"islands": sorted(results), "message": sentence}, alone=False)
            raise CorruptionError(sentence)


def _give_model(spec: RunSpec, out: Path, island: int) -> None:
    """Let checkpoints and tokenizer's files of the run in folder `out` be those of an island."""
    folder = island_folder(out, island)
    if spec.checkpoint.dir is None and spec.checkpoint.folder(folder).is_dir():
        link = out / "checkpoints"
        link.unlink(missing_ok=True)
        os.symlink(spec.checkpoint.folder(Path(folder.name)), link)
    copy_side_files(side_files(folder, "train"), folder, out)


def _check_as_many(spec: RunSpec, before: Any, out: Path) -> None:
    """Refuse another number of islands than the run in folder `out` has."""
    islands = int(before["layout"]["replicate"])
    if spec.step_groups != islands:
        raise UserError(
            f"layout.replicate: {spec.step_groups} islands, and {out} has {islands} with checkpoints of "
            f"their own; give layout.replicate = {islands}, or another --out"
        )
