"""Snapshots on a peer: each rank sends what it keeps to a rank of the next host, and fetches what was lost.

Rank r sends its image and text to rank r + n of N, where a host has n ranks. So the state survives the loss
of any host, and of several of which no two are neighbours (Wang et al. 2023, SOSP, "Gemini").

Bytes on the wire: a rank's share of the state for each snapshot. After a change of hosts, the pieces that a
rank needs and its host lacks, each from one rank that has it.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.checkpoint.slots import PACKED_BYTES, Image, Slot, SlotHeader
from meshwright.comm import process_groups
from meshwright.comm.collectives import start_all_to_all, start_shift
from meshwright.comm.control import Control
from meshwright.comm.mesh import Axis
from meshwright.comm.traffic_counter import TrafficCounter

T = TypeVar("T")
BLOCK_BYTES = 64 << 20
"""Most bytes that a rank sends, or receives, at a time."""


# A copy for each snapshot --------------------------------------------------------------------------------


def copy_to_peer(own: Slot, text: bytes, kept: Slot, world: Axis, distance: int) -> None:
    """Send slot `own`, with its text, `distance` ranks on, and write the one that comes to `kept`.

    Until all of that is there, `kept` holds no snapshot. Called on all ranks of `world`, whose messages are
    of host memory; raises OSError, after the last message, where it could not be written.
    """
    kept.open()
    head = torch.empty(PACKED_BYTES, dtype=torch.uint8)
    _shift(head, _bytes(own.head().pack()), world, distance)
    coming = SlotHeader.unpack(head.numpy().tobytes())
    described = torch.empty(coming.text, dtype=torch.uint8)
    _shift(described, _bytes(text), world, distance)
    failure: OSError | None = None
    for start in range(0, max(coming.image, own.size), BLOCK_BYTES):
        sent = own.block(start, BLOCK_BYTES)
        received = torch.empty(max(0, min(BLOCK_BYTES, coming.image - start)), dtype=torch.uint8)
        _shift(received, sent, world, distance)
        if failure is None:
            try:
                kept.write(received.numpy().data, start)
            except OSError as error:
                failure = error
    if failure is not None:
        raise failure
    kept.close(coming, described.numpy().tobytes())


def _shift(received: Tensor, sent: Tensor, world: Axis, distance: int) -> None:
    """Send bytes to the host `distance` ranks on, and receive others."""
    start_shift(received, sent, world, distance).wait()


def host_axis(world: Axis) -> Axis:
    """The axis with messages of host memory, which may be sent beside training; collective over the world.

    On GPUs that is a gloo group of its own: messages of the host take no part in the order of NCCL's.
    """
    if world.group is None or world.device.type == "cpu":
        return world
    ranks = dist.get_process_group_ranks(world.group)
    group = dist.new_group(ranks, process_groups.TIMEOUT, "gloo")
    return replace(world, group=group, device=torch.device("cpu"), wire=TrafficCounter())


def _bytes(content: bytes) -> Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


# Pieces that a host lacks --------------------------------------------------------------------------------


class Landing:
    """Memory for pieces of an image of another host, at their places; untouched pages take nothing."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.memory = mmap.mmap(-1, size)

    def read(self, target: memoryview, start: int) -> int:
        """Fill `target` from byte `start` on."""
        target[:] = memoryview(self.memory)[start : start + len(target)]
        return len(target)


class Wanted(NamedTuple):
    """A piece to be fetched: `bytes` from `start` on of the image of `part`, to that place of `landing`."""

    part: int
    landing: Landing
    start: int
    bytes: int


def fetch(
    wanted: Mapping[int, Sequence[Wanted]], images: Mapping[int, Image], world: Axis, ranks: Control
) -> None:
    """Fill the landings of the pieces `wanted` of other ranks, and send them what they want of `images`.

    `wanted` has a list for each rank that is asked, `images` has an image for each part that this rank can be
    asked for. Called on all ranks of `world`; in each round a rank sends and receives `BLOCK_BYTES` at most.
    """
    asked = [wanted.get(rank, ()) for rank in range(world.size)]
    requests = torch.tensor(
        [(piece.part, piece.start, piece.bytes) for pieces in asked for piece in pieces], dtype=torch.int64
    ).view(-1, 3)
    outgoing = [
        [(images[part], start, length) for part, start, length in of_rank]
        for of_rank in _exchange_rows(requests, [len(pieces) for pieces in asked], world)
    ]
    incoming = [[(piece.landing, piece.start, piece.bytes) for piece in pieces] for pieces in asked]
    sends, receives = ([_bytes_of(ranges) for ranges in each] for each in (outgoing, incoming))
    partners = max(sum(map(bool, sends)), sum(map(bool, receives)))
    gathered = ranks.gather([partners, max(sends)])
    partners, longest = ranks.broadcast([max(column) for column in zip(*gathered, strict=True)])
    window = BLOCK_BYTES // max(1, partners)
    for first in range(0, longest, window):
        sent_rows, received_rows = (
            [min(window, max(0, total - first)) for total in totals] for totals in (sends, receives)
        )
        sent = torch.empty(sum(sent_rows), dtype=torch.uint8)
        received = torch.empty(sum(received_rows), dtype=torch.uint8, device=world.device)
        for image, start, block in _in_window(outgoing, first, window, sent):
            done = 0
            # An image that ends too early leaves zeros, which the reader's checksum refuses.
            while done < len(block) and (read := image.read(block[done:], start + done)):
                done += read
        start_all_to_all(received, sent.to(world.device), world, received_rows, sent_rows).wait()
        for landing, start, block in _in_window(incoming, first, window, received.cpu()):
            landing.memory[start : start + len(block)] = block


def _exchange_rows(rows: Tensor, counts: Sequence[int], world: Axis) -> list[list[list[int]]]:
    """Send `counts[0]` of the rows (n, 3) to rank 0, and so on; returns those that came, by sender."""
    sent_counts = torch.tensor(counts, device=world.device)
    received_counts = torch.empty_like(sent_counts)
    start_all_to_all(received_counts, sent_counts, world).wait()
    numbers = received_counts.tolist()
    received = torch.empty(sum(numbers), 3, dtype=torch.int64, device=world.device)
    start_all_to_all(received, rows.to(world.device), world, numbers, list(counts)).wait()
    return [part.tolist() for part in received.cpu().split(numbers)]


def _bytes_of(ranges: Iterable[tuple[Any, int, int]]) -> int:
    return sum(length for _, _, length in ranges)


def _in_window(
    streams: Sequence[Sequence[tuple[T, int, int]]], first: int, window: int, buffer: Tensor
) -> Iterator[tuple[T, int, memoryview]]:
    """Yield (memory, start, place in `buffer`) of the bytes from `first` on, `window` at most, of streams.

    A stream is the ranges (memory, start, length) that one rank sends to another, laid end to end; the buffer
    holds the windows of all streams.
    """
    content, place = buffer.numpy().data, 0
    for stream in streams:
        begin = 0
        for memory, start, length in stream:
            low, high = max(first, begin), min(first + window, begin + length)
            if low < high:
                yield memory, start + low - begin, content[place : place + high - low]
                place += high - low
            begin += length
