"""The files of the log that islands append to; `outer_log.py` says what they are for.

    islands/entry-<n>.json       entry n: an exchange, an island that joins, or one that leaves
    islands/arrival-<k>.json     island k waits with what it moved by, which all members have
    islands/secret               what mailboxes ask of everybody, for this user's processes alone

An entry is a hard link to a whole file, which only one of several islands can make, and never changes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, field
from pathlib import Path
from typing import Any, Literal

from pydantic.dataclasses import dataclass

from meshwright import atomic
from meshwright.comm.authentication import shared_secret
from meshwright.spec import UserError
from meshwright.spec.files import parse_json
from meshwright.spec.records import Integer, Record, read

OUTER_STEP = ("lr", "momentum", "nesterov", "staleness_lr")
"""Keys of `outer` by which anchors follow from the log, so that all islands need equal ones."""


def island_folder(out: Path, island: int) -> Path:
    """Return the folder of one island of the run in folder `out`: a run's folder in itself."""
    return out / f"island.{island}"


@dataclass(frozen=True)
class Entry(Record):
    """An entry of the log: `island` joins or leaves, or `contributions` are exchanged.

    `addresses` are the mailboxes of the ranks of an island that joins; `restored` is true where its state is
    the run's, and `outer_step` has its keys of `OUTER_STEP`. A contribution is (island, base, tokens, number
    of its arrival). `reason` says why an island leaves, "done" or "lost"; `at` is a time in seconds since
    1970. `anchors` is the checksum of the state that an exchange starts from, of whoever appends it.
    """

    kind: Literal["join", "leave", "exchange"]
    island: int = -1
    addresses: tuple[tuple[str, int, str], ...] = ()
    restored: bool = False
    outer_step: dict[str, Any] = field(default_factory=dict)
    reason: str = ""
    contributions: tuple[tuple[int, int, int, int], ...] = ()
    at: float = 0.0
    anchors: str = ""


@dataclass(frozen=True)
class Arrival(Record):
    """Island `island` waits, for the `number`-th time since it joined at entry `joined`, with what it moved
    by, which `members` have. After `followed` entries its anchors have the checksum `anchors`."""

    island: Integer
    number: Integer
    joined: Integer
    base: Integer
    tokens: Integer
    members: tuple[Integer, ...]
    followed: int = -1
    anchors: str = ""


class IslandLog:
    """The files of the log in `folder`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def read(self, number: int) -> Entry | None:
        """Entry `number`, from 0; None while it is not there."""
        return self._read(Entry, f"entry-{number:08d}.json")

    def append(self, number: int, entry: Entry) -> bool:
        """Make `entry` the entry `number`; False if another one is."""
        self.folder.mkdir(parents=True, exist_ok=True)
        try:
            atomic.create(self.folder / f"entry-{number:08d}.json", json.dumps(asdict(entry)))
        except FileExistsError:
            return False
        return True

    def entries(self) -> Iterator[Entry]:
        """All entries, in order."""
        number = 0
        while (entry := self.read(number)) is not None:
            yield entry
            number += 1

    def arrive(self, arrival: Arrival) -> None:
        """Tell the others of an arrival, in place of this island's last one."""
        atomic.write(self.folder / f"arrival-{arrival.island}.json", json.dumps(asdict(arrival)))

    def arrival(self, island: int) -> Arrival | None:
        """The last arrival of an island."""
        return self._read(Arrival, f"arrival-{island}.json")

    def secret(self) -> bytes:
        """The secret of the islands' mailboxes."""
        self.folder.mkdir(parents=True, exist_ok=True)
        return shared_secret(self.folder / "secret")

    def _read(self, kind: type[Any], name: str) -> Any:
        path = self.folder / name
        with suppress(FileNotFoundError):
            return read(kind, parse_json(path.read_text(encoding="utf-8")), str(path))
        return None


def check_same_step(own: Mapping[str, Any], members: Mapping[int, Entry]) -> None:
    """Refuse an outer step that is not the members', whose anchors would be others."""
    for island, entry in members.items():
        for key, value in own.items():
            if (theirs := entry.outer_step.get(key, value)) != value:
                raise UserError(
                    f"outer.{key}: {value!r}, and island {island}, which trains already, has {theirs!r}; all "
                    f"islands of a run take the same outer step: give {theirs!r}, or another --out"
                )
