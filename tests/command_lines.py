"""Command lines that documents and examples show, parsed as the program parses them."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from meshwright.cli.main import find
from meshwright.cli.overview import SHORT, SUMMARIES
from meshwright.cli.parser import Call, Verb, parse


def parsed(words: Sequence[str]) -> tuple[Verb, Call]:
    """The verb of a command line, the words after `meshwright`, and its words sorted."""
    words = [*SHORT.get(words[0], words[:1]), *words[1:]]
    for name in map(str.split, SUMMARIES):
        if list(words[: len(name)]) == name:
            verb = find(*name)
            return verb, parse(verb, words[len(name) :])
    raise AssertionError(f"no verb in: meshwright {shlex.join(words)}")
