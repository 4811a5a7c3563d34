"""Findings: what is wrong, on which ranks, and what mends it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from meshwright.spec import UserError

MOST_NAMED = 4
"""Ranks that a finding names one by one."""


@dataclass(frozen=True)
class Finding:
    """Something that a check has found.

    `fails` is True where a run would fail of it, else it would be slow, or at risk. `ranks` are those that it
    is of; none stands for the rank that has found it.
    """

    check: str
    fails: bool
    sentence: str
    remedy: str
    ranks: tuple[int, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)

    @classmethod
    def of_error(cls, check: str, error: UserError) -> Finding:
        """The finding of an error that a run would have; what follows the last semicolon is its remedy."""
        sentence, _, remedy = str(error).rpartition("; ")
        return cls(check, True, sentence or remedy, remedy if sentence else "mend it, and ask again")


def first_line(error: Exception) -> str:
    """The first line of an error's text, whose others are of places in the code of gloo and NCCL."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def merged(rows: Sequence[Iterable[Finding]]) -> list[Finding]:
    """The findings of all ranks in order, `rows[r]` those of rank r: equal ones are one, of several ranks.

    Those of which a run would fail come first.
    """
    found: dict[Finding, list[int]] = {}
    for rank, row in enumerate(rows):
        for each in row:
            found.setdefault(replace(each, ranks=()), []).extend(each.ranks or (rank,))
    listed = [replace(each, ranks=tuple(sorted(set(ranks)))) for each, ranks in found.items()]
    return sorted(listed, key=lambda each: not each.fails)


def of_ranks(ranks: Sequence[int], names: Sequence[str]) -> str:
    """Ranks in words, with their hosts, `names[r]` that of rank r; "" for a process alone."""
    if len(names) == 1:
        return ""
    hosts = list(dict.fromkeys(names[rank] for rank in ranks))
    if len(ranks) == len(names):
        return f"all {len(ranks)} ranks"
    if len(ranks) <= MOST_NAMED:
        return ", ".join(f"rank {rank} on {names[rank]}" for rank in ranks)
    more = f" and {len(hosts) - MOST_NAMED} more hosts" if len(hosts) > MOST_NAMED else ""
    return f"{len(ranks)} ranks on {', '.join(hosts[:MOST_NAMED])}{more}"
