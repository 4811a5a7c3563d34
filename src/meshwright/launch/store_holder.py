"""The host that holds the store in which a run's hosts meet: the server, and who of them lives.

    host/<name>          what a supervisor says of its host
    generation/<n>       start n of the ranks
    view, version        the hosts that live and the newest generation, and how often that has changed

Each host tells this store once a second that it lives, and hears the version; while its ranks do not run, it
asks for that four times a second. So the work of the store grows with the number of hosts, and that of the
others not at all.
"""

from __future__ import annotations

import json
import threading
import time
from contextlib import suppress

from meshwright.comm.store_server import StoreServer, Table
from meshwright.launch.membership import LOST_S, HostWorld, decode, encode
from meshwright.launch.store_terms import StoreTerm, StoreTerms

TICK_S = 0.25
"""Time between looks at the hosts."""
BEAT_S = 1.0
"""Time between signs of life in the folder."""
LINGER_S = LOST_S
"""At the end of a run the store is kept so long for hosts that have not seen it yet."""
HOST, GENERATION, VIEW, VERSION = "host/", "generation/", "view", "version"


class HostCensus:
    """Says in a store's table which hosts live: those whose words have changed for less than `LOST_S`.

    A store that takes the place of another has heard of no host yet, so it says nothing before all hosts of
    the newest generation, but for `lost`, which had the store before, have come, or could have.
    """

    def __init__(self, now: float, lost: str | None = None) -> None:
        self._began = self._looked_at = now
        self._lost = lost
        self._moved: dict[str, tuple[bytes, float]] = {}
        self._told = b""
        self._version = 0

    def look(self, table: Table, now: float) -> None:
        """Look at the hosts, and tell what has changed; a time in which this process slept does not count."""
        slept = now - self._looked_at if now - self._looked_at > LOST_S / 2 else 0.0
        self._looked_at = now
        for name, (word, since) in self._moved.items():
            self._moved[name] = word, since + slept
        words = _below(table, HOST)
        for name, word in words.items():
            if self._moved.get(name, (b"", 0.0))[0] != word:
                self._moved[name] = word, now
        newest = max(map(int, _below(table, GENERATION)), default=-1)
        if now < self._began + LOST_S and newest >= 0:
            key = f"{GENERATION}{newest}"
            members = decode(HostWorld, table.values[key.encode()], key).hosts
            if set(members) - {self._lost} - words.keys():
                return
        here = sorted(name for name in words if now - self._moved[name][1] < LOST_S)
        told = json.dumps({"here": here, "newest": newest}).encode()
        if told != self._told:
            self._told, self._version = told, self._version + 1
            table.values[VIEW.encode()] = told
            table.values[VERSION.encode()] = str(self._version).encode()


def _below(table: Table, prefix: str) -> dict[str, bytes]:
    """The values of the keys with a prefix, by the rest of their keys."""
    start = prefix.encode()
    return {key[len(start) :].decode(): value for key, value in table.values.items() if key.startswith(start)}


class StoreHolder:
    """The store of term `number`, held by host `name` at an address of its own until another has a newer one.

    `world` is the newest generation that the host knows. Raises `FileExistsError` where another host has
    begun this term, and `OSError` for a port that is taken.
    """

    def __init__(
        self,
        terms: StoreTerms,
        number: int,
        name: str,
        at: tuple[str, int],
        secret: bytes,
        world: HostWorld | None,
    ) -> None:
        self.terms, self.number = terms, number
        self._server = StoreServer(at[0], secret, at[1])
        self._beats = 0
        self._beat_at = 0.0
        self._over = threading.Event()
        try:
            before = terms.term(number - 1).holder if number else None
            self._census = HostCensus(time.monotonic(), before)
            if world is not None:
                key = f"{GENERATION}{world.number}".encode()
                self._server.use(lambda table: table.compare_set(key, b"", encode(world).encode()))
            terms.begin(number, StoreTerm(self._server.endpoint, name))
        except BaseException:
            self._server.close()
            raise
        self._thread = threading.Thread(target=self._watch, name="store holder", daemon=True)
        self._thread.start()

    @property
    def endpoint(self) -> str:
        """Where hosts reach the store."""
        return self._server.endpoint

    def is_replaced(self) -> bool:
        """True once another host has a newer term."""
        return self.terms.has_begun(self.number + 1)

    def close(self, world: HostWorld | None) -> None:
        """Close the store, where `world` ends the run once the others have seen it, or after `LINGER_S`."""
        until = time.monotonic() + LINGER_S
        while world is not None and world.end is not None and time.monotonic() < until:
            if not self._server.use(lambda table: _below(table, HOST)):
                break
            time.sleep(0.02)
        self._over.set()
        self._thread.join()
        with suppress(OSError):  # hosts that need the store see that the counter does not move
            self.terms.close(self.number, world)
        self._server.close()

    def _watch(self) -> None:
        while not self._over.wait(TICK_S):
            if not self._tick(time.monotonic()):
                self._server.close()
                return

    def _tick(self, now: float) -> bool:
        """Look at the hosts, and give a sign of life; False once another host has the store."""
        with suppress(OSError):  # who reaches the store does not need the folder
            if self.is_replaced():
                return False
            if now >= self._beat_at + BEAT_S:
                self._beats += 1
                self.terms.beat(self.number, self._beats)
                self._beat_at = now
        self._server.use(lambda table: self._census.look(table, now))
        return True
