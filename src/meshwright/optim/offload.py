"""Moments of an optimiser in the host's memory or in a mapped file, and their way through the device.

What it saves: on a GPU the device holds, instead of all moments, `SLOTS` pieces of each. An update takes a
rank's parameters piece by piece: the next piece's moments come to the device, and the last one's go back,
while this one's are updated, each way on a stream of its own. On a CPU the moments of a mapped file are
updated where they are, and the system decides which of its pages are in memory.
What crosses the link: every moment once each way in each step; nothing goes between ranks.
Source: Ren et al. 2021 (ZeRO-Offload), Rajbhandari et al. 2021 (ZeRO-Infinity): of these the moments, which
are updated on the device, and neither gradients nor master weights.
"""

from __future__ import annotations

import errno
import mmap
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from meshwright.comm.control import Control
from meshwright.planner.memory.exact import shortened
from meshwright.planner.memory.in_flight import host_activations
from meshwright.planner.memory.states import SLOTS
from meshwright.profile.machine import free_memory
from meshwright.spec import RunSpec, UserError
from meshwright.spec.tiling import tiling
from meshwright.spec.train import TrainSpec
from meshwright.units import gigabytes

_ALIGN = 64
"""Bytes that the beginning of a buffer in the file is a multiple of."""


class MomentMemory:
    """The memory that a rank's moments are in, by `train.offload`.

    `folder` is that of the file; `staged` is true if an update reads moments from copies on the device.
    """

    def __init__(
        self,
        train: TrainSpec,
        device: torch.device,
        control: Control,
        folder: Path | None = None,
        staged: bool | None = None,
    ) -> None:
        self._kind, self._device, self._control = train.offload, device, control
        self._folder = Path(train.offload_dir) if train.offload_dir else folder or Path(tempfile.gettempdir())
        self.staged = train.offload != "none" and device.type != "cpu" if staged is None else staged

    @property
    def bounces(self) -> bool:
        """True if copies between this memory and a device need pinned memory between them."""
        return self._kind == "disk" and self._device.type == "cuda"

    def zeros(self, sizes: Sequence[int], dtype: torch.dtype) -> list[Tensor]:
        """Flat tensors of these numbers of elements; where they are offloaded every rank calls it together.

        Raises `UserError`, on all ranks, where the file system or the host's memory has too little room.
        """
        if self._kind == "disk":
            return self._control.together(lambda: _mapped(self._folder, sizes, dtype))
        if self._kind == "host":
            return self._control.together(lambda: _in_memory(sizes, dtype, self._device.type == "cuda"))
        return [torch.zeros(size, dtype=dtype, device=self._device) for size in sizes]


def check_offload(spec: RunSpec, device: torch.device, pipeline_rank: int) -> None:
    """Raise `UserError` where offloading to the host has no effect, or no room for activations."""
    if device.type == "cpu" and spec.train.offload == "host":
        raise UserError(
            "train.offload: 'host' has no effect on a CPU, whose moments are in the host's memory; give "
            "'disk' or 'none'"
        )
    if spec.train.offload_activations == "none":
        return
    if device.type == "cpu":
        raise UserError(
            "train.offload_activations: 'host' has no effect on a CPU, whose activations are in the host's "
            "memory; give 'none'"
        )
    need, free = host_activations(shortened(spec), pipeline_rank), free_memory()
    if need > free:
        raise UserError(
            f"train.offload_activations: the activations of this rank, {gigabytes(need)}, do not fit in the "
            f"host's memory, of which {gigabytes(free)} are free; give recompute.policy = 'full', of whose "
            f"blocks the inputs are moved, or a smaller layout.micro_batch"
        )


def _in_memory(sizes: Sequence[int], dtype: torch.dtype, pinned: bool) -> list[Tensor]:
    """Tensors of zeros in the host's memory."""
    need, free = sum(sizes) * dtype.itemsize, free_memory()
    if need > free:
        raise UserError(
            f"train.offload: the optimiser's moments of this rank, {gigabytes(need)}, do not fit in the "
            f"host's memory, of which {gigabytes(free)} are free; give 'disk', or shard them over more ranks"
        )
    return [torch.zeros(size, dtype=dtype, pin_memory=pinned) for size in sizes]


