"""The order of exchanges by quorum, and who takes part: a log in the run's folder that islands append to.

An island appends entry n (`island_log.py`) only if it has followed all before it: so what it moved by has
been sent to all members of that time, and none of them needs a word of it once the island is lost. Nobody
leads: whoever of those that wait sees a quorum, and the time of grace over, appends the exchange.

Entries of exchanges and arrivals carry a checksum of the anchors and the outer momentum, which are equal on
all islands to the bit. An island that has others than most starts again, and takes theirs; where no majority
is at hand, all that differ do.

An island that joins gets the anchors and the momentum from the first member, and follows from there. Where no
member is left its own are the run's, and the anchors go on from its checkpoint.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from meshwright.comm.checksum import checksum_of
from meshwright.comm.control import Control
from meshwright.comm.mailbox import Address, LostPeerError, Mailbox, Peer
from meshwright.islands.island_log import OUTER_STEP, Arrival, Entry, IslandLog, check_same_step
from meshwright.islands.outer_quorum import Contribution, MergedExchange, QuorumOuter
from meshwright.spec.outer import OuterSpec

Tell = Callable[[str, dict[str, Any]], None]
POLL_S = 0.02
"""Time between two looks at the folder."""
ASK_S = 1.0
"""Time between two questions whether the members that are waited for are there."""
START_S = 120.0
"""Longest time that a new run waits for its other islands to join."""
TURN_S = 20.0
"""Longest time that the other ranks of an island wait for a word of rank 0."""


class _Member:
    """An island that takes part since entry `joined`; `done` exchanges, of `arrivals` arrivals."""

    def __init__(self, address: Address, secret: bytes, joined: int, done: int) -> None:
        self.joined, self.done, self.arrivals, self.lost = joined, done, 0, False
        self._address, self._secret = address, secret

    @cached_property
    def peer(self) -> Peer:
        """The mailbox of this rank's counterpart. Raises `LostPeerError`."""
        return Peer(self._address, self._secret)


