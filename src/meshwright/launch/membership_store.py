"""Hosts that meet in a store on one of them, which takes work of each that does not grow with their number.

The first store is on the host that `--rendezvous` names. Where it is lost, the hosts find in the run's folder
whether the one that holds it lives (`store_terms.py`); if not, one of them holds the next, which the others
tell what they know: so the loss of that host costs no more than that of another. Ranks run on meanwhile.
"""

from __future__ import annotations

import json
from pathlib import Path

from meshwright.comm.store_client import StoreClient, StoreLostError
from meshwright.launch.membership import LOST_S, Host, HostWorld, Membership, decode, encode
from meshwright.launch.store_holder import GENERATION, HOST, VERSION, VIEW, StoreHolder
from meshwright.launch.store_terms import StoreTerms
from meshwright.rank.host_rendezvous import address_here, parse_rendezvous

CONNECT_S, ANSWER_S = 1.0, 3.0
"""Longest waits for a connection and for an answer: ranks are not looked at meanwhile."""
RETRY_S, UNREACHED_S = 0.5, 3.0
"""Time between looks for the store in the folder, and after a connection that did not come about."""


class StoreMembership(Membership):
    """A store's words of one run's hosts, as the host `name` at `address` sees them.

    `rendezvous` is HOST:PORT; `folder` is common to all hosts, which share `secret`.
    """

    def __init__(self, folder: Path, name: str, address: str, rendezvous: str, secret: bytes) -> None:
        super().__init__(folder, name)
        self.place = f"the store at {rendezvous}"
        self._address, self._secret = address, secret
        self._rendezvous = parse_rendezvous(rendezvous)
        self._terms = StoreTerms(folder)
        self._term = -1
        """The newest term whose store this host has reached."""
        self._holder: StoreHolder | None = None
        self._client: StoreClient | None = None
        self._word: bytes | None = None
        """The last word on this host."""
        self._runs = False
        self._seen = self._version = b""
        """The version that the store has told, and the one whose view was read."""
        self._read: dict[str, tuple[bytes, Host]] = {}
        self._retry_at = float("-inf")
        self._lost = StoreLostError(f"{self.place}: nobody has begun it")
        self._beat = -1, "", 0.0
        """A term of a lost store, the last sign of life of its host, and since when there was none."""

    def write(self, host: Host) -> None:
        """Replace what is said of this host, at once or when the store is there again."""
        self._word, self._runs = encode(host).encode(), host.state == "running"
        if self._client is not None:
            try:
                self._say(self._client, self._word)
            except StoreLostError as error:
                self._hang_up(error)

    def remove(self, name: str) -> None:
        """Remove what is said of a host that leaves, or is lost."""
        if name == self.name:
            self._word = None
        if self._client is not None:
            try:
                self._client.delete(HOST + name)
            except StoreLostError as error:
                self._hang_up(error)

    def propose(self, world: HostWorld) -> None:
        """Make `world` the newest generation, unless another host has proposed that number before."""
        if self._client is None or (self._holder is not None and self._holder.is_replaced()):
            raise self._lost
        try:
            self._make(self._client, world)
        except StoreLostError as error:
            self._hang_up(error)
            raise

    def look(self, now: float) -> None:
        """Read what has changed since the last look; `now` is this process's clock.

        While its ranks run, a host that does not lead is content with what its last sign of life has told.
        """
        if self._client is None:
            self._join(now)
        if self._client is None:  # the store was closed at the end of the run
            return
        try:
            if self.leads or not self._runs:
                (self._seen,) = self._client.peek([VERSION])
            if self._seen != self._version:
                self._see(self._client)
                self._version = self._seen
            self.hosts = self._words(self._client) if self.leads else {}
        except StoreLostError as error:
            self._hang_up(error)
            raise

    def close(self) -> None:
        """Hang up, and close the store if this host holds it."""
        if self._holder is not None:
            self._holder.close(self.world)
            self._holder = None
        if self._client is not None:
            self._client.close()
            self._client = None

    # What the store says ----------------------------------------------------------------------------

    def _see(self, client: StoreClient) -> None:
        """Read who lives, and generations that are new here."""
        (text,) = client.peek([VIEW])
        view = json.loads(text)
        newest = int(view["newest"])
        first = self.world.number + 1 if self.world is not None else newest
        numbers = range(max(first, 0), newest + 1)
        for number, found in zip(numbers, client.peek([f"{GENERATION}{n}" for n in numbers]), strict=True):
            if found:
                self._follow(decode(HostWorld, found, f"{GENERATION}{number}"))
            else:  # of a store before this one: it may have been without this host
                self.missed = number
        self.here = tuple(view["here"])

    def _words(self, client: StoreClient) -> dict[str, Host]:
        """The words of the living hosts on themselves."""
        words = zip(self.here, client.peek([HOST + name for name in self.here]), strict=True)
        before, self._read = self._read, {}
        for name, word in words:
            if word:  # it has not just left
                known = before.get(name)
                if known is None or known[0] != word:
                    known = word, decode(Host, word, HOST + name)
                self._read[name] = known
        return {name: host for name, (_, host) in self._read.items()}

    def _say(self, client: StoreClient, word: bytes) -> None:
        """Say something of this host, and hear whether anything has changed."""
        (self._seen,) = client.set_and_peek(HOST + self.name, word, [VERSION])

    def _make(self, client: StoreClient, world: HostWorld) -> None:
        """Make a generation, and follow the one of its number that is there."""
        key = f"{GENERATION}{world.number}"
        made = decode(HostWorld, client.create(key, encode(world).encode()), key)
        if self.world is None or (made != self.world and made.number >= self.world.number):
            self._follow(made)

    # Finding the store ------------------------------------------------------------------------------

    def _hang_up(self, error: StoreLostError) -> None:
        self._lost = error
        if self._client is not None:
            self._client.close()
            self._client = None

    def _join(self, now: float) -> None:
        """Connect to the store of the newest term, or hold the next one. Raises `OSError` if that fails."""
        if now < self._retry_at:
            raise self._lost
        self._retry_at = now + RETRY_S
        newest = self._terms.newest()
        closed = newest >= 0 and self._terms.is_closed(newest)
        if closed and newest == self._term and self._ended_with(self._terms.last_world(newest)):
            return
        moves, gone = self._holder_lives(newest, now) if newest >= 0 and not closed else (False, True)
        if newest >= 0 and not closed and (moves or gone):
            try:
                self._connect(self._terms.term(newest).endpoint, newest)
                return
            except StoreLostError as error:
                self._lost, self._retry_at = error, now + UNREACHED_S
        if not gone or (at := self._may_listen_at()) is None:
            raise self._lost
        self._hold(newest + 1, at)

    def _ended_with(self, last: HostWorld | None) -> bool:
        """Follow the last generation of a store that was closed; True if it is an end that is news here."""
        if last is None or (self.world is not None and last.number <= self.world.number):
            return False
        self._follow(last)
        return last.end is not None

    def _may_listen_at(self) -> tuple[str, int] | None:
        """The address and port at which this host may hold the next store; None where that is for others.

        Hosts that were in a store of this run may hold one at any port. The first is held where it is
        expected; a host may learn late that this is its own name.
        """
        if self._term >= 0:
            return self._address, 0
        host, port = self._rendezvous
        here = address_here(host, self._address)
        return None if here is None else (here, port)

    def _holder_lives(self, number: int, now: float) -> tuple[bool, bool]:
        """Two flags: the store's holder has just given a sign of life, and it has given none for `LOST_S`."""
        beat = self._terms.last_beat(number)
        moves = self._beat[:2] != (number, beat)
        if moves:
            self._beat = number, beat, now
        return moves, now - self._beat[2] >= LOST_S

    def _hold(self, number: int, at: tuple[str, int]) -> None:
        if self._holder is not None:  # another host has had a newer term
            self._holder.close(self.world)
            self._holder = None
        world = self.world
        if world is None and number and self._terms.is_closed(number - 1):  # of an earlier run
            world = self._terms.last_world(number - 1)
        try:
            self._holder = StoreHolder(self._terms, number, self.name, at, self._secret, world)
        except FileExistsError:
            self._retry_at = float("-inf")  # its store is there
            raise self._lost from None
        except OSError as error:
            self._lost = StoreLostError(f"{at[0]}:{at[1]} cannot be listened at: {error.strerror}")
            raise self._lost from error
        self._connect(self._holder.endpoint, number)

    def _connect(self, endpoint: str, number: int) -> None:
        """Connect to a store, and tell it what this host knows."""
        client = StoreClient(endpoint, self._secret, CONNECT_S, ANSWER_S)
        try:
            if self.world is not None:
                self._make(client, self.world)
            if self._word is not None:
                self._say(client, self._word)
        except StoreLostError:
            client.close()
            raise
        self.here, self._version, self._term = (), b"", number
        self.place, self._client = f"the store at {endpoint}", client
