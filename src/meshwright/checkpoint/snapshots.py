"""Snapshots of training state in memory that outlives the ranks: a killed rank goes on from there.

Each rank copies its share of the state (`save_plan.py`) into memory that belongs to the supervisor of its
host, with what a manifest says of it; a restart reads it as it would a checkpoint, on any layout. The copy is
one pass at memory speed without a message between ranks, and two slots take turns, so that a rank which dies
in a copy leaves the one before (in-memory checkpoints: Wang et al. 2023, SOSP, "Gemini").

    slot   [step + 1, or 0 while it is written; bytes of image and text; the text's sum] [image] [text]
    image  pieces one after another, as in a checkpoint's piece file
    text   {"state", "forms", "rows"}: what the root and a part of a manifest say, with sums for SHA-256

The ranks of a host keep together all that any of them holds, so a host needs no other to go on from it, and
parts that ranks on several hosts hold alike survive the loss of a host.
"""

from __future__ import annotations

import json
import math
import mmap
import os
import struct
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch

from meshwright.checkpoint.digests import sum64
from meshwright.checkpoint.disk import Disk, rank_file
from meshwright.checkpoint.errors import BadCheckpointError
from meshwright.checkpoint.manifest import Hull, Manifest, Part, TensorEntry
from meshwright.checkpoint.reader import Reading, match_tensors
from meshwright.checkpoint.save_plan import SavePlan, Tensors, describe
from meshwright.checkpoint.staging import HostImage
from meshwright.parallel.control import Control
from meshwright.parallel.mesh import TrafficCounter
from meshwright.units import gigabytes

SHARE = 0.02
"""Share of the time of training that snapshots may take, where their interval follows from their cost."""
TRIAL_STEPS = 5
"""Steps that each get a snapshot, whose cost then decides on the interval."""
_HEAD = struct.Struct("<qqq16s")
_HEAD_BYTES = 4096
_WHERE = Path("memory")


