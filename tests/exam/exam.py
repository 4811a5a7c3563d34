"""The exam of `meshwright verify`: known mistakes are planted in a copy of the source, one at a time.

Each mutation of `mutations.toml` stands for a mistake that some trainer made in public, or for one of that
kind. The command that should show it runs on the mutated copy. It is caught where the command says UNEQUAL,
or fails with a sentence that says what is wrong; it is named where the first difference that the command
tells is of the module, the value or the collective that was mutated. A pass, an abort without an explanation
and a run without an end miss it. The same command on a copy without a mutation must pass.

    python tests/exam/exam.py [--only ID,...] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import warm

FOLDER = Path(__file__).resolve().parent
SOURCE = FOLDER.parents[1] / "src" / "meshwright"
LIMIT_S = 60.0
"""A command that takes longer has no end: one takes seconds, and a lost collective is told after 30 s."""
COMPILING_S = 240.0
"""Seconds added to it where a mutation is of C++, which is compiled when it is first used, or where a run
compiles its blocks."""


@dataclass(frozen=True)
class Mutation:
    """One mistake: `old`, which occurs once in `file` of the package, Python or C++, becomes `new`.

    `id` is a number of the list of public bugs, with a letter where a bug has several mutations, or the name
    of a further mutation. `named` matches the right names, and `run` is a command of `Exam.runs`. `missed`
    is the reason why today's command cannot show it.
    """

    id: str
    title: str
    run: str
    named: str
    file: str
    old: str
    new: str
    threads: tuple[str, ...] = ()
    missed: str = ""

    @property
    def public(self) -> int | None:
        """The number of the public bug that it stands for."""
        found = re.match(r"\d+", self.id)
        return int(found[0]) if found else None


@dataclass(frozen=True)
class Exam:
    """Mutations, the commands that `Mutation.run` names, and the fewest that have to be caught and named."""

    runs: Mapping[str, tuple[str, ...]]
    mutations: tuple[Mutation, ...]
    floor: Mapping[str, int]


@dataclass(frozen=True)
class Mark:
    """How a command fared on one mutation; `found` is what it told."""

    id: str
    caught: bool
    named: bool
    seconds: float
    found: str
    pending: bool = False


@dataclass(frozen=True)
class Ended:
    """How a command ended; `code` is None where it did not in time, `result` its JSON, if any."""

    code: int | None
    seconds: float
    result: Mapping[str, Any] | None
    error: str

    @property
    def unequal(self) -> bool:
        """True for the verdict UNEQUAL, and not for an error with the same exit code."""
        return self.code == 1 and self.result is not None and self.result.get("equal") is False

    @property
    def refused(self) -> bool:
        """True for a command with a flag that does not exist yet."""
        return self.code == 2 and "unknown flag" in self.error

    @property
    def told(self) -> str:
        """The first difference in the order of a step, or else the largest; or the sentence of the error."""
        if self.result is None or not self.unequal:
            return self.error or ("passed" if self.code == 0 else "nothing")
        if not (first := self.result.get("first")):
            return str(self.result["worst_name"])
        within = ", ".join(first.get("parameters", ()))  # that differ in a module whose backward does
        return "step {step} {kind}: {name}".format_map(first) + (f" ({within})" if within else "")


def load_exam() -> Exam:
    """The exam of `mutations.toml`; words in braces of a command stand for its flags of that name.

    `{folder}` is the exam's, which holds the record of a teacher.
    """
    tree = tomllib.loads((FOLDER / "mutations.toml").read_text(encoding="utf-8"))
    flags = {**tree["flags"], "folder": FOLDER}
    runs = {name: tuple(text.format_map(flags).split()) for name, text in tree["runs"].items()}
    mutations = [Mutation(**row | {"threads": tuple(row.get("threads", ()))}) for row in tree["mutation"]]
    return Exam(runs, tuple(mutations), tree["floor"])


def source_of(mutation: Mutation) -> str:
    """Text of the file that it changes. Raises ValueError unless `old` occurs there exactly once."""
    text = (SOURCE / mutation.file).read_text(encoding="utf-8")
    if (count := text.count(mutation.old)) != 1:
        raise ValueError(f"{mutation.id}: its old text occurs {count} times in {mutation.file}, not once")
    return text


def clean(command: Iterable[str]) -> Ended:
    """Run a command on a copy of the package as it is."""
    return _run(command, None)


def sit(mutation: Mutation, command: Iterable[str]) -> Mark:
    """Run a command, which passes on the package as it is, on a copy with the mutation."""
    return judged(mutation, _run(command, mutation))


def judged(mutation: Mutation, ended: Ended) -> Mark:
    """Mark of a command: caught where it said UNEQUAL, or failed with a sentence that names the cause."""
    failed = ended.code not in (0, None)
    named = failed and re.search(mutation.named, ended.told) is not None
    return Mark(mutation.id, named or ended.unequal, named, ended.seconds, ended.told)


def _run(command: Iterable[str], mutation: Mutation | None) -> Ended:
    """Run a command with a copy of the package, mutated if there is a mutation."""
    # Not a TemporaryDirectory: a fork that ends would delete it.
    folder = Path(tempfile.mkdtemp(prefix="exam-"))
    try:
        shutil.copytree(SOURCE, folder / "meshwright")
        if mutation is not None:
            changed = source_of(mutation).replace(mutation.old, mutation.new)
            (folder / "meshwright" / mutation.file).write_text(changed, encoding="utf-8")
        began = time.monotonic()
        words = [*command, "--json"]
        compiles = (mutation is not None and mutation.file.endswith(".cpp")) or "--train.compile" in words
        limit = LIMIT_S + COMPILING_S * compiles
        code, out, error = warm.run(words, folder, limit)
        seconds = time.monotonic() - began
    finally:
        shutil.rmtree(folder)
    last = out.splitlines()[-1] if out.strip() else ""
    result = json.loads(last) if last.startswith("{") else None
    # Lines of a traceback hold names by chance, and explain nothing to a user.
    sentences = [line for line in error.splitlines() if line.startswith("meshwright: error: ")]
    told = sentences[-1] if sentences else "" if code is not None else f"no end in {limit:g} s"
    return Ended(code, seconds, result, told)


def examine(
    exam: Exam, mutations: Iterable[Mutation], tell: Callable[[Mutation, Mark], None]
) -> tuple[list[Mark], int]:
    """Marks of these mutations, and the number of false alarms; `tell` gets each mark as it comes."""
    marks, alarms, unmutated = [], 0, dict[str, Ended]()
    for mutation in mutations:
        command = exam.runs[mutation.run]
        if mutation.run not in unmutated:
            unmutated[mutation.run] = found = clean(command)
            if found.code != 0 and not found.refused:
                alarms += 1
                print(f"FALSE ALARM: meshwright {' '.join(command)}: {found.told}", flush=True)
        before = unmutated[mutation.run]
        if before.refused:
            mark = Mark(mutation.id, False, False, before.seconds, before.told, pending=True)
        else:
            mark = sit(mutation, command)
        marks.append(mark)
        tell(mutation, mark)
    return marks, alarms


def sums(exam: Exam, marks: Iterable[Mark]) -> dict[str, int]:
    """Public bugs and further mutations, and how many of each were caught and named.

    A public bug that has several mutations is caught when all of them are.
    """
    public: dict[int, list[Mark]] = {}
    further = []
    numbers = {mutation.id: mutation.public for mutation in exam.mutations}
    for mark in marks:
        number = numbers[mark.id]
        further.append(mark) if number is None else public.setdefault(number, []).append(mark)
    return {
        "public": len(public),
        "public_caught": sum(all(mark.caught for mark in found) for found in public.values()),
        "public_named": sum(all(mark.named for mark in found) for found in public.values()),
        "further": len(further),
        "further_caught": sum(mark.caught for mark in further),
        "further_named": sum(mark.named for mark in further),
    }


def main() -> int:
    """Sit the exam, and print its table; the exit code is 1 for too few caught, and for a false alarm."""
    parser = argparse.ArgumentParser(description="plant known mistakes, and see what verify says")
    parser.add_argument("--only", default="", help="ids of mutations, separated by commas")
    parser.add_argument("--json", type=Path, help="file for the marks")
    asked = parser.parse_args()
    exam, only = load_exam(), frozenset(asked.only.split(",")) - {""}
    if unknown := only - {mutation.id for mutation in exam.mutations}:
        parser.error(f"--only: no mutation is called {', '.join(sorted(unknown))}")
    began = time.monotonic()
    # Ranks that wait leave their core to those that compute. Read when torch is imported.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    warm.preload()
    print(f"{'id':16s} {'caught':7s} {'named':5s} {'s':>5s}  bug, and what was told", flush=True)
    chosen = [mutation for mutation in exam.mutations if not only or mutation.id in only]
    marks, alarms = examine(exam, chosen, _tell)
    found = sums(exam, marks)
    print(
        f"{found['public_caught']} of {found['public']} public bugs caught, {found['public_named']} named; "
        f"{found['further_caught']} of {found['further']} further mutations caught, "
        f"{found['further_named']} named; {alarms} false alarms; {time.monotonic() - began:.0f} s"
    )
    if asked.json is not None:
        result = found | {"false_alarms": alarms, "marks": [asdict(mark) for mark in marks]}
        asked.json.write_text(json.dumps(result, indent=1), encoding="utf-8")
    below = [key for key, least in exam.floor.items() if not only and found[key] < least]
    for key in below:
        print(f"too few: {key} is {found[key]}, and was {exam.floor[key]}")
    return 1 if below or alarms else 0


def _tell(mutation: Mutation, mark: Mark) -> None:
    caught = "pending" if mark.pending else "yes" if mark.caught else "NO"
    threads = f"{', '.join(mutation.threads)}: " if mutation.threads else ""
    print(
        f"{mark.id:16s} {caught:7s} {'yes' if mark.named else 'no':5s} {mark.seconds:5.1f}  "
        f"{threads}{mutation.title}\n{'':37s}{mark.found[:200]}",
        flush=True,
    )


if __name__ == "__main__":
    sys.exit(main())
