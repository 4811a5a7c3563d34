"""Who holds the store in which a run's hosts meet: files in the run's folder, which are read when it is lost.

    hosts/store-<n>.json      term n: where the store is, and the host that holds it
    hosts/store-<n>.beat      that host's counter, its heartbeat to hosts that do not reach the store
    hosts/store-<n>.closed    the newest generation, as the store was closed in order

A term's file is a hard link to a whole one, so only one of several hosts can make it. As long as the store is
there, one host alone touches these files, once a second.
"""

from __future__ import annotations

import json
from pathlib import Path

from pydantic.dataclasses import dataclass

from meshwright import atomic
from meshwright.launch.membership import HostWorld, decode, encode
from meshwright.spec.records import Record, read


@dataclass(frozen=True)
class StoreTerm(Record):
    """A term of the store: its `endpoint`, and the name of the host that holds it."""

    endpoint: str
    holder: str


class StoreTerms:
    """The terms of a run's store in `folder`; methods raise `OSError`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def newest(self) -> int:
        """The number of the newest term; -1 if there was none."""
        numbers = [file.stem.removeprefix("store-") for file in self.folder.glob("store-*.json")]
        return max((int(number) for number in numbers if number.isdecimal()), default=-1)

    def term(self, number: int) -> StoreTerm:
        """Return a term that was begun."""
        file = self._file(number, "json")
        return read(StoreTerm, json.loads(file.read_text(encoding="utf-8")), str(file))

    def begin(self, number: int, term: StoreTerm) -> None:
        """Begin a term. Raises `FileExistsError` where another host has."""
        text = json.dumps({"endpoint": term.endpoint, "holder": term.holder})
        atomic.create(self._file(number, "json"), text)

    def has_begun(self, number: int) -> bool:
        """True if a host has begun this term."""
        return self._file(number, "json").exists()

    def beat(self, number: int, count: int) -> None:
        """Give a sign of life of the host that holds the store."""
        atomic.write(self._file(number, "beat"), str(count))

    def last_beat(self, number: int) -> str:
        """The counter of the host that holds the store."""
        try:
            return self._file(number, "beat").read_text(encoding="utf-8")
        except FileNotFoundError:
            return ""

    def close(self, number: int, world: HostWorld | None) -> None:
        """Say that the store is closed, after the generation `world`."""
        atomic.write(self._file(number, "closed"), "" if world is None else encode(world))

    def is_closed(self, number: int) -> bool:
        """True if the store of a term was closed in order."""
        return self._file(number, "closed").exists()

    def last_world(self, number: int) -> HostWorld | None:
        """The newest generation of a store that was closed in order."""
        file = self._file(number, "closed")
        text = file.read_text(encoding="utf-8")
        return decode(HostWorld, text, str(file)) if text else None

    def _file(self, number: int, suffix: str) -> Path:
        return self.folder / f"store-{number}.{suffix}"
