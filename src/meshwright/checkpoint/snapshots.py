"""Snapshots of training state that outlive the ranks: a killed rank goes on from there.

Each rank copies its share of the state (`save_plan.py`) into memory that belongs to the supervisor of its
host, or on hosts without GPUs into a file of it that has no name (`rank/shared_memory.py`), with what a
manifest says of it; a restart reads it as it would a checkpoint, on any layout. The copy is one pass at
memory speed without a message between ranks: what is written to a file goes to the kernel's cache. From a GPU
training only issues the copies, and a thread does the rest (`side_copies.py`). Two slots take turns, so that
a rank which dies in a copy leaves the one before (in-memory checkpoints: Wang et al. 2023, SOSP, "Gemini").

The ranks of a host keep together all that any of them holds, so a host needs no other to go on from it. Where
the loss of a host would take a part of the state along, a peer on the next host keeps it, too
(`peer_snapshots.py`): then a run goes on without a host, or with another in its place.
"""

from __future__ import annotations

import hashlib
import json
import math
import secrets
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, NoReturn

from meshwright.checkpoint.background import BackgroundThread
from meshwright.checkpoint.digests import sum64
from meshwright.checkpoint.disk import rank_file
from meshwright.checkpoint.errors import BadCheckpointError
from meshwright.checkpoint.no_snapshots import NoSnapshots
from meshwright.checkpoint.peer_snapshots import Landing, Wanted, copy_to_peer, host_axis
from meshwright.checkpoint.peer_snapshots import fetch as fetch_pieces
from meshwright.checkpoint.reader import Reading, match_tensors
from meshwright.checkpoint.save_plan import LocalShard, SavePlan, Tensors, describe
from meshwright.checkpoint.slots import Image, Images, Slot, SlotHeader, SlotImage, manifest_of
from meshwright.checkpoint.staging import devices_of
from meshwright.comm.control import Control
from meshwright.comm.mesh import Axis, Mesh
from meshwright.comm.traffic_counter import TrafficCounter
from meshwright.units import gigabytes

SHARE = 0.02
"""Share of the time of training that snapshots may take, where their interval follows from their cost."""
BACKGROUND_SHARE = 0.1
"""Share of the time that a thread beside training may spend on snapshots, by that interval."""
DISK_BYTES_PER_SECOND = 4e6
"""Most that snapshots in files write on average, by that interval: 126 TB a year, which disks bear."""
TRIAL_STEPS = 5
"""Steps that each get a snapshot, whose cost then decides on the interval."""
_WHERE = Path("memory")


class _Agreed(NamedTuple):
    """Agreed on by the ranks, for one set of tensors: numbers of this start of the ranks and of this rank's
    part, and more."""

    plan: SavePlan
    description: dict[str, Any]
    part: int
    run: int
    parts: int
    copied: bool
    """True if parts are held by one host only, so that each rank gives a peer what it keeps."""
    needed: int
    """Most bytes that a host needs for all its slots."""
    has_room: bool


@dataclass(frozen=True)
class _Taking:
    """A snapshot that is being taken: where from, where to, and what a manifest says of it."""

    step: int
    agreed: _Agreed
    slot: Slot
    image: SlotImage
    chunks: Sequence[LocalShard]
    state: Mapping[str, Any]