def _mapped(folder: Path, sizes: Sequence[int], dtype: torch.dtype) -> list[Tensor]:
    """Tensors of zeros in a nameless file in `folder`, which is gone when the process is, however that ends.

    Its blocks are reserved at once, since a file system that is full later would end the process by SIGBUS.
    """
    starts, end = list[int](), 0
    for size in sizes:
        starts.append(end)
        end += -(-size * dtype.itemsize // _ALIGN) * _ALIGN
    if not end:
        return [torch.zeros(size, dtype=dtype) for size in sizes]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            _reserve(file.fileno(), end)
            whole = torch.frombuffer(mmap.mmap(file.fileno(), end), dtype=torch.uint8)
    except OSError as error:
        what = (
            f"the optimiser's moments of this rank, {gigabytes(end)}, cannot be put into a file in {folder}"
        )
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            free = gigabytes(shutil.disk_usage(folder).free)
            raise UserError(
                f"train.offload: {what}, where {free} are free; give another train.offload_dir, or 'none'"
            ) from error
        raise UserError(
            f"train.offload_dir: {what} ({error.strerror}); give a folder that can be written"
        ) from error
    return [
        whole[start : start + size * dtype.itemsize].view(dtype)
        for start, size in zip(starts, sizes, strict=True)
    ]


def _reserve(descriptor: int, size: int) -> None:
    """Reserve the blocks of a file. Raises OSError."""
    room = os.fstatvfs(descriptor)
    if size > room.f_bavail * room.f_frsize:  # some file systems write zeros to reserve, until they are full
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(descriptor, 0, size)
    else:
        os.ftruncate(descriptor, size)


class Span(NamedTuple):
    """Moments that an update takes at a time: the elements from `start` to `end` of each of `homes`."""

    homes: Sequence[Tensor]
    start: int
    end: int


class _Slot:
    """Room on the device for one piece of each moment, and pinned memory on its way where that is needed."""

    def __init__(self, moments: int, length: int, like: Tensor, device: torch.device, bounces: bool) -> None:
        self.staged = [torch.empty(length, dtype=like.dtype, device=device) for _ in range(moments)]
        self.bounce = [torch.empty(length, dtype=like.dtype, pin_memory=True) for _ in self.staged * bounces]
        self.span: Span | None = None
        """The span that is on its way back."""
        cuda = device.type == "cuda"
        self.came, self.updated, self.left = (torch.cuda.Event() if cuda else None for _ in range(3))


class Staging:
    """Moments on their way through slots on the device, in pieces of `tiling().moment_elements` at most."""

    def __init__(
        self, buffers: Sequence[Sequence[Tensor]], memory: MomentMemory, device: torch.device, least: int = 0
    ) -> None:
        """`buffers` are those of each moment; pieces hold `least` elements or more, or a whole buffer."""
        flats = [flat for of_moment in buffers for flat in of_moment]
        largest = max((len(flat) for flat in flats), default=0)
        self.length = min(max(tiling().moment_elements, least), largest)
        """Most elements of a span."""
        self._cuda = device.type == "cuda"
        self._slots = [
            _Slot(len(buffers), self.length, flats[0], device, memory.bounces)
            for _ in range(SLOTS * bool(flats))
        ]
        if self._cuda:
            self._in, self._out = torch.cuda.Stream(device), torch.cuda.Stream(device)

    def nbytes(self) -> int:
        """Bytes on the device."""
        return sum(each.nbytes for slot in self._slots for each in slot.staged)

    def through(self, spans: Sequence[Span]) -> Iterator[tuple[Tensor, ...]]:
        """Yield the moments of each span, on the device; what the caller writes into them goes back.

        When it ends everything is back, since the host may read it next, for a checkpoint.
        """
        for turn, span in enumerate(spans):
            if turn == 0:
                self._fetch(self._slots[0], span)
            if turn + 1 < len(spans):
                self._fetch(self._slots[(turn + 1) % SLOTS], spans[turn + 1])
            slot, length = self._slots[turn % SLOTS], span.end - span.start
            if slot.came is not None:
                slot.came.wait()
            yield tuple(staged[:length] for staged, _ in zip(slot.staged, span.homes, strict=False))
            self._send_back(slot, span)
        for slot in self._slots:
            self._settle(slot)

    def _fetch(self, slot: _Slot, span: Span) -> None:
        """Start to copy a span into a slot, once what was in it is back."""
        self._settle(slot)
        length = span.end - span.start
        sources = [home[span.start : span.end] for home in span.homes]
        if slot.bounce:
            for bounce, source in zip(slot.bounce, sources, strict=False):
                bounce[:length].copy_(source)
            sources = [bounce[:length] for bounce, _ in zip(slot.bounce, sources, strict=False)]
        with torch.cuda.stream(self._in) if self._cuda else nullcontext():
            for staged, source in zip(slot.staged, sources, strict=False):
                staged[:length].copy_(source, non_blocking=True)
            if slot.came is not None:
                slot.came.record()

    def _send_back(self, slot: _Slot, span: Span) -> None:
        """Start to copy an updated span to where it came from."""
        length, slot.span = span.end - span.start, span
        if slot.updated is not None:
            slot.updated.record()
            slot.updated.wait(self._out)
        targets = slot.bounce or [home[span.start : span.end] for home in span.homes]
        with torch.cuda.stream(self._out) if self._cuda else nullcontext():
            for target, staged, _ in zip(targets, slot.staged, span.homes, strict=False):
                target[:length].copy_(staged[:length], non_blocking=True)
            if slot.left is not None:
                slot.left.record()

    def _settle(self, slot: _Slot) -> None:
        """Wait until what left a slot is where it belongs."""
        if slot.span is None:
            return
        if slot.left is not None:
            slot.left.synchronize()
        span, slot.span = slot.span, None
        for bounce, home in zip(slot.bounce, span.homes, strict=False):
            home[span.start : span.end].copy_(bounce[: span.end - span.start])
