"""Patterns of parameters' names, written apart from `spec/parameter_groups.py`."""

from __future__ import annotations

import re


def matches(pattern: str, name: str) -> bool:
    """True if the whole name is as the pattern, where * stands for any characters, ? for one, [abc] for one
    of these, and [!abc] for another one."""
    wild = {"*": ".*", "?": "."}
    found = [
        part.replace("[!", "[^", 1) if len(part) > 1 else wild.get(part, re.escape(part))
        for part in parts(pattern)
    ]
    return re.fullmatch("".join(found), name) is not None


def parts(pattern: str) -> list[str]:
    """The sets of characters in a pattern, and its other characters."""
    return re.findall(r"\[!?[^]]+\]|.", pattern)