class Snapshots:
    """Snapshots of a run; `slots` has two descriptors for each rank of this host, equally many on all hosts.

    `every` is the interval in steps; None finds one that costs `SHARE` of the time. Where two snapshots would
    take more than half of what `free_memory` returns (bytes), none is made, and `warnings` gets a sentence.
    `save` and `load` are collective over `control`, and called on all its ranks in the same order.
    """

    def __init__(
        self,
        slots: Sequence[Sequence[int]],
        control: Control,
        every: int | None,
        free_memory: Callable[[], int],
        warnings: list[str],
    ) -> None:
        self._slots, self._ranks, self._every = slots, control, every
        self._free_memory, self._warnings = free_memory, warnings
        self._local = control.rank % len(slots)
        self._plan = SavePlan(control, len(slots))
        self._description: dict[str, Any] | None = None
        self._images = [_SlotImage(descriptor) for descriptor in slots[self._local]]
        self._costs: list[float] = []
        self._begun = 0.0
        self._turn = 0

    # -- writing ---------------------------------------------------------------

    def due(self, step: int) -> bool:
        """Return True, on all ranks alike, if the state after `step` is to be kept."""
        return self._every is None or (self._every > 0 and step % self._every == 0)

    def save(self, step: int, tensors: Tensors, state: Callable[[], Mapping[str, Any]]) -> None:
        """Keep `tensors` (this rank's) of `step`, and the JSON `state`, called on each host's first rank."""
        begun = time.perf_counter()
        if self._description is None:
            self._description = describe(tensors, self._ranks.rank, self._plan.among)
            self._plan.agree(self._description)
            if not self._has_room():
                self._every = 0
                return
        image = self._images[self._turn]
        self._turn = 1 - self._turn
        image.open()
        image.stage(self._plan.own_share(tensors))
        text: dict[str, Any] = {"rows": image.rows(sum64), "forms": self._description}
        if self._local == 0:
            text["state"] = dict(state())
        image.close(step, json.dumps(text))
        if self._every is None:
            self._choose(begun, time.perf_counter())

    def _has_room(self) -> bool:
        """Ask rank 0 whether the host's memory has room for two snapshots, and warn if not."""
        free, needed = self._ranks.on_first(self._free_memory), 2 * self._plan.bytes
        if 2 * needed > free:
            self._warnings.append(
                f"no snapshots are kept in memory: they would take {gigabytes(needed)} of {gigabytes(free)} "
                f"that are free, more than half; a run that fails goes on from its last checkpoint"
            )
        return 2 * needed <= free

    def _choose(self, begun: float, ended: float) -> None:
        """After the trial choose an interval by rank 0's times."""
        self._costs.append(ended - begun)
        if len(self._costs) == 1:
            self._begun = begun
        if len(self._costs) <= TRIAL_STEPS:
            return
        costs = sorted(self._costs[2:])  # the first of each slot takes new pages
        step_seconds = (begun - self._begun) / TRIAL_STEPS - sum(self._costs[:-1]) / TRIAL_STEPS
        every = math.ceil(costs[len(costs) // 2] / (SHARE * max(step_seconds, 1e-9)))
        self._every = int(self._ranks.broadcast(max(1, every)))

    # -- reading ---------------------------------------------------------------

    def clear(self) -> None:
        """Drop what this rank has kept."""
        for image in self._images:
            image.open()

    def newest(self) -> int | None:
        """Return the last step of which all ranks have kept their shares, or None; collective."""
        every = self._ranks.gather(sorted(self._complete()))
        common = set.intersection(*map(set, every)) if every else set()
        step: int | None = self._ranks.broadcast(max(common, default=None))
        return step

    def load(self, step: int, tensors: Tensors, check: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
        """Fill `tensors` in place from the snapshot of `step`, and return its state; `check` sees that first.

        Raises `BadCheckpointError` on all ranks, before a tensor changes, where the memory of a host does not
        hold what was written, or not what its ranks now need.
        """
        places = self._complete()
        manifest = self._ranks.together(lambda: self._manifest(step, places[step]))
        self._ranks.together(lambda: check(manifest.state))
        self._ranks.together(lambda: match_tensors(manifest, tensors, _WHERE))
        disk = _Slots({rank_file(r): self._slots[r][slot] for r, slot in enumerate(places[step])})
        reading = Reading(_WHERE, manifest, tensors, disk, sum64)
        self._ranks.together(reading.read)
        reading.commit(TrafficCounter())
        self._turn = 1 - places[step][self._local]
        return manifest.state

    def _manifest(self, step: int, slots: Sequence[int]) -> Manifest:
        """Return a manifest of what the ranks of this host have kept, with one part inside."""
        texts = [
            _read_text(self._slots[rank][slot], f"snapshot of step {step} of local rank {rank}")
            for rank, slot in enumerate(slots)
        ]
        forms: dict[str, Any] = {}
        for text in texts:
            forms |= text["forms"]
        tensors = {
            name: TensorEntry(dtype, tuple(shape), number)
            for number, (name, (dtype, shape, _)) in enumerate(forms.items())
        }
        spreads = [[Hull(0, (0,) * len(entry.shape), entry.shape)] for entry in tensors.values()]
        inside = Part.of([text["rows"] for text in texts], 0)
        return Manifest(step, "", len(texts), 0, texts[0]["state"], tensors, spreads, [], inside)

    def _complete(self) -> dict[int, list[int]]:
        """Return the slot of each rank of this host, for the steps that all of them have kept."""
        kept = [{_read_head(fd).step: slot for slot, fd in enumerate(pair)} for pair in self._slots]
        steps = set.intersection(*(set(slots) for slots in kept)) - {-1}
        return {step: [slots[step] for slots in kept] for step in steps}


class _SlotImage(HostImage):
    """An image that lies in a slot, mapped into memory: a block each GiB, one after another."""

    def __init__(self, descriptor: int) -> None:
        super().__init__()
        self._descriptor = descriptor
        self._mapped: mmap.mmap | None = None

    def open(self) -> None:
        """Begin to write: what the slot held is no snapshot from here on."""
        self._write_head(0, 0, b"")

    def close(self, step: int, text: str) -> None:
        """End with the text: the slot now holds the snapshot of `step`."""
        content = text.encode()
        os.pwrite(self._descriptor, content, self._end)
        self._write_head(step + 1, len(content), sum64(content).encode())

    @property
    def _end(self) -> int:
        return _HEAD_BYTES + self.bytes

    def _write_head(self, mark: int, text: int, digest: bytes) -> None:
        os.pwrite(self._descriptor, _HEAD.pack(mark, self.bytes, text, digest), 0)

    def _make_room(self, pinned: bool) -> None:
        if self._mapped is None or len(self._mapped) < self._end:
            os.ftruncate(self._descriptor, max(self._end, os.fstat(self._descriptor).st_size))
            self._mapped = mmap.mmap(self._descriptor, self._end)
            if pinned:  # else a copy from a device passes through a buffer of the driver's
                whole = torch.frombuffer(self._mapped, dtype=torch.uint8)
                torch.cuda.cudart().cudaHostRegister(whole.data_ptr(), whole.numel(), 0)
        self._blocks, start = [], _HEAD_BYTES
        for length in self._lengths:
            self._blocks.append(torch.frombuffer(self._mapped, dtype=torch.uint8, count=length, offset=start))
            start += length


class _Slots(Disk):
    """Reads piece files out of slots."""

    def __init__(self, descriptors: Mapping[str, int]) -> None:
        self._descriptors = descriptors

    @contextmanager
    def opened(self, path: Path) -> Iterator[tuple[int, int]]:
        descriptor = self._descriptors[path.name]
        yield descriptor, _read_head(descriptor).image

    def read(self, descriptor: int, target: memoryview, start: int) -> int:
        return super().read(descriptor, target, _HEAD_BYTES + start)


class _Head(NamedTuple):
    """The head of a slot: a step, -1 if it holds no snapshot, and the bytes and sums of what follows."""

    step: int
    image: int
    text: int
    digest: str


def _read_head(descriptor: int) -> _Head:
    content = os.pread(descriptor, _HEAD.size, 0)
    if len(content) < _HEAD.size:
        return _Head(-1, 0, 0, "")
    mark, image, text, digest = _HEAD.unpack(content)
    return _Head(mark - 1, image, text, digest.decode("ascii", "replace"))


def _read_text(descriptor: int, name: str) -> dict[str, Any]:
    head = _read_head(descriptor)
    content = os.pread(descriptor, head.text, _HEAD_BYTES + head.image)
    if sum64(content) != head.digest:
        raise BadCheckpointError(f"the {name} in memory is damaged: its description is not what was written")
    return dict(json.loads(content))
