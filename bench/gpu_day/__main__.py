"""Run the parts of the day in order, and write their results and the page.

    python -m gpu_day [--minutes 10|30] [--device cuda|fake] [--gpus 1|8] [--out DIR] [--parts NAME ...]

The folder DIR, by default bench/results/gpu_day-DATE, gets a JSON file and a log for each part, and
`index.md`. The exit code is 1 if a part failed, and 2 for a mistake, such as no GPU; what had no time left is
told on the page.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path

from gpu_day.commands import ROOT, environment, last_lines, python, run_limited
from gpu_day.machine import lacks_gpu
from gpu_day.page import page
from gpu_day.parts import Part, parts_of
from gpu_day.results import DONE, FAILED, LEFT_OUT, STOPPED, Result, Task
from meshwright.atomic import write

MARGIN = 20.0
"""Seconds at the end that no part gets."""
LEAST = 20.0
"""Seconds without which no part is begun."""
REHEARSAL = 600
"""Limit in seconds of a part on a device that is faked."""


class Day:
    """The parts that have been, in a folder."""

    def __init__(self, options: argparse.Namespace, out: Path) -> None:
        self.device, self.minutes, self.out = options.device, options.minutes, out
        self.command = shlex.join(["python", "-m", "gpu_day", *sys.argv[1:]])
        self.date = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
        self.results: list[Result] = []
        faked = self.device == "fake"
        self._until = time.monotonic() + (3600.0 if faked else self.minutes * 60 - MARGIN)
        self.before: dict[str, Result] = {}
        """Results in the folder of parts that are not done now."""
        if options.parts:
            files = {part.name: out / f"{part.name}.json" for part in parts_of(1)}
            kept = {name: file for name, file in files.items() if name not in options.parts and file.exists()}
            self.before = {name: Result.read(file) for name, file in kept.items()}

    def do(self, part: Part, gpus: int) -> Result:
        """Do a part in its process, or leave it out, and write the page."""
        left = self._until - time.monotonic()
        limit = REHEARSAL if self.device == "fake" else part.seconds(self.minutes)
        file = self.out / f"{part.name}.json"
        if left < LEAST:
            result = Result(part.name, part.kind, LEFT_OUT, f"no time was left of {self.minutes} minutes")
        else:
            result = self._run(part, gpus, min(limit, left), file)
        result.save(file)
        self.results.append(result)
        self.before.pop(part.name, None)
        told = sorted([*self.results, *self.before.values()], key=lambda each: _ORDER.index(each.part))
        write(self.out / "index.md", page(told, self.command, self.date))
        print(f"{part.name}: {result.state}, {result.seconds:.0f} s", flush=True)
        return result

    def _run(self, part: Part, gpus: int, limit: float, file: Path) -> Result:
        task = Task(part.name, part.kind, part.options, self.device, gpus, limit, str(file), part.ranks)
        command = python("-m", "gpu_day.worker", json.dumps(asdict(task)))
        file.unlink(missing_ok=True)
        log = self.out / f"{part.name}.log"
        began = time.monotonic()
        code = run_limited(command, limit, log, environment(), own_group=True)
        result = Result.read(file) if file.exists() else Result(part.name, part.kind)
        result.seconds = round(time.monotonic() - began, 1)
        result.command = shlex.join(command)
        result.nominal = self.device == "fake"
        result.state = DONE if code == 0 else STOPPED if code is None else FAILED
        if code is None:
            result.why = f"it took longer than {limit:.0f} s"
        elif code:
            result.why = f"exit code {code}\n{last_lines(log)}"
        return result


_ORDER = [part.name for part in parts_of(1)]


def gpus_of(result: Result) -> int:
    """The number of GPUs that the part `machine` has found."""
    found = [row.get("value") for row in result.rows if row["fact"] == "GPUs"]
    return int(found[0] or 1) if found else 1


def main() -> int:
    """Run the parts; the exit code is 1 if one failed, and 2 for a mistake."""
    parser = argparse.ArgumentParser(
        prog="python -m gpu_day", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=int, choices=(10, 30), default=10, help="length of the day")
    parser.add_argument("--device", choices=("cuda", "fake"), default="cuda")
    parser.add_argument("--gpus", type=int, choices=(1, 8), help="GPUs to use; default all, with fake 1")
    parser.add_argument("--out", type=Path, help="folder of the results")
    parser.add_argument(
        "--parts",
        nargs="+",
        metavar="NAME",
        help="only these parts, besides machine; the folder keeps the results of the others",
    )
    options = parser.parse_args()
    if unknown := [name for name in options.parts or () if name not in _ORDER]:
        parser.error(f"--parts: {unknown[0]!r} is not a part; the parts are {', '.join(_ORDER)}")
    if options.device == "cuda" and (sentence := lacks_gpu()):
        print(sentence, file=sys.stderr)
        return 2
    today = datetime.now(UTC).strftime("%Y%m%d")
    out = options.out or ROOT / "bench" / "results" / f"gpu_day-{today}"
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"--out: {out} cannot be a folder of results ({error.strerror}); give another one")
    day = Day(options, out.resolve())
    first, *_ = parts_of(1)
    found = day.do(first, options.gpus or 1)
    if found.state != DONE:
        print(found.why.splitlines()[-1], file=sys.stderr)
        return 1
    gpus = options.gpus or gpus_of(found)
    for part in parts_of(gpus)[1:]:
        if options.parts is None or part.name in options.parts:
            day.do(part, gpus)
    print(f"wrote {day.out / 'index.md'}")
    return int(any(each.state == FAILED for each in day.results))


if __name__ == "__main__":
    sys.exit(main())
