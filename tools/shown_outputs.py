"""Shown outputs: blocks of the documents that show a command and lines of what it printed.

Such a block is fenced as `console`: a line `$ command`, then lines of its output, with `...` where lines are
left out. tests/test_shown_outputs.py runs the commands and holds the blocks to what they print.

Run as `python tools/shown_outputs.py DOCUMENT...` from the repository's root to run the commands of the
documents, in order, and to put the new lines in the place of the shown ones.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import groupby
from pathlib import Path

CUT = "..."
NUMBER = r"\d[\d,.:]*( (m?s|[KMG]iB)\b)?"
# What differs between machines in the output of a command, by its first word after `meshwright`. All else is
# compared as it is.
VARIES = {
    "train": rf"{NUMBER}|\b[0-9a-f]{{64}}\b",
    "chaos": NUMBER,
    "checkpoint": NUMBER,
    "verify": r" (0|\d[\d.]*e-\d+)\b.*",  # a difference, and the name of the tensor that has it
    "plan": r"searched in [\d.]+ s",
}
NOTHING = r"(?!)"
BLOCK = re.compile(r"^```console\n\$ (.*?)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Shown:
    """A block of a document: the command, and the lines that are shown of its output."""

    command: str
    lines: list[str]

    @property
    def verb(self) -> str:
        """The first word after `meshwright`, or the target of `make`."""
        return shlex.split(self.command)[1]


def shown(text: str) -> list[Shown]:
    """Return the blocks of a document."""
    return [Shown(command, lines.splitlines()) for command, lines in BLOCK.findall(text)]


def form(verb: str, line: str) -> str:
    """Return a line without what differs between machines, and with one space for many."""
    return re.sub(r"\s+", " ", re.sub(VARIES.get(verb, NOTHING), "#", line)).rstrip()


def present(block: Shown, output: str) -> list[str]:
    """Return the block's lines as `output` has them now, with the same cuts.

    Raises:
        LookupError: lines that are shown one after the other are not printed so, by their forms.
    """
    lines = [line.rstrip() for line in output.splitlines()]
    forms = [form(block.verb, line) for line in lines]
    groups = [(cut, list(group)) for cut, group in groupby(block.lines, lambda line: line == CUT)]
    found, at = [], 0
    for place, (cut, group) in enumerate(groups):
        wanted = [form(block.verb, line) for line in group]
        starts = [start for start in range(at, len(forms)) if forms[start : start + len(wanted)] == wanted]
        if place == 0:
            starts = [start for start in starts if start == 0]
        if place == len(groups) - 1:
            starts = [start for start in starts if start + len(wanted) == len(forms)]
        if not cut and not starts:
            raise LookupError(f"$ {block.command}\ndoes not print:\n{chr(10).join(group)}\nbut:\n{output}")
        at = at if cut else starts[0] + len(wanted)
        found += [CUT] if cut else lines[starts[0] : at]
    return found


def updated(text: str, printed: Callable[[str], str]) -> str:
    """Return a document with the lines that its commands print now."""
    for block in shown(text):
        lines = present(block, printed(block.command))
        before, after = ("\n".join([f"$ {block.command}", *each, "```"]) for each in (block.lines, lines))
        text = text.replace(before, after)
    return text


@cache
def printed(command: str) -> str:
    """Return the output of a command of this tree."""
    words = shlex.split(command)
    words = [sys.executable, "-m", *words] if words[0] == "meshwright" else [words[0], "-s", *words[1:]]
    return subprocess.run(words, stdout=subprocess.PIPE, text=True, check=True).stdout


def main() -> int:
    """Run the commands of the documents that are named, and write what they print."""
    for document in map(Path, sys.argv[1:]):
        document.write_text(updated(document.read_text(encoding="utf-8"), printed), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
