"""A CUDA graph's stand-in on processors: operators are recorded with their tensors, and computed again.

As with a graph, what is recorded is not computed, all that a replay reads and writes has the addresses that
it had then, and numbers of the host stay as they were.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, UntypedStorage
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

Call = tuple[Any, tuple[Any, ...], dict[str, Any], list[Tensor]]
"""An operator, its arguments, and results that have memory of their own."""


class TapedGraph(TorchDispatchMode):
    """The operators of what runs while it is entered; afterwards all memory is as it was before."""

    def __init__(self) -> None:
        super().__init__()
        self._calls: list[Call] = []
        self._own: set[int] = set()
        """Storages that were made meanwhile, by their addresses in torch."""
        self._kept: dict[int, tuple[UntypedStorage, Tensor]] = {}
        """Storages that were there before and are written, with their bytes."""
        self.replays = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for each in _written(func, args, kwargs):
            storage = each.untyped_storage()
            if storage._cdata not in self._own and storage._cdata not in self._kept:
                self._kept[storage._cdata] = storage, _bytes_of(storage).clone()
        given = {each.untyped_storage()._cdata for each in _tensors((args, kwargs))}
        there = pytree.tree_map_only(Tensor, _alias, (args, kwargs))
        found = func(*args, **kwargs)
        made = [_alias(each) for each in _tensors(found) if each.untyped_storage()._cdata not in given]
        self._own |= {each.untyped_storage()._cdata for each in made}
        self._calls.append((func, *there, made))
        return found

    def undo(self) -> None:
        """Give all that was written its values from before."""
        for storage, before in self._kept.values():
            _bytes_of(storage).copy_(before)

    def replay(self) -> None:
        """Compute again what was recorded."""
        self.replays += 1
        with torch._C._AutoDispatchBelowAutograd():
            for func, args, kwargs, made in self._calls:
                found = func(*args, **kwargs)
                if func.namespace == "c10d":
                    dist.Work.unbox(pytree.tree_leaves(found)[-1]).wait()
                    continue
                given = {each.untyped_storage()._cdata for each in _tensors((args, kwargs))}
                new = [each for each in _tensors(found) if each.untyped_storage()._cdata not in given]
                for place, each in zip(made, new, strict=True):
                    place.copy_(each)


class TapedCapture:
    """Records graphs on processors; `graphs` lists them all."""

    def __init__(self) -> None:
        self.graphs: list[TapedGraph] = []

    def __call__(self, work: Callable[[], None]) -> TapedGraph:
        graph = TapedGraph()
        with graph:
            work()
        graph.undo()
        self.graphs.append(graph)
        return graph


def _alias(x: Tensor) -> Tensor:
    """A tensor of the same memory, whose shape stays when the other's is changed in place."""
    return torch.empty(0, dtype=x.dtype).set_(x.untyped_storage(), x.storage_offset(), x.shape, x.stride())


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]


def _written(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """The tensors that an operator writes; of a message all, as their declarations do not say which."""
    if func.namespace == "c10d":
        return _tensors((args, kwargs))
    written: list[Tensor] = []
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[place] if place < len(args) else kwargs.get(argument.name)
            written += _tensors(value)
    return written


def _bytes_of(storage: UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(storage)
