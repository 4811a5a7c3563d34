"""The events of a step on a faked GPU, in the order in which the host issues them.

Readers count them (`trace_counts.py`), follow clocks of the host and of each stream, look for accesses that
no event orders, or for what no CUDA graph could hold. Nothing is timed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree

from meshwright.dryrun.events import RESIZED, ByteRange, Direction, Event, HostCost, Kind
from meshwright.dryrun.graph_replays import CapturedGraph
from meshwright.dryrun.kernel_shapes import counted_flops, work_of
from meshwright.dryrun.memory_tracker import launches, waits_for_device
from meshwright.fake_cuda.runtime import DEFAULT_STREAM, RUNTIME
from meshwright.kernels.cross_entropy import multiply_

_aten = torch.ops.aten
_MOVES = {_aten.copy_, _aten._to_copy, _aten.clone, _aten.cat, _aten._foreach_copy_}
"""Operators that only move numbers, or change their format."""
_OVERWRITES = {_aten.copy_, _aten.zero_, _aten.fill_, _aten.normal_, _aten.uniform_, _aten._foreach_copy_,
               _aten._foreach_zero_}  # fmt: skip
"""Operators in place that do not read what they write."""
_LOOKS_UP = {_aten.embedding, _aten.index, _aten.gather, _aten.index_select, _aten.take}
"""Operators that read of their first argument no more than they write."""
_SCATTERS = {_aten.scatter_, _aten.scatter_add_, _aten.index_add_, _aten.index_put_, _aten._index_put_impl_,
             _aten.index_copy_}  # fmt: skip
"""Operators that write of their first argument no more than they read of the others."""
_UNLESS_ONE = {multiply_.overloadpacket}
"""Operators that move nothing where their factor is 1, as gradients of losses in training are."""


@cache
def _written(func: Any) -> frozenset[int | str]:
    """The places and names of arguments that an operator writes."""
    arguments = enumerate(func._schema.arguments)
    written = [
        (at, each) for at, each in arguments if each.alias_info is not None and each.alias_info.is_write
    ]
    return frozenset(each.name if each.kwarg_only else at for at, each in written)


def _tensors(value: Any) -> Sequence[Tensor]:
    if isinstance(value, Tensor):
        return (value,)
    if isinstance(value, (list, tuple, dict)):
        return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]
    return ()


def _extent(x: Tensor) -> int:
    """Elements from the first of `x` to its last, in its storage."""
    return (
        1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
        if x.numel()
        else 0
    )


def _moved(tensors: Sequence[Tensor]) -> int:
    """Bytes of tensors; elements that a view repeats once."""
    return sum(min(x.numel(), _extent(x)) * x.element_size() for x in tensors)


@dataclass
class Trace:
    """Records the events of one device: it hears of operators, of streams and of collectives."""

    device: torch.device
    events: list[Event] = field(default_factory=list)
    phase: str = ""
    module: str = ""
    _storages: dict[int, int] = field(default_factory=dict)
    """Storage, by its address in torch, -> number."""
    _streams: dict[int, int] = field(default_factory=dict)
    """Number -> the stream that it was allocated on."""
    _host: set[int] = field(default_factory=set)
    """Numbers of storages that stand for memory of the host."""
    _groups: dict[str, int] = field(default_factory=dict)
    """Process group -> its stream."""
    _begun: list[tuple[Any, Any]] = field(default_factory=list)
    """Operators of the collective whose call is being made."""
    _graphs: dict[int, CapturedGraph] = field(default_factory=dict)
    _capturing: CapturedGraph | None = None
    _launches: int = 0
    """Launches of graphs."""
    capture: Callable[[bool], None] = lambda _: None
    """Called with True before a graph is captured, and with False after it."""
    _allocations: int = 0
    _thread: int = field(default_factory=threading.get_ident)
    """That of the program; what another one waits for holds up none of it."""

    def add(self, kind: Kind, name: str, host: HostCost, stream: int | None = None, **facts: Any) -> None:
        """Record an event, by default on the stream that is used now."""
        stream = RUNTIME.stream if stream is None else stream
        events = self.events if self._capturing is None else self._capturing.events
        events.append(Event(kind, name, host, stream, self.phase, self.module, **facts))

    def on_phase(self, name: str, _step: int) -> None:
        """The rank enters a phase of its step."""
        self.phase = name

    # Storages ---------------------------------------------------------------------------------------

    def on_allocate(self, key: int, size: int) -> None:
        """A storage is there, or has another size than before."""
        if key not in self._storages:
            self._storages[key] = self._allocations
            self._allocations += 1
        number = self._storages[key]
        # What a graph allocates is used on the stream of its replays, and by no capture before their ends.
        self._streams[number] = RUNTIME.stream if self._capturing is None else DEFAULT_STREAM
        self.add("allocate", "", "none", writes=(ByteRange(number, 0, size),), bytes=size)

    def on_free(self, key: int, size: int, gone: bool) -> None:
        """A storage is freed, which is `gone` or may be allocated again."""
        number = self._storages.pop(key) if gone else self._storages[key]
        name = "" if gone else RESIZED
        self.add(
            "free", name, "none", self._streams[number], writes=(ByteRange(number, 0, size),), bytes=size
        )

    def on_elsewhere(self, key: int) -> None:
        """A storage stands for memory of the host."""
        self._host.add(self._storages[key])

    def _number(self, x: Tensor) -> int | None:
        """The number of a tensor's storage on the device; None for one elsewhere."""
        if not isinstance(x, FakeTensor) or x.fake_device != self.device:
            return None
        number = self._storages.get(x.untyped_storage()._cdata)
        return None if number in self._host else number

    def _here(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        return [x for x in tensors if self._number(x) is not None]

    def _spans(self, tensors: Sequence[Tensor]) -> tuple[ByteRange, ...]:
        found = []
        for x in tensors:
            number = self._number(x)
            if number is not None and x.numel():
                start = int(x.storage_offset()) * x.element_size()
                found.append(ByteRange(number, start, start + _extent(x) * x.element_size()))
        return tuple(dict.fromkeys(found))

    # Operators --------------------------------------------------------------------------------------

    def on_operator(self, func: Any, args: Any, kwargs: Any, result: Any, module: str) -> None:
        """The host has called an operator on tensors of the device."""
        self.module = module
        if func.namespace == "c10d":
            self._begun.append((func, args))
            return
        if not self._here(_tensors([args, kwargs, result])):
            return
        name, packet = func.name(), func.overloadpacket
        if launches(func):
            reads, writes = self._accesses(func, args, kwargs, result)
            direction = self._direction(packet, args, kwargs, result)
            if any(x.numel() for x in (*reads, *writes)):
                flops = counted_flops(func, args, kwargs, result)
                self.add(
                    "copy" if direction else "kernel", name, "operator",
                    reads=self._spans(reads), writes=self._spans(writes), direction=direction,
                    bytes=self._bytes(packet, reads, writes, direction),
                    flops=flops, work=work_of(func, args, kwargs, flops),
                )  # fmt: skip
            else:
                self.add("empty", name, "operator")
        else:
            self.add("view", name, "view")
        if self._waits(func, args, kwargs, result):
            way = self._direction(packet, args, kwargs, result)
            self.add("synchronize", f"{name}, {way}" if way else name, "wait", RUNTIME.stream)

    def on_kernel(
        self, name: str, reads: Sequence[Tensor], writes: Sequence[Tensor], size: int, module: str
    ) -> None:
        """Compiled code has launched a kernel that moves `size` bytes."""
        self.module = module
        self.add(
            "kernel", f"compiled::{name}", "compiled",
            reads=self._spans(reads), writes=self._spans(writes), bytes=size,
        )  # fmt: skip

    def _accesses(self, func: Any, args: Any, kwargs: Any, result: Any) -> tuple[list[Tensor], list[Tensor]]:
        """The tensors that an operator reads, and those that it writes."""
        written = _written(func)
        given = [*enumerate(args), *kwargs.items()]
        inputs = [(place in written, x) for place, value in given for x in _tensors(value)]
        reads = [x for writes, x in inputs if not writes]
        writes = [x for writes, x in inputs if writes]
        overwrites = func.overloadpacket in _OVERWRITES or "out" in func._schema.overload_name
        results = _tensors(result if isinstance(result, tuple) else [result])
        if writes:
            known = {self._number(x) for x in writes}
            made = [x for x in results if self._number(x) not in known]  # beside what it writes in place
            return reads if overwrites else [*writes, *reads], [*writes, *made]
        return reads, list(results)

    def _direction(self, packet: Any, args: Any, kwargs: Any, result: Any) -> Direction:
        """The direction of a copy; "" for what computes."""
        if packet not in _MOVES:
            return "device to host" if packet is _aten._local_scalar_dense else ""
        target = _tensors(args[0] if packet in _OVERWRITES else result)
        source = _tensors(args[1] if packet in _OVERWRITES else args)
        if not self._here(target):
            return "device to host"
        return "device to device" if self._here(source) or not source else "host to device"

    def _bytes(
        self, packet: Any, reads: Sequence[Tensor], writes: Sequence[Tensor], direction: Direction
    ) -> int:
        """Bytes that an operator moves between the device's memory and its processors, or over the bus."""
        if direction in ("host to device", "device to host"):
            return _moved(writes) or _moved(reads)
        if packet in _UNLESS_ONE:
            return 0
        if packet in _LOOKS_UP:
            return 2 * _moved(writes) + _moved(reads[1:])
        if packet in _SCATTERS:
            others = _moved([x for x in reads if all(x is not each for each in writes)])
            return min(3 * others, others + 2 * _moved(writes))
        return _moved(reads) + _moved(writes)

    def _waits(self, func: Any, args: Any, kwargs: Any, result: Any) -> bool:
        """True if the host waits for the device in an operator.

        A copy that may block waits for its stream in both directions: `copy_kernel_cuda` of torch.
        """
        packet = func.overloadpacket
        if packet in (_aten.copy_, _aten._to_copy):
            blocking = not (args[2] if len(args) > 2 else kwargs.get("non_blocking", False))
            direction = self._direction(packet, args, kwargs, result)
            return blocking and direction in ("host to device", "device to host")
        return waits_for_device(func, args, kwargs, self.device) > 0

    # Streams ----------------------------------------------------------------------------------------

    def on_record(self, event: int, stream: int) -> None:
        self.add("record", "", "stream", stream, number=event)

    def on_wait(self, stream: int, event: int) -> None:
        self.add("wait", "", "stream", stream, number=event)

    def on_synchronize(self, event: int | None, stream: int | None) -> None:
        if threading.get_ident() != self._thread:
            return
        name = "device" if event is stream is None else "stream" if event is None else "event"
        number = -1 if event is None else event
        self.add("synchronize", name, "wait", -1 if stream is None else stream, number=number)

    # Graphs -----------------------------------------------------------------------------------------

    def on_capture(self, graph: int, stream: int) -> None:
        self.capture(True)
        self._capturing = self._graphs[graph] = CapturedGraph(stream)

    def on_captured(self, graph: int) -> None:
        self._capturing = None
        self.capture(False)

    def on_replay(self, graph: int) -> None:
        self.events += self._graphs[graph].replayed(self._launches, {*self._storages.values()})
        self._launches += 1

    # Collectives ------------------------------------------------------------------------------------

    def started(self, axis: str, operation: str, sent: float) -> int:
        """A call of a collective has been made, of the operators since the last; returns its number."""
        reads: list[Tensor] = []
        writes: list[Tensor] = []
        group, lane = None, None
        for func, args in self._begun:
            read, written = _exchanged(func, args)
            reads += read
            writes += written
            boxed = next(x for x in args if isinstance(x, torch.ScriptObject))
            group = dist.ProcessGroup.unbox(boxed)
            lane = _lane(func, args, group)
        self._begun.clear()
        if group is None:  # of no elements: nothing is sent
            return RUNTIME.new_event()
        lane = lane if operation in ("send", "receive") else None
        return self.sent(axis, operation, group, reads, writes, sent, lane)

    def sent(
        self,
        axis: str,
        operation: str,
        group: dist.ProcessGroup,
        reads: Sequence[Tensor],
        writes: Sequence[Tensor],
        size: float | None = None,
        lane: tuple[int, int, int] | None = None,
    ) -> int:
        """An exchange of tensors with other ranks has begun, by default of all that it reads; returns its
        number. `size` is in bytes, `lane` that of a message."""
        number = RUNTIME.new_event()
        if group.group_name not in self._groups:
            self._groups[group.group_name] = RUNTIME.new_stream()
        self.add(
            "collective", operation, "collective", self._groups[group.group_name],
            reads=self._spans(reads), writes=self._spans(writes), number=number, axis=axis,
            bytes=_moved(reads) if size is None else size,
            group=group.group_name, ranks=group.size(), stride=_stride(group), after=RUNTIME.stream,
            lane=lane,
        )  # fmt: skip
        return number

    def waited(self, number: int) -> None:
        """Work on the stream that is used now starts after the end of a collective from now on."""
        self.add("wait", "", "stream", number=number)


def _stride(group: dist.ProcessGroup) -> int:
    """The distance between a group's ranks in the world."""
    ranks = dist.get_process_group_ranks(group)
    return ranks[1] - ranks[0] if len(ranks) > 1 else 1


def _lane(func: Any, args: Any, group: dist.ProcessGroup) -> tuple[int, int, int] | None:
    """The sender, the receiver and the tag of a message; None for a collective."""
    if func.name() not in ("c10d::send", "c10d::recv_"):
        return None
    peer, own, tag = dist.get_global_rank(group, args[2]), dist.get_rank(), args[3]
    return (own, peer, tag) if func.name() == "c10d::send" else (peer, own, tag)


def _exchanged(func: Any, args: Any) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
    """The tensors that an operator of a collective reads, and those that it writes."""
    first, second = _tensors(args[0]), _tensors(args[1])
    match func.name():
        case "c10d::send":
            return first, ()
        case "c10d::recv_" | "c10d::recv_any_source_":
            return (), first
    return second or first, first