class LoggedArrivals:
    """The order in which islands really come; one object on each rank of an island.

    Rank 0 of the island reads and writes the log, and tells the others over `control` what to do next; `host`
    is where the ranks of other islands reach this one. `tell` is called with the kind and the fields of what
    becomes of members.
    """

    def __init__(
        self, log: IslandLog, island: int, outer: OuterSpec, control: Control, host: str, tell: Tell
    ) -> None:
        self.log, self.island, self.outer = log, island, outer
        self._control, self._tell, self._heartbeat = control, tell, control.heartbeat
        self._secret = log.secret()
        self.mailbox = Mailbox(host, self._secret)
        self._next = 0
        """Number of the first entry that this island has not followed."""
        self._members: dict[int, _Member] = {}
        self._joining: dict[int, int] = {}
        """Members that may wait for their state -> the one that sends it."""
        self._arrivals = 0
        self._waits: Arrival | None = None
        """This island's arrival, as the others can read it."""
        self._quorum_at: float | None = None
        self._asked = 0.0
        self._outer: QuorumOuter | None = None
        self._anchors = ""
        """Checksum of the anchors and the outer momentum of all ranks, on rank 0."""

    # Joining and leaving ------------------------------------------------------------------------------

    def join(self, outer: QuorumOuter, step: int, islands: int, restore: Callable[[], None]) -> None:
        """Take part from now on, after optimiser step `step`.

        `outer` gets the members' state; where none is left `restore` gives it the newest that was saved. A
        run that has not exchanged yet waits a while until all its `islands` are there.
        """
        own = [Address(*row) for row in self._control.gather(list(self.mailbox.address))]
        first = self._control.rank == 0
        number, alone = self._control.on_first(lambda: self._append_join(own))
        for _ in range(number + 1):
            self._note(self._entry())
        if alone:
            restore()
        else:
            sender = self._control.broadcast(self._wait_for_state(number) if first else None)
            self._receive(outer, f"state/{number}/{sender}")
        self._outer = outer
        outer.take_anchors(step)
        limit = time.monotonic() + START_S
        while outer.merged == 0 and len(self._members) < islands:
            entry = self.log.read(self._next)
            begun = entry is not None and entry.kind == "exchange"
            over, follow = self._control.broadcast([begun or time.monotonic() > limit, entry is not None])
            if over:
                break
            if follow:
                self._note(self._entry())
            time.sleep(POLL_S)

    def _append_join(self, addresses: Sequence[Address]) -> tuple[int, bool]:
        """Append that this island joins; returns the number of the entry, and whether no other is left.

        Raises `UserError` where members take another outer step.
        """
        step = {key: getattr(self.outer, key) for key in OUTER_STEP}
        while True:
            members, number = dict[int, Entry](), 0
            for entry in self.log.entries():
                number += 1
                if entry.kind == "join":
                    members[entry.island] = entry
                elif entry.kind == "leave":
                    members.pop(entry.island, None)
            lost = [island for island, entry in members.items() if not self._lives(island, entry)]
            if not lost:
                check_same_step(step, members)
            own = Entry("join", self.island, tuple(addresses), not members, step, at=time.time())
            entry = Entry("leave", lost[0], reason="lost", at=time.time()) if lost else own
            if self.log.append(number, entry) and entry is own:
                return number, not members

    def _lives(self, island: int, entry: Entry) -> bool:
        if island == self.island:  # this one, before it was started again
            return False
        try:
            for address in entry.addresses:
                Peer(Address(*address), self._secret)
        except LostPeerError:
            return False
        return True

    def _wait_for_state(self, number: int) -> int:
        """Return the member whose message of the state has come."""
        while True:
            for sender in self._members:
                if sender != self.island and self.mailbox.has(f"state/{number}/{sender}"):
                    return sender
            if not any(self._is_there(member) for member in self._members if member != self.island):
                raise RuntimeError("the islands that this one joins are lost; it is started again")
            time.sleep(POLL_S)

    def _receive(self, outer: QuorumOuter, name: str) -> None:
        limit = time.monotonic() + TURN_S
        while not self.mailbox.has(name):
            if time.monotonic() > limit:
                raise RuntimeError("the island that gives this one its state is lost; this one starts again")
            time.sleep(POLL_S)
        state = outer.agreed_tensors()
        numbers = torch.zeros(2, dtype=torch.int64)
        *found, counts = self.mailbox.take(name, [*state, numbers])
        for tensor, value in zip(state, found, strict=True):
            tensor.copy_(value)
        upto, outer.merged = counts.tolist()
        while self._next < upto:
            entry = self._entry()
            for island, _, _, arrival in entry.contributions:
                self.mailbox.drop(self._name(island, arrival))
            self._note(entry)

    def leave(self, reason: str) -> None:
        """Take part no longer."""
        if self._control.rank == 0:
            number, entry = self._next, Entry("leave", self.island, reason=reason, at=time.time())
            while not self.log.append(number, entry):
                number += 1

    # Exchanges ----------------------------------------------------------------------------------------

    def comes(self, step: int, last: bool) -> bool:
        """True after each period, and after the last step."""
        return last or step % self.outer.every == 0

    def exchanges(self, step: int, own: Contribution, moved: list[Tensor]) -> Iterator[MergedExchange]:
        """The exchanges up to that with `own`, and as many as it takes until this island may go on."""
        self._arrivals += 1
        self._quorum_at, self._waits = None, None
        self._heartbeat.phase("start")  # the watch for hangs sets no limit to this phase
        self._sum_anchors()
        sent: set[int] = set()
        while True:
            command = self._control.broadcast(self._command(own, sent) if self._control.rank == 0 else None)
            if command is None:
                return
            if command == "wait":
                continue
            if command == "follow":
                entry = self._entry()
                if entry.kind == "exchange":
                    yield self._merged(entry, moved)
                    self._sum_anchors()
                self._note(entry)
                continue
            if isinstance(command, str):
                raise RuntimeError(command)
            sent.update(command)
            lost = [island for island in command if not self._sends(island, self._name(self.island), moved)]
            for island in {island for listed in self._control.gather(lost) for island in listed}:
                self._members[island].lost = True

    def _command(self, own: Contribution, sent: set[int]) -> list[int] | str | None:
        """The next thing to do: members to send to, "follow" the next entry, "wait", or None to go on.

        Any other text says why this island starts again.
        """
        waits, limit = self._members[self.island].arrivals < self._arrivals, time.monotonic() + TURN_S
        while time.monotonic() < limit:
            if (entry := self.log.read(self._next)) is not None:
                other = entry.kind == "exchange" and entry.anchors not in ("", self._anchors)
                return self._differs([row[0] for row in entry.contributions]) if other else "follow"
            others = [island for island in self._members if island != self.island]
            lost = next((island for island in others if self._members[island].lost), None)
            if lost is not None:
                self.log.append(self._next, Entry("leave", lost, reason="lost", at=time.time()))
                continue
            if not waits and self._may_go_on():
                return None
            if waits and (missing := [island for island in others if island not in sent]):
                return missing
            if waits and (differing := self._outvoted(own)):
                return self._differs(differing)
            if waits and (ready := self._enough(own)):
                listed = tuple((each.island, each.base, each.tokens, each.number) for each in ready)
                exchange = Entry("exchange", contributions=listed, at=time.time(), anchors=self._anchors)
                self.log.append(self._next, exchange)
                continue
            if time.monotonic() - self._asked > ASK_S:
                self._asked = time.monotonic()
                for island in others:
                    self._members[island].lost |= not self._is_there(island)
                continue
            time.sleep(POLL_S)
        return "wait"

    def _enough(self, own: Contribution) -> list[Arrival]:
        """The islands of the exchange that is due: all members, or the quorum after the time of grace."""
        ready, now = self._ready(own), time.monotonic()
        assert self.outer.quorum is not None
        if len(ready) == len(self._members):
            return ready
        if len(ready) < min(self.outer.quorum, len(self._members)):
            return []
        if self._quorum_at is None:
            self._quorum_at = now
        return ready if now - self._quorum_at >= self.outer.grace_seconds else []

    def _ready(self, own: Contribution) -> list[Arrival]:
        """Arrivals of members that wait, and whose part all members have; this island is one of them."""
        members, mine = set(self._members), self._own_arrival(own)
        found = [each for each in self._others_arrivals() if members <= set(each.members)]
        same = [each for each in found if each.followed != mine.followed or each.anchors == mine.anchors]
        return sorted([mine, *same], key=lambda arrival: arrival.island)

    def _own_arrival(self, own: Contribution) -> Arrival:
        """This island's arrival, which the others can read."""
        members, at = tuple(sorted(self._members)), self._members[self.island].joined
        numbers = self._arrivals, at, own.base, own.tokens
        mine = Arrival(self.island, *numbers, members, self._next, self._anchors)
        if mine != self._waits:
            self.log.arrive(mine)
            self._waits = mine
        return mine

    def _others_arrivals(self) -> list[Arrival]:
        """Arrivals of the other members that wait."""
        found = []
        for island, member in self._members.items():
            arrival = None if island == self.island else self.log.arrival(island)
            if arrival is not None and arrival.joined == member.joined and arrival.number > member.arrivals:
                found.append(arrival)
        return found

    def _outvoted(self, own: Contribution) -> list[int]:
        """Islands that wait with other anchors after the same entries, where they cannot be outvoted."""
        mine = self._own_arrival(own)
        alike = [each for each in self._others_arrivals() if each.followed == mine.followed]
        others = [each.island for each in alike if each.anchors != mine.anchors]
        rest = len(self._members) - len(others)  # those that agree, or have not come yet
        tie = len(others) == rest and len(alike) + 1 == len(self._members)
        return others if len(others) > rest or tie else []

    def _differs(self, islands: Sequence[int]) -> str:
        """Tell that the anchors of this island are not those of others; returns why it starts again."""
        others = " and ".join(map(str, islands))
        sentence = (
            f"the anchors of island {self.island} are not those of island {others}, which must be equal to "
            f"the bit: memory or arithmetic of a machine is at fault; it starts again, and takes theirs"
        )
        self._tell("divergence", {"island": self.island, "islands": [*islands], "message": sentence})
        return sentence

    def _sum_anchors(self) -> None:
        assert self._outer is not None
        sums = self._control.gather(f"{checksum_of(self._outer.agreed_tensors()):016x}")
        self._anchors = hashlib.sha256(" ".join(sums).encode()).hexdigest()[:16] if sums else ""

    def _may_go_on(self) -> bool:
        """False while this island is too far ahead of the slowest one."""
        most, done = self.outer.max_staleness, {k: member.done for k, member in self._members.items()}
        return most is None or done[self.island] - min(done.values()) <= most

    def _merged(self, entry: Entry, moved: list[Tensor]) -> MergedExchange:
        numbers = {island: number for island, _, _, number in entry.contributions}

        def moved_of(contribution: Contribution) -> list[Tensor]:
            if contribution.island == self.island:
                return moved
            name = self._name(contribution.island, numbers[contribution.island])
            return self.mailbox.take(name, moved)

        return MergedExchange([Contribution(*row[:3]) for row in entry.contributions], moved_of)

    # Following the log --------------------------------------------------------------------------------

    def _entry(self) -> Entry:
        """The next entry, which rank 0 has seen; a file system may show it to other hosts a little later."""
        limit = time.monotonic() + TURN_S
        while (entry := self.log.read(self._next)) is None:
            if time.monotonic() > limit:
                raise RuntimeError(f"entry {self._next} of {self.log.folder} is on one rank's host only")
            time.sleep(POLL_S)
        self._next += 1
        return entry

    def _note(self, entry: Entry) -> None:
        """Take note of who takes part after an entry, and give the state to islands that join."""
        if entry.kind == "exchange":
            for island, _, _, number in entry.contributions:
                if (member := self._members.get(island)) is not None:
                    member.arrivals, member.done = number, member.done + 1
                self._joining.pop(island, None)
        elif entry.kind == "join":
            least = min((member.done for member in self._members.values()), default=0)
            address = Address(*entry.addresses[self._control.rank])
            self._members[entry.island] = _Member(address, self._secret, self._next - 1, least)
            if not entry.restored:
                self._joining[entry.island] = -1
        else:
            self._forget(entry)
        if self._outer is not None and entry.kind != "exchange":
            fields = {"island": entry.island, "entry": self._next - 1, "members": sorted(self._members)}
            kind = "island_joined" if entry.kind == "join" else f"island_{entry.reason}"
            self._tell(kind, fields)
        settled = [island for island in self._members if island not in self._joining]
        for island, sender in self._joining.items():
            if settled and sender not in settled:
                self._joining[island] = min(settled)
                if min(settled) == self.island and self._outer is not None:
                    self._send_state(island, self._outer)

    def _forget(self, entry: Entry) -> None:
        """An island has left."""
        if entry.island == self.island and self._outer is not None:
            raise RuntimeError("the other islands took this one for lost; it starts again, and joins them")
        member = self._members.pop(entry.island, None)
        self._joining.pop(entry.island, None)
        if member is not None:  # what it sent for an exchange that never was
            self.mailbox.drop(f"moved/{entry.island}/{member.joined}/{member.arrivals + 1}")

    def _send_state(self, island: int, outer: QuorumOuter) -> None:
        counts = torch.tensor([self._next, outer.merged], dtype=torch.int64)
        name = f"state/{self._members[island].joined}/{self.island}"
        self._members[island].lost |= not self._sends(island, name, [*outer.agreed_tensors(), counts])

    def _name(self, island: int, number: int | None = None) -> str:
        """Name of the message with what an island moved by, at its `number`-th arrival or this one's now."""
        number = self._arrivals if number is None else number
        return f"moved/{island}/{self._members[island].joined}/{number}"

    def _sends(self, island: int, name: str, tensors: Sequence[Tensor]) -> bool:
        """Send a message to this rank's counterpart in a member; False if it is lost."""
        try:
            self._members[island].peer.send(name, tensors)
        except LostPeerError:
            return False
        return True

    def _is_there(self, island: int) -> bool:
        try:
            self._members[island].peer.ask()
        except LostPeerError:
            return False
        return True
