"""A unit: parameters that are gathered and reduced together (the embedding, one block but for its routed
experts, these, or the head).

Each rank stores rows of every parameter in one flat buffer, and a unit crosses the wire as one message:

    stored    flat (P/n,) master format     what the optimiser updates; each parameter is a DTensor view of it
    full      flat (P,)   compute format    what the forward reads; each module parameter is a view of it
    packed    flat (P,)   reduce format     gradients, laid out as `full` is; in exact where several
                          or exact          microbatches are added up first
    gradient  flat (P/n,) exact format      the sum over all ranks and microbatches

In `full` and `packed` each parameter is whole, one after another. Its rows of each rank lie together (of
experts, those of each expert), so a message is of several tensors: parameters are gathered into their places
and gradients reduced from theirs, and a product may write its gradient where it is sent. Only what is encoded
(`Encoding`) is copied.

Parameters that are not trained are units of their own, without packed and summed gradients. They are stored
in the compute format, since no update needs more digits, and only ZeRO-3 shards them: then they take P b/n
bytes for b of a number, and otherwise P b on each rank, of which nothing crosses the wire. Weights of a
quantised base are units of their own, too, of bytes (`quantised_weights.py`); their `full` is never kept.

n is the number of ranks that share the storage: 1 for ZeRO-0, the shard axis otherwise. Rows are dealt as
DTensor's `Shard(0)` deals them (ceil(rows / n) to each rank until none is left); the flat buffers are padded
with zeros to equal parts. With n = 1 and equal formats `full` is `stored`: nothing is copied. When a unit is
gathered (prefetch) and reduced is in `data_parallel.py`.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Literal, Protocol

import torch
from torch import Tensor, nn
from torch.autograd import _unsafe_preserve_version_counter as preserve_version  # type: ignore[attr-defined]

from meshwright.comm.collectives import (
    DONE,
    start_all_gather,
    start_all_gather_coalesced,
    start_reduce_scatter_coalesced,
)
from meshwright.comm.mesh import Axis, Mesh
from meshwright.comm.traffic_counter import Pending
from meshwright.kernels.gradient_accumulation_fusion import RunningSum
from meshwright.parallel.flat_param import ParamSlot, Stored, stored
from meshwright.parallel.precision import Formats

BufferEvent = Literal[
    "stored", "full", "resized", "gathered", "packed", "packed taken", "sent", "part", "gradient"
]


class UnitObserver:
    """Callbacks about the buffers of units, for accounting; these do nothing."""

    def gathering(self, unit: Unit) -> AbstractContextManager[None]:
        """Context of a unit's gather, in which its temporaries are allocated."""
        return nullcontext()

    def on_buffer(self, unit: Unit, event: BufferEvent, buffer: Tensor) -> None:
        """Called when a buffer was allocated, resized, or changed its purpose."""


class Encoding(Protocol):
    """Bytes in which ranks gather a unit, in the place of its parameters in the compute format."""

    @property
    def ready(self) -> bool:
        """True if a gather may begin in it."""

    def pack(self, unit: Unit) -> Tensor:
        """The message of this rank, in bytes."""

    def unpack(self, unit: Unit, messages: Tensor) -> None:
        """Write the parameters of all ranks' `messages` (ranks, bytes) into the unit's whole copy."""


class QuantisedStorage(Encoding, Protocol):
    """An encoding in which the parameters of a unit are stored, too."""

    def size(self, part: int) -> int:
        """Bytes of so many elements."""

    def read(self, unit: Unit, slot: ParamSlot) -> Tensor:
        """This rank's rows of one parameter, in the compute format."""

    def write(self, unit: Unit, slot: ParamSlot, values: Tensor) -> None:
        """Store this rank's rows of one parameter."""


