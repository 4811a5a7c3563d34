"""Tensors without memory on one device, and a count of the bytes that they would take.

On the device that is faked every tensor is one of torch's FakeTensors: it has a shape, a format and a storage
of so many bytes, and no values. Tensors of the host stay real, so what is planned there is planned as ever:
the program tells the two apart everywhere, since a GPU would ask it to. To fake the CPU itself its device has
an index, `cpu:0`, which the host's tensors have not.

A storage counts from the operator that makes it until nothing holds it, wherever that is: autograd's graph, a
message under way, a view. What is inside an operator is not seen, but for those whose bodies are given.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor, UntypedStorage
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed._meta_registrations import create_fakework
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

_aten = torch.ops.aten
PLAIN = "temporaries"
"""Kind of storages that were never marked."""
COLLECTIVES, MESSAGES = "collectives", "messages"
"""Tensors that ranks of an axis share a collective over, and those that one gives another."""

_POINT_TO_POINT = ("c10d::send", "c10d::recv_", "c10d::recv_any_source_")
_WITHOUT_META = ("c10d::allgather_into_tensor_coalesced_", "c10d::reduce_scatter_tensor_coalesced_")
"""Collectives that torch gives no result of without values."""
ASSUMED = 1.0
"""Value that the host reads from a fake scalar."""

_WAITS = {
    _aten._local_scalar_dense.default: 1,
    _aten.bincount.default: 2,  # CUDA's looks for the least and the largest value
    _aten.nonzero.default: 1,
    _aten.masked_select.default: 1,
    _aten._unique2.default: 1,
}
"""Operators in which the host waits for the device, and how often."""
_peaks_inside: dict[Any, int] = {}
"""(device, body, shapes and other arguments) of an operator -> the most bytes that it takes while it runs."""
_NO_KERNEL = (
    "aten::empty", "aten::new_empty", "aten::resize_", "aten::set_", "aten::detach", "aten::_unsafe_view",
    "prim::",
)  # fmt: skip


@cache
def launches(func: Any) -> bool:
    """True for an operator that launches work on the device: not for a view, or for room without values."""
    if func.namespace == "c10d" or func.name().startswith(_NO_KERNEL):
        return False
    returns = func._schema.returns
    return not any(each.alias_info is not None and not each.alias_info.is_write for each in returns)


@cache
def _is_composed(func: Any) -> bool:
    """True for an operator of others, such as `linear`, which comes here where no gradient is recorded."""
    composed = torch._C.DispatchKey.CompositeImplicitAutograd
    return func.has_kernel_for_dispatch_key(composed) and not func.has_kernel_for_dispatch_key("CUDA")


@cache
def _written(func: Any) -> int | str | None:
    """The argument, by place or name, that an operator writes and returns: with no values nothing is done."""
    returns, name = func._schema.returns, func._schema.name
    if func.namespace != "aten" or len(returns) != 1 or name in ("aten::resize_", "aten::set_"):
        return None
    if returns[0].alias_info is None or not returns[0].alias_info.is_write:
        return None
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            return argument.name if argument.kwarg_only else place
    return None


@dataclass(eq=False, slots=True)
class TrackedStorage:
    """A storage: its bytes, what it is for, the part of the model that it serves, and when it was made."""

    size: int
    kind: str
    module: str
    born: int = 0


def waits_for_device(func: Any, args: Any, kwargs: Any, device: torch.device) -> int:
    """How often the host waits for the device in an operator."""
    if func is _aten.index.Tensor:
        return int(any(index is not None and index.dtype == torch.bool for index in args[1]))
    if func is _aten.repeat_interleave.Tensor:
        return int(kwargs.get("output_size") is None)
    if func is _aten.copy_.default:
        blocking = not (args[2] if len(args) > 2 else False)
        return int(blocking and args[0].device != device and args[1].device == device)
    if func is _aten._to_copy.default:
        blocking = not kwargs.get("non_blocking", False)
        return int(blocking and args[0].device == device and kwargs.get("device", device) != device)
    return _WAITS.get(func, 0)


class _WithoutValues(FakeTensorMode):
    """Else a single number that is copied from the host would stay there, with its value."""

    def may_turn_const(self, t: Tensor) -> bool:
        return False


class MemoryObserver(Protocol):
    """Hears of operators on the device that is faked, and of its storages, by a key while they are there."""

    def on_operator(self, func: Any, args: Any, kwargs: Any, result: Any, module: str) -> None:
        """An operator has been called, which serves `module`."""
        ...

    def on_kernel(
        self, name: str, reads: Sequence[Tensor], writes: Sequence[Tensor], size: int, module: str
    ) -> None:
        """A kernel of compiled code has been launched, which moves `size` bytes and serves `module`."""
        ...

    def on_allocate(self, key: int, size: int) -> None:
        """A storage of `size` bytes is there, or has this size now."""
        ...

    def on_free(self, key: int, size: int, gone: bool) -> None:
        """A storage of `size` bytes is freed: it is `gone`, or gets another size."""
        ...

    def on_elsewhere(self, key: int) -> None:
        """A storage stands for memory of the host."""
        ...


class FakeMemory(TorchDispatchMode):
    """Fakes one device while it is entered, and counts. `bodies` says what operators compute inside.

    `programs` are run in the place of operators: what they call is seen, such as the messages that they send.

    `now` counts the storages made so far, `kinds` the bytes that are there by kind; `most` is the most that
    there were of each kind at a time, and `peak` of all together. `operators` counts what is launched on the
    device by the part of the model that it serves, and `waits` how often the host waits for what it launched.
    """

    def __init__(
        self,
        device: torch.device,
        bodies: Mapping[Any, Callable[..., Any]] | None = None,
        observer: MemoryObserver | None = None,
        programs: Mapping[Any, Callable[..., Any]] | None = None,
    ) -> None:
        super().__init__()
        self.device, self.bodies, self.observer = device, bodies or {}, observer
        self.programs = programs or {}
        self.now = self.total = self.peak = 0
        self.kinds: Counter[str] = Counter()
        self.most: Counter[str] = Counter()
        self.kind, self.module = PLAIN, ""
        self.operators: Counter[str] = Counter()
        self.waits = 0
        self._busy = False
        """True if anything was launched since the host last waited."""
        self._fake = _WithoutValues(allow_non_fake_inputs=True)
        self._held: dict[int, TrackedStorage] = {}
        self._peak_at = 0
        self._pool = self._kept = self._base = self._high = 0
        """Bytes of the pool of CUDA graphs, and those of them that outlive a capture; bytes before a capture,
        and the most since."""
        self._idle: TrackedStorage | None = None
        self._gone: list[TrackedStorage] = []
        """Storages that existed at the peak and have been freed since."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """True: a compiler sees the program without this mode, which then sees what its code calls."""
        return True

    # Operators --------------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.prim.device.default:
            return args[0].fake_device if isinstance(args[0], FakeTensor) else args[0].device
        leaves = pytree.arg_tree_leaves(*args, **kwargs)
        made_here = kwargs.get("device") == self.device
        if not made_here and not any(isinstance(x, FakeTensor) for x in leaves):
            return func(*args, **kwargs)
        composed = self.device.type == "cuda" and _is_composed(func)
        program = func.decompose if composed else self.programs.get(func)
        if program is not None:
            with self:
                return program(*args, **kwargs)
        self._count_operator(func, args, kwargs)
        found = self._found(func, types, args, kwargs, leaves)
        if self.observer is not None:
            self.observer.on_operator(func, args, kwargs, found, self.module)
        return found

    def _found(self, func: Any, types: Any, args: Any, kwargs: Any, leaves: list[Any]) -> Any:
        """The result of an operator."""
        if func is _aten._local_scalar_dense.default:
            return ASSUMED
        if func is _aten.bincount.default:  # its length is the data's; here all ask for as many as there are
            length = kwargs["minlength"] if "minlength" in kwargs else args[2]
            with self:
                return args[0].new_empty(length, dtype=torch.int64)
        if (written := _written(func)) is not None:
            return args[written] if isinstance(written, int) else kwargs[written]
        if func in self.bodies:
            self._look_inside(func, args, kwargs)
        if func.name() in _WITHOUT_META:
            found = create_fakework(args, return_first_arg=False)
        else:
            found = self._fake.dispatch(func, types, args, kwargs)
        for leaf in pytree.tree_leaves(found):
            if isinstance(leaf, FakeTensor):
                self._count(leaf)
        if func.namespace == "c10d":
            kind = MESSAGES if func.name() in _POINT_TO_POINT else COLLECTIVES
            for leaf in leaves:
                if isinstance(leaf, FakeTensor):
                    self.mark(leaf, kind, only=PLAIN)
        return found

    def _count_operator(self, func: Any, args: Any, kwargs: Any) -> None:
        waits = waits_for_device(func, args, kwargs, self.device)
        if waits and self._busy:  # reads in a row wait once
            self.waits += waits
            self._busy = False
        if func is not _aten._local_scalar_dense.default and (launches(func) or func.namespace == "c10d"):
            self.operators[self.module] += func.namespace != "c10d"
            self._busy = True

    def launched(self, name: str, reads: Sequence[Tensor], writes: Sequence[Tensor], size: int) -> None:
        """Count a kernel that compiled code launches, which moves `size` bytes."""
        self.operators[self.module] += 1
        self._busy = True
        if self.observer is not None:
            self.observer.on_kernel(name, reads, writes, size, self.module)

    def _look_inside(self, func: Any, args: Any, kwargs: Any) -> None:
        """Let what an operator makes inside, its results too, be there for a moment."""
        shapes = [(x.shape, x.dtype) if isinstance(x, Tensor) else x for x in args]
        key = (self.device, self.bodies[func], str(shapes))
        if key not in _peaks_inside:
            within = FakeMemory(self.device)
            within._fake = self._fake
            for x in args:
                if isinstance(x, Tensor):  # what is there already counts here
                    within._held[x.untyped_storage()._cdata] = TrackedStorage(0, PLAIN, "")
            with within:
                self.bodies[func](*args, **kwargs)
            _peaks_inside[key] = within.peak
        moment = TrackedStorage(_peaks_inside[key], PLAIN, self.module)
        self._add(moment)
        self._remove(moment)

    # Storages ---------------------------------------------------------------------------------------

    def _count(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._held and tensor.device == self.device:
            self._hold(key, storage.nbytes(), self.kind, self.module)
            if self.observer is not None:
                self.observer.on_allocate(key, storage.nbytes())
            weakref.finalize(storage, self._drop, key).atexit = False

    def _drop(self, key: int) -> None:
        """Take a storage from the count that nothing holds any more."""
        held = self._held.pop(key)
        self._remove(held)
        if self.observer is not None:
            self.observer.on_free(key, held.size, gone=True)

    def _hold(self, key: int, size: int, kind: str, module: str) -> None:
        held = self._held[key] = TrackedStorage(size, kind, module)
        self._add(held)

    def _add(self, held: TrackedStorage) -> None:
        self.now += 1
        held.born = self.now
        self.total += held.size
        self._high = max(self._high, self.total)
        self._change(held.kind, held.size)
        if self.total > self.peak:
            self.peak, self._peak_at = self.total, self.now
            self._gone.clear()

    def _remove(self, held: TrackedStorage) -> None:
        self.total -= held.size
        self.kinds[held.kind] -= held.size
        if held.born <= self._peak_at:
            self._gone.append(held)

    def _change(self, kind: str, size: int) -> None:
        self.kinds[kind] += size
        self.most[kind] = max(self.most[kind], self.kinds[kind])

    # Memory of graphs -------------------------------------------------------------------------------

    def begin_capture(self) -> None:
        """Let what is allocated from here on be in the pool of CUDA graphs, also where that has room."""
        if self._idle is not None:
            self._remove(self._idle)
            self._idle = None
        self._base = self._high = self.total

    def end_capture(self, kind: str) -> None:
        """Count the pool at its largest as `kind`, but for what is there still: nothing else may use it."""
        self._pool = max(self._pool, self._kept + self._high - self._base)
        self._kept += self.total - self._base
        self._idle = TrackedStorage(self._pool - self._kept, kind, "")
        self._add(self._idle)

    # What is told of them ---------------------------------------------------------------------------

    def resized(self, tensor: Tensor) -> None:
        """The storage of `tensor` has another size than before."""
        storage = tensor.untyped_storage()
        if self.observer is not None:
            key = storage._cdata
            if before := self._held[key].size:
                self.observer.on_free(key, before, gone=False)
            if size := storage.nbytes():
                self.observer.on_allocate(key, size)
        self.becomes(storage)

    def becomes(self, storage: UntypedStorage, kind: str | None = None, module: str | None = None) -> None:
        """Count a storage as newly allocated, of another kind or module where one is given."""
        key = storage._cdata
        before = self._held.pop(key)
        self._remove(before)
        kind, module = (
            old if new is None else new for old, new in ((before.kind, kind), (before.module, module))
        )
        self._hold(key, storage.nbytes(), kind, module)

    def elsewhere(self, tensor: Tensor) -> None:
        """Take the storage of `tensor` from the count: the program has it outside the device."""
        key = tensor.untyped_storage()._cdata
        held = self._held[key]
        if self.observer is not None:
            self.observer.on_elsewhere(key)
        self.total -= held.size
        self.kinds[held.kind] -= held.size
        held.size = 0

    def mark(self, tensor: Tensor, kind: str, module: str | None = None, only: str | None = None) -> None:
        """Set the kind of the storage of `tensor`; with `only`, just if its kind is `only` now."""
        held = self._held.get(tensor.untyped_storage()._cdata)
        if held is None or held.kind == kind or (only is not None and held.kind != only):
            return
        held.module = held.module if module is None else module
        self._set_kind(held, kind)

    def settle(self, since: int, kind: str) -> None:
        """Mark unmarked storages that were allocated after `since` (a value of `now`) and still exist as
        `kind`."""
        for held in self._held.values():
            if held.born > since and held.kind in (PLAIN, COLLECTIVES):
                self._set_kind(held, kind)

    def _set_kind(self, held: TrackedStorage, kind: str) -> None:
        self.kinds[held.kind] -= held.size
        held.kind = kind
        self._change(kind, held.size)

    @contextmanager
    def serving(self, module: str) -> Iterator[None]:
        """Context in which allocations are attributed to `module`."""
        before, self.module = self.module, module
        try:
            yield
        finally:
            self.module = before

    def at_peak(self) -> list[TrackedStorage]:
        """All storages that existed at the peak."""
        idle = [] if self._idle is None else [self._idle]
        there = (*self._gone, *self._held.values(), *idle)
        return [held for held in there if held.born <= self._peak_at]

    def restart(self) -> None:
        """Reset the peaks to what is allocated now."""
        self.peak, self._peak_at = self.total, self.now
        self._gone.clear()
        self.most = Counter(self.kinds)