class Snapshots(NoSnapshots):
    """Snapshots of a run; `slots` has two descriptors for each rank of this host, equally many on all hosts.

    Two more, on hosts that may be lost, are for what a rank of another host sends over the axis `world`.
    `every` is the interval in steps; None finds one that costs `SHARE` of the time, and that in files writes
    no more than `DISK_BYTES_PER_SECOND`. Where the slots would take more than half of what is free, on disk
    or by `free_memory` (bytes), none is made, and `warnings` gets a sentence, as it does once when a snapshot
    cannot be written.
    `save`, `newest` and `load` are collective over `control`, and called on all its ranks in the same order.
    """

    def __init__(
        self,
        slots: Sequence[Sequence[int]],
        control: Control,
        every: int | None,
        free_memory: Callable[[], int],
        warnings: list[str],
        world: Axis | None = None,
    ) -> None:
        self._slots = [[Slot(descriptor) for descriptor in of_rank] for of_rank in slots]
        self._ranks, self._every, self._world = control, every, world
        self._free_memory, self._warnings = free_memory, warnings
        self._local = control.rank % len(slots)
        self._own, self._peers = self._slots[self._local][:2], self._slots[self._local][2:]
        self._images = [SlotImage(slot) for slot in self._own]
        self._agreed: dict[str, _Agreed] = {}
        """By the form of the state."""
        self._last: tuple[int, int] | None = None
        """(step, run) of what was kept or loaded last, which no save overwrites."""
        self._failed = False
        self._costs: list[float] = []
        self._begun = 0.0
        self._behind = BackgroundThread()
        self._host_world: Axis | None = None
        """Over which peers copy: of host memory."""
        self._told_unpinned = False

    # -- writing ---------------------------------------------------------------

    def due(self, step: int) -> bool:
        """Return True, on all ranks alike, if the state after `step` is to be kept."""
        return self._every is None or (self._every > 0 and step % self._every == 0)

    def save(
        self, step: int, tensors: Tensors, state: Callable[[], Mapping[str, Any]], form: str = ""
    ) -> None:
        """Keep `tensors` (this rank's) of `step`, and the JSON `state`, equal on all ranks.

        `form`, equal on all ranks too, tells sets of tensors apart: the ranks agree once on each.
        """
        agreed = self._agree(tensors, form)
        if not agreed.has_room:
            self._every = 0
            return
        self.settle()
        begun = time.perf_counter()
        turn = self._spare(self._own)
        chunks = agreed.plan.own_share(tensors)
        taking = _Taking(step, agreed, self._own[turn], self._images[turn], chunks, dict(state()))
        taking.slot.open()
        if devices_of(chunks):
            try:
                taking.image.stage(chunks)
            except OSError as error:
                self._write(taking, partial(_fail, error))
            else:
                rows = partial(taking.image.rows, sum64)
                self._behind.start("snapshot", lambda: self._write(taking, rows))
            self._tell_unpinned(taking.slot)
        else:
            self._write(taking, lambda: taking.image.keep(chunks, sum64))
        if self._every is None:
            written = 0 if self._own[0].free_on_disk is None else agreed.needed // 2
            self._choose(begun, time.perf_counter(), written)

    def _write(self, taking: _Taking, rows_of: Callable[[], list[list[Any]]]) -> None:
        """Complete a slot whose image `rows_of` describes, and send it to a peer where that is agreed on."""
        agreed, slot, text = taking.agreed, taking.slot, b""
        try:
            rows = rows_of()
            described = {"rows": rows, "forms": agreed.description, "state": taking.state}
            text = json.dumps(described).encode()
            size = sum(row[4] for row in rows)
            facts = agreed.run, agreed.part, agreed.parts, sum64(text)
            slot.close(SlotHeader(taking.step, size, len(text), *facts), text)
        except OSError as error:
            self._note_failed(taking.step, error)
        if agreed.copied:
            assert self._host_world is not None
            kept = self._peers[self._spare(self._peers)]
            try:
                copy_to_peer(slot, text, kept, self._host_world, len(self._slots))
            except OSError as error:
                self._note_failed(taking.step, error)
        if text:
            self._last = slot.head().key

    def fence(self) -> None:
        for image in self._images:
            image.fence()

    def settle(self) -> None:
        if self._behind.started:
            with self._ranks.heartbeat.waits("the snapshot before"):
                self._behind.join()
        self._behind.raise_error()

    def _tell_unpinned(self, slot: Slot) -> None:
        """Say once that the memory of snapshots could not be pinned."""
        if slot.unpinned and not self._told_unpinned:
            self._told_unpinned = True
            self._warnings.append(slot.unpinned)

    def _agree(self, tensors: Tensors, form: str) -> _Agreed:
        """Learn, once for each form, which parts of the state there are, whether the loss of a host would
        take one, and whether there is room."""
        if form not in self._agreed:
            plan = SavePlan(self._ranks, len(self._slots))
            description = describe(tensors, self._ranks.rank, plan.among)
            plan.agree(description)
            share = plan.own_share(tensors)
            pieces = sorted((piece.key, piece.rectangle) for piece in share)
            digest = hashlib.sha256(json.dumps(pieces).encode()).digest()
            part = int.from_bytes(digest[:8], "little") >> 1 if pieces else 0
            listed = self._ranks.gather([part, sum(piece.local.nbytes for piece in share)])
            run, parts, copied, needed = self._ranks.on_first(lambda: self._survey(listed))
            room = self._look_for_room(needed)
            if copied and self._host_world is None:
                assert self._world is not None
                self._host_world = host_axis(self._world)
            self._agreed[form] = _Agreed(plan, description, part, run, parts, bool(copied), needed, room)
        return self._agreed[form]

    def _survey(self, listed: list[list[int]]) -> list[int]:
        """On rank 0: the facts, from the part of each rank and its bytes."""
        count = len(self._slots)
        hosts = [listed[first : first + count] for first in range(0, len(listed), count)]
        holders: dict[int, set[int]] = defaultdict(set)
        for number, host in enumerate(hosts):
            for part, size in host:
                if size:
                    holders[part].add(number)
        alone = any(len(numbers) == 1 for numbers in holders.values())
        copied = len(hosts) > 1 and bool(self._peers) and alone
        sizes = [sum(size for _, size in host) for host in hosts]
        needed = max(own + copied * before for own, before in zip(sizes, sizes[-1:] + sizes, strict=False))
        return [secrets.randbits(62), len(holders), copied, 2 * needed]

    def _look_for_room(self, needed: int) -> bool:
        """Ask rank 0 whether there is room for the slots, and warn if not."""
        on_disk = self._own[0].free_on_disk
        free = self._ranks.on_first(lambda: self._free_memory() if on_disk is None else on_disk)
        if 2 * needed > free:
            where = "in memory" if on_disk is None else "in temporary files"
            self._warnings.append(
                f"no snapshots are kept {where}: they would take {gigabytes(needed)} of {gigabytes(free)} "
                f"that are free, more than half; a run that fails goes on from its last checkpoint"
            )
        return bool(2 * needed <= free)

    def _note_failed(self, step: int, error: OSError) -> None:
        """Say once that a snapshot could not be written; its slot holds none, and later ones are tried."""
        if not self._failed:
            self._warnings.append(
                f"the snapshot of step {step} could not be written ({error.strerror}); until one is, a run "
                f"that fails goes on from an older one or from its last checkpoint"
            )
        self._failed = True

    def _spare(self, pair: Sequence[Slot]) -> int:
        """Return the slot of a pair that does not hold what was kept or loaded last."""
        return int(pair[0].head().key == self._last)

    def _choose(self, begun: float, ended: float, written: int) -> None:
        """After the trial choose an interval by rank 0's times, and by the bytes that a host writes."""
        self._costs.append(ended - begun)
        if len(self._costs) == 1:
            self._begun = begun
        if len(self._costs) <= TRIAL_STEPS:
            return
        costs = sorted(self._costs[2:])  # the first of each slot takes new pages
        step_seconds = (begun - self._begun) / TRIAL_STEPS - sum(self._costs[:-1]) / TRIAL_STEPS
        pause = max(
            costs[len(costs) // 2] / SHARE,
            written / DISK_BYTES_PER_SECOND,
            self._behind.longest / BACKGROUND_SHARE,
        )
        every = math.ceil(pause / max(step_seconds, 1e-9))
        self._every = int(self._ranks.broadcast(max(1, every)))

    # -- reading ---------------------------------------------------------------

    def clear(self) -> None:
        """Drop what this rank has kept."""
        self.settle()
        for slot in (*self._own, *self._peers):
            slot.open()

    def newest(self) -> int | None:
        """Return the last step of which the ranks together have kept all parts, or None; collective."""
        found = self._find()
        return None if found is None else found[0]

    def load(
        self, step: int, tensors: Tensors, check: Callable[[dict[str, Any]], None], form: str = ""
    ) -> dict[str, Any]:
        """Fill `tensors` in place from the snapshot of `step`, and return its state; `check` sees that first.

        Where each rank would keep what it has kept, each host reads its own memory; else ranks fetch what
        their host lacks. Raises `BadCheckpointError` on all ranks, before a tensor changes, where memory does
        not hold what was written, or not all of it.
        """
        found = self._find(step)
        if found is None:
            raise BadCheckpointError(f"the memory of these hosts does not hold all parts of step {step}")
        mine = [slot.head().part for slot in self._own if slot.head().key == found]
        if self._ranks.any(mine != [self._agree(tensors, form).part]):
            texts, images = self._from_all_hosts(found)
        else:
            own = [slot for pair in self._slots for slot in pair[:2] if slot.head().key == found]
            texts, images = self._ranks.together(lambda: [slot.text() for slot in own]), [*own]
        manifest = manifest_of(step, texts)
        self._ranks.together(lambda: check(manifest.state))
        self._ranks.together(lambda: match_tensors(manifest, tensors, _WHERE))
        disk = Images({rank_file(number): image for number, image in enumerate(images)})
        reading = Reading(_WHERE, manifest, tensors, disk, sum64)
        self._fetch(reading, found, texts, images)
        self._ranks.together(reading.read)
        reading.commit(TrafficCounter())
        self._last = found
        return manifest.state

    def _find(self, step: int | None = None) -> tuple[int, int] | None:
        """Return (step, run) of the newest snapshot, or that of `step`, of which all parts are there."""
        self.settle()
        heads = [slot.head() for slot in (*self._own, *self._peers)]
        listed = self._ranks.gather([[*head.key, head.part, head.parts] for head in heads if head.step >= 0])
        parts: dict[tuple[int, int, int], set[int]] = defaultdict(set)
        for kept, run, part, count in (row for rows in listed for row in rows):
            if part and step in (None, kept):
                parts[kept, run, count].add(part)
        complete = [(kept, run) for (kept, run, count), there in parts.items() if len(there) == count]
        found = self._ranks.broadcast(max(complete, default=None))
        return None if found is None else (int(found[0]), int(found[1]))

    def _from_all_hosts(self, found: tuple[int, int]) -> tuple[list[dict[str, Any]], list[Image]]:
        """Return the text of each part, with the rank that can be asked for it, and where its image is read:
        in the memory of this host, or in a landing that is still empty."""
        near: dict[int, Slot] = {}
        for slot in (slot for half in (0, 2) for of_rank in self._slots for slot in of_rank[half : half + 2]):
            head = slot.head()
            if head.key == found and head.part:
                near.setdefault(head.part, slot)
        own = self._images_of(found)
        listed = self._ranks.gather([*own])
        holders: dict[int, int] = {}
        for place in range(2):  # its own image, then that of a peer
            for rank, parts in enumerate(listed):
                for part in parts[place : place + 1]:
                    holders.setdefault(part, rank)
        chosen = self._ranks.broadcast(sorted(holders.items()))
        asked = [part for part, rank in chosen if rank == self._ranks.rank]
        texts = self._ranks.together(lambda: [own[part].text() | {"part": part} for part in asked])
        gathered = [
            text | {"holder": rank}
            for rank, of_rank in enumerate(self._ranks.gather(texts))
            for text in of_rank
        ]
        every = self._ranks.broadcast(gathered)
        every.sort(key=lambda text: text["part"] not in near)  # of equal pieces those of this host are read
        sizes = (sum(row[4] for row in text["rows"]) for text in every)
        return every, [
            near.get(text["part"]) or Landing(size) for text, size in zip(every, sizes, strict=True)
        ]

    def _images_of(self, found: tuple[int, int]) -> dict[int, Slot]:
        """Return this rank's slots of a step and run, and that of its peer, by part."""
        slots = {slot.head().part: slot for slot in (*self._own, *self._peers) if slot.head().key == found}
        return {part: slot for part, slot in slots.items() if part}

    def _fetch(
        self, reading: Reading, found: tuple[int, int], texts: list[dict[str, Any]], images: Sequence[Image]
    ) -> None:
        """Fetch from other hosts what `reading` needs of images that land here."""
        wanted: dict[int, list[Wanted]] = defaultdict(list)
        plan = self._ranks.together(reading.plan)
        for number, (text, image) in enumerate(zip(texts, images, strict=True)):
            if isinstance(image, Landing):
                _, fetches = plan.get(rank_file(number), (0, []))
                wanted[text["holder"]] += [
                    Wanted(text["part"], image, fetch.piece.start, fetch.piece.bytes) for fetch in fetches
                ]
        if self._ranks.any(any(wanted.values())):
            assert self._world is not None
            fetch_pieces(wanted, self._images_of(found), self._world, self._ranks)


def _fail(error: OSError) -> NoReturn:
    raise error


def snapshots_of(
    every: int | Literal["auto"],
    slots: Sequence[Sequence[int]],
    mesh: Mesh,
    free_memory: Callable[[], int],
    warnings: list[str],
) -> NoSnapshots:
    """The snapshots of a run, by the key `recovery.snapshot_every`; none without slots."""
    if not slots:
        return NoSnapshots()
    return Snapshots(
        slots, mesh.control, None if every == "auto" else every, free_memory, warnings, mesh.world
    )