class Unit:
    """Storage and buffers of one unit on one rank; `data_parallel.DataParallel` decides when to fill them."""

    def __init__(
        self,
        slots: list[ParamSlot],
        mesh: Mesh,
        shards: Axis | None,
        replicas: Axis,
        formats: Formats,
        observer: UnitObserver | None = None,
        encoding: Encoding | None = None,
        quantised: QuantisedStorage | None = None,
    ) -> None:
        """Parameters are sharded over `shards`, or whole; gradients are summed over `replicas`, too.

        Either all of them are trained, or none, and all of them are `quantised`, or none.
        """
        self.trainable = slots[0].piece.trainable
        if not self.trainable:
            formats = replace(formats, master=formats.compute)
        self._encoding, self.quantised = quantised or encoding, quantised
        self._observer = observer or UnitObserver()
        self.slots, self.shards, self.replicas = slots, shards, replicas
        self.formats, self.mesh = formats, mesh
        self.ranks = shards.size if shards else 1
        # Routed experts share a unit with no other parameters.
        self._axis = mesh.expert_data if slots[0].piece.routed else mesh.shard
        self.part = sum(slot.padded for slot in slots)
        self.decayed = sum(slot.padded for slot in slots if slot.decay)
        size, form = (quantised.size(self.part), torch.uint8) if quantised else (self.part, formats.master)
        self.stored = torch.zeros(size, dtype=form, device=mesh.device)
        self.aliased = self.ranks == 1 and formats.compute == form
        self.full = (
            self.stored
            if self.aliased
            else torch.empty(self.ranks * self.part, dtype=formats.compute, device=mesh.device)
        )
        self._storage_bytes = self.full.untyped_storage().nbytes()
        # Of `data`, whose version as autograd counts is another: the views of `full` that it saves may be
        # filled again, with the same values.
        self._gathered = self._pieces(self.full.data) if self.shards is not None else []
        self._gathering: tuple[Pending, Tensor | None] | None = None
        """A gather under way, and the message that is still to be copied into `full`."""
        self.ready = self.aliased
        self.parameters = {slot.key: self._compute_parameter(slot) for slot in slots}
        if not self.aliased:
            self._resize(0)
        self.packed: Tensor | None = None
        self.gradient: Tensor | None = None
        self.arrived: set[str] = set()
        self._uncopied: list[tuple[Tensor, Tensor]] = []
        """Places in `packed`, and the gradients that are still to be copied there."""
        self.waiting: dict[str, int] = {}
        """Parameter -> number of gradients still expected before the unit can be reduced."""
        self._packed_format = formats.reduce
        self._notify("full", self.full)
        self._notify("stored", self.stored)

    def _notify(self, event: BufferEvent, buffer: Tensor) -> Tensor:
        self._observer.on_buffer(self, event, buffer)
        return buffer

    def _rows(self, flat: Tensor, slot: ParamSlot) -> Tensor:
        """One parameter's part of `full` or `packed`, with a dim of `ranks` before that of their rows."""
        begin, dim = slot.start * self.ranks, slot.dim
        shape = (*slot.part[:dim], self.ranks, *slot.part[dim:])
        return flat[begin : begin + slot.padded * self.ranks].view(shape)

    def whole_rows(self, slot: ParamSlot) -> Tensor:
        """One parameter's part of `full`, by the rank that stores it."""
        return self._rows(self.full, slot).movedim(slot.dim, 0)

    def _whole(self, flat: Tensor, slot: ParamSlot) -> tuple[Tensor, Tensor]:
        """One parameter's part of `full` or `packed` in its own shape, and the padding behind its rows."""
        dim, rows = slot.dim, slot.piece.local_shape[slot.dim]
        padded = self._rows(flat, slot).flatten(dim, dim + 1)
        return padded.narrow(dim, 0, rows), padded.narrow(dim, rows, padded.shape[dim] - rows)

    def _pieces(self, flat: Tensor) -> list[Tensor]:
        """The tensors (n, k) of a message: what is contiguous of each rank in `full` or `packed`, in the
        order of one rank's flat buffers."""
        found: list[Tensor] = []
        for slot in self.slots:
            before = math.prod(slot.part[: slot.dim])
            found += self._rows(flat, slot).view(before, self.ranks, -1).unbind(0)
        return found

    def _compute_parameter(self, slot: ParamSlot) -> nn.Parameter:
        parameter = nn.Parameter(self._whole(self.full, slot)[0], requires_grad=self.trainable)
        for module, attribute in slot.owners:
            setattr(module, attribute, parameter)
        return parameter

    # Stored form ------------------------------------------------------------------------------------

    def slots_in(self, flat: Tensor) -> list[ParamSlot]:
        """The parameters of a flat buffer, which may be of the last ones only."""
        return [slot for slot in self.slots if slot.start >= self.part - len(flat)]

    def local(self, flat: Tensor, slot: ParamSlot) -> Tensor:
        """This rank's rows of one parameter, as a view of `flat` (`stored`, `gradient`, or a moment)."""
        start = slot.start - (self.part - len(flat))
        part = flat[start : start + slot.padded].view(slot.part)
        return part.narrow(slot.dim, 0, slot.rows)

    def tensors(self, flat: Tensor) -> Iterator[tuple[str, Stored]]:
        """(name, part of the whole) for each parameter of a flat buffer in stored form, in its memory."""
        for slot in self.slots_in(flat):
            yield slot.key, stored(slot, self.local(flat, slot), self.mesh, self.shards is not None)

    def values(self, slot: ParamSlot) -> Tensor:
        """This rank's rows of one parameter: a view of `stored`, or a copy of what is quantised."""
        if self.quantised is not None:
            return self.quantised.read(self, slot)
        return self.local(self.stored, slot)

    def set_values(self, slot: ParamSlot, values: Tensor) -> None:
        """Store this rank's rows of one parameter."""
        if self.quantised is not None:
            self.quantised.write(self, slot, values)
        else:
            self.local(self.stored, slot).copy_(values)

    def parameters_stored(self) -> Iterator[tuple[str, Stored]]:
        """(name, part of the whole) for each parameter, in the memory of `stored`; those that are quantised
        are copies in the host's memory."""
        if self.quantised is None:
            yield from self.tensors(self.stored)
            return
        for slot in self.slots:
            yield slot.key, stored(slot, self.values(slot).cpu(), self.mesh, self.shards is not None)

    # Gathering parameters ---------------------------------------------------------------------------

    def start_gather(self) -> None:
        """Begin to fill `full` from the ranks' `stored`; nothing if that was begun or is not needed."""
        if self.ready or self._gathering:
            return
        if self.shards is None:
            self._gathering = (DONE, self.stored)
            return
        with self._observer.gathering(self):
            if self._encoding is not None and self._encoding.ready:
                part = self._encoding.pack(self)
                whole = torch.empty(self.ranks * part.numel(), dtype=part.dtype, device=part.device)
                self._gathering = (start_all_gather(whole, part, self.shards), whole)
                self._notify("gathered", whole)
                return
            self._allocate()
            own = [piece[self.shards.rank] for piece in self._gathered]
            torch._foreach_copy_(own, [*self.stored.split([each.numel() for each in own])])
            self._gathering = (start_all_gather_coalesced(self._gathered, self.shards), None)

    def finish_gather(self) -> None:
        """Wait for the gather; copy what it has not written to its place into `full`."""
        if self.ready:
            return
        self.start_gather()
        assert self._gathering is not None
        work, whole = self._gathering
        work.wait()
        self._gathering = None
        self._allocate()
        # Autograd saved views of `full`; they hold the same values again, so their version stays.
        with self._observer.gathering(self), torch.no_grad(), preserve_version(self.full):
            if whole is None:
                pass
            elif whole.dtype is torch.uint8:
                assert self._encoding is not None
                self._encoding.unpack(self, whole.view(self.ranks, -1))
            else:
                self.full.copy_(whole)
        self.ready = True

    def _allocate(self) -> None:
        if self.full.untyped_storage().nbytes() == 0:
            self._resize(self._storage_bytes)

    def release(self) -> None:
        """Free the memory of `full`; its views stay and are filled again by the next gather."""
        if self.aliased or not self.ready:
            return
        self._resize(0)
        self.ready = False

    def release_storage(self) -> None:
        """Free the memory of `full`, whether or not its values are outdated, unless it is `stored`."""
        if not self.aliased:
            self._end_gather()
            self._resize(0)
            self.ready = False

    def _resize(self, size: int) -> None:
        """Resize the storage of `full` to `size` bytes."""
        self.full.untyped_storage().resize_(size)
        self._notify("resized", self.full)

    def expire(self) -> None:
        """Mark `full` as outdated because `stored` changed: the next use gathers again into its memory."""
        if self._gathering:
            self._end_gather()
            if self.shards is not None:
                self._resize(0)
        self.ready = self.aliased

    def _end_gather(self) -> None:
        """Wait for a gather under way, which nobody will read."""
        if self._gathering:
            self._gathering[0].wait()
            self._gathering = None

    def settle(self) -> None:
        """End a gather under way, and copy the gradients that have arrived to their places."""
        if self._gathering:
            self.finish_gather()
        self._copy_together()

    # Gradients --------------------------------------------------------------------------------------

    def expect(self, gradients: Mapping[str, int], several: bool) -> None:
        """Set how many gradients of each parameter come before the unit is done.

        With `several` more than one is added up before the reduction: in the exact format, so that rounding
        to the format of the wire happens once.
        """
        self.waiting = dict(gradients)
        self._packed_format = self.formats.exact if several else self.formats.reduce

    def pack(self, slot: ParamSlot, grad: Tensor) -> None:
        """Copy a parameter's gradient into `packed`, or add it if one has arrived before.

        First gradients of vectors, which need no memory meanwhile, are copied together, by `take_packed` or
        before others are added.
        """
        place, begun = self._place(slot)
        if begun:
            self._copy_together()
            place.add_(grad)
        elif grad.ndim == 1:
            self._uncopied.append((place, grad))
        else:
            place.copy_(grad)

    def gradient_sum(self, slot: ParamSlot) -> RunningSum:
        """A parameter's part of `packed`, to which the caller adds the gradient instead of calling `pack`."""
        place, begun = self._place(slot)
        if begun:
            self._copy_together()
        return RunningSum(place, begun)

    def _place(self, slot: ParamSlot) -> tuple[Tensor, bool]:
        """A parameter's part of `packed`, and whether a gradient has arrived there; the next one has now."""
        place, padding = self._whole(self._ensure_packed(), slot)
        begun = slot.key in self.arrived
        if not begun and padding.numel():
            padding.zero_()
        self.arrived.add(slot.key)
        return place, begun

    def _copy_together(self) -> None:
        if self._uncopied:
            places, grads = zip(*self._uncopied, strict=True)
            torch._foreach_copy_([*places], [*grads])
            self._uncopied.clear()

    def _ensure_packed(self) -> Tensor:
        if self.packed is None:
            size, device = self.ranks * self.part, self.stored.device
            self.packed = self._notify("packed", torch.empty(size, dtype=self._packed_format, device=device))
        return self.packed

    def take_packed(self) -> Tensor:
        """The packed gradients, zeros where none arrived; a unit that is not sharded keeps them to the end of
        the step."""
        packed = self._ensure_packed()
        self._copy_together()
        for slot in self.slots:
            if slot.key not in self.arrived:
                self._rows(packed, slot).zero_()
        self.arrived = set()
        if self.shards is not None:
            self.packed = None
            self._notify("packed taken", packed)
        return packed

    def to_send(self, packed: Tensor) -> Tensor:
        """Packed gradients in the format of the wire; a copy where they were added up in another."""
        sent = packed.to(self.formats.reduce)
        return sent if sent is packed else self._notify("sent", sent)

    def start_reduce(self, sent: Tensor) -> tuple[Pending, Tensor]:
        """Begin to sum gradients (P,) in the format of the wire over the ranks that share the storage.

        The second result has this rank's part (P/n,) of the sum when the first has ended.
        """
        assert self.shards is not None
        part = torch.empty(self.part, dtype=self.formats.reduce, device=self.stored.device)
        self._notify("part", part)
        return start_reduce_scatter_coalesced(part, self._pieces(sent), self.shards), part

    def drop_gradients(self) -> None:
        """Free the memory of gradients."""
        self.gradient = self.packed = None
        self.arrived = set()
        self._uncopied.clear()

    def set_gradient(self, gradient: Tensor) -> None:
        """Store the summed gradients (P/n,) of this rank's part."""
        self.gradient = self._notify("gradient", gradient)

    def slots_summed(self) -> Iterator[tuple[Axis, ParamSlot]]:
        """(axis, slot) of each parameter whose gradients the ranks add up that hold the same piece."""
        for slot in self.slots:
            if slot.piece.summed:
                yield self.mesh.alike(slot.piece), slot

    def counted_slots(self, without: Collection[str] = ()) -> list[ParamSlot]:
        """The parameters that this rank counts, of ranks that store the same, but for those in `without`."""
        if self.mesh.replicate.rank > 0 or (self.shards is None and self._axis.rank > 0):
            return []
        own = [slot for slot in self.slots if slot.key not in without]
        return [slot for slot in own if slot.piece.copies == 1 or self.mesh.alike(slot.piece).rank == 0]

    def counted_gradients(self, without: Collection[str] = ()) -> list[Tensor]:
        """The parts of `gradient` of the parameters that this rank counts, adjacent ones as one."""
        assert self.gradient is not None
        ranges: list[tuple[int, int]] = []
        for slot in self.counted_slots(without):
            begin = ranges.pop()[0] if ranges and ranges[-1][1] == slot.start else slot.start
            ranges.append((begin, slot.start + slot.padded))
        return [self.gradient[begin:end] for begin, end in ranges]

    def gradient_of(self, slot: ParamSlot) -> Tensor:
        """A parameter's part of `gradient`, padding included."""
        assert self.gradient is not None
        return self.gradient[slot.start : slot.start + slot.padded]
