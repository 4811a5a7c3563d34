"""Activation offloading: what blocks save for their backward, in the host's memory until it comes.

Splits        nothing, and sends nothing to other ranks.
Wire          over a device's link to its host: every storage of `tiling().offload_bytes` or more that a block
              saves tensors in, once each way for each microbatch.
Saves         these storages, but for those of a stage's last block, whose backward comes first: their copies
              would have nothing to hide behind. While a block computes, those of the block before it leave;
              in the backward, those that the next one needs come. So one block's more are there.
Source        Rhu et al. 2016 (vDNN); Rajbhandari et al. 2020 (ZeRO, section 6.1) for inputs of blocks that
              are recomputed.

Parameters, what all blocks share (rotary tables, masks) and the input of a stage, which its pipeline holds,
stay. Under a policy of recomputation a block saves its input and the results that the policy names.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any
from weakref import ReferenceType, finalize, ref

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils import _pytree as pytree

from meshwright.spec.tiling import tiling


class HostMemory:
    """Room for activations at both ends of their way, and a count of the bytes in the host's memory."""

    def __init__(self) -> None:
        self._bytes = 0
        self.most = 0
        """Most bytes at a time."""

    def home(self, here: Tensor) -> Tensor:
        """An empty tensor like `here` in the host's memory."""
        home = self._allocate(here)
        self._change(home.nbytes)
        finalize(home, self._change, -home.nbytes)
        return home

    def room(self, home: Tensor, device: torch.device) -> Tensor:
        """An empty tensor like `home` on the device."""
        return torch.empty(home.shape, dtype=home.dtype, device=device)

    def _allocate(self, here: Tensor) -> Tensor:
        """An empty tensor like `here`, pinned if that is on a GPU, so that copies run beside it."""
        return torch.empty(here.shape, dtype=here.dtype, pin_memory=here.device.type == "cuda")

    def _change(self, size: int) -> None:
        self._bytes += size
        self.most = max(self.most, self._bytes)


class _Storage:
    """All elements of a storage: on the device, in the host's memory, or in both while they are copied."""

    def __init__(self, here: Tensor) -> None:
        self.here: Tensor | None = here
        self.home: Tensor | None = None


class _BlockPass:
    """A microbatch's pass through one block."""

    def __init__(self, following: _BlockPass | None) -> None:
        self.following = following
        """The pass whose backward follows: that of the block before."""
        self.saved: list[ReferenceType[SavedTensor]] = []
        """Tensors that the block saved, until its forward ends."""
        self.storages: list[ReferenceType[_Storage]] = []
        """Those that were moved; they live as long as the backward needs them."""
        self.came: torch.cuda.Event | None = None


class SavedTensor:
    """A tensor that a block saved: as it is, or as a view of a storage that is moved."""

    def __init__(self, tensor: Tensor, owner: _BlockPass) -> None:
        self.tensor: Tensor | None = tensor
        self.owner = owner
        self.storage: _Storage | None = None
        self.view: tuple[Sequence[int], Sequence[int], int] = (), (), 0
        """Its size, its strides, and where it begins in the storage."""

    def move(self, storage: _Storage) -> None:
        """Be a view of `storage` from now on."""
        tensor = self.tensor
        assert tensor is not None
        self.view = tensor.size(), tensor.stride(), int(tensor.storage_offset())
        self.tensor, self.storage = None, storage


class ActivationOffload:
    """Moves what blocks on `device` save: `attach` it to the blocks of each stage of this rank."""

    def __init__(self, device: torch.device) -> None:
        self.host = HostMemory()
        self._device = device
        cuda = device.type == "cuda"
        self._out, self._in = (torch.cuda.Stream(device) if cuda else None for _ in range(2))
        self._pass = _BlockPass(None)
        """The last block's whose forward began."""
        self._leaving: list[_Storage] = []
        self._left: torch.cuda.Event | None = None

    def attach(self, blocks: Sequence[nn.Module]) -> None:
        """Wrap the `forward` of a stage's blocks, which run one after another."""
        for block in blocks:
            first, last = block is blocks[0], block is blocks[-1]
            block.forward = partial(self._run, block, block.forward, first, last)

    def save(self, tensor: Tensor) -> SavedTensor:
        """Note a tensor that the block whose forward runs saves for its backward."""
        saved = SavedTensor(tensor, self._pass)
        self._pass.saved.append(ref(saved))
        return saved

    def load(self, saved: SavedTensor) -> Tensor:
        """The tensor that was saved, with its shape, strides and alignment."""
        if saved.tensor is not None:
            return saved.tensor
        self._wait(saved.owner)
        assert saved.storage is not None and saved.storage.here is not None
        return saved.storage.here.as_strided(*saved.view)

    def _run(
        self,
        block: nn.Module,
        forward: Callable[..., Tensor],
        first: bool,
        last: bool,
        x: Tensor,
        *shared: Any,
    ) -> Tensor:
        if not torch.is_grad_enabled():
            return forward(x, *shared)
        now = self._pass = _BlockPass(None if first else self._pass)
        with nullcontext() if last else saved_tensors_hooks(self.save, self.load):
            out = forward(x, *shared)
        self._settle()
        if not last:
            self._send(now, x, _storages(*block.parameters(), *pytree.tree_leaves(shared)))
        now.saved.clear()
        if out.requires_grad:
            out.register_hook(lambda _grad: self._before_backward(now))
        return out

    def _before_backward(self, now: _BlockPass) -> None:
        """Wait for what a block's backward needs, and start to fetch what that of the block before does."""
        self._wait(now)
        if now.following is not None:
            self._fetch(now.following)

    def _wait(self, now: _BlockPass) -> None:
        """Let the device wait until what a block saved is there."""
        self._fetch(now)
        if now.came is not None:
            torch.cuda.current_stream(self._device).wait_event(now.came)
            now.came = None

    @torch.no_grad()
    def _send(self, now: _BlockPass, x: Tensor, stay: set[int]) -> None:
        """Start to copy what a block saved to the host's memory, but for storages that `stay`."""
        if x.is_leaf:
            stay |= _storages(x)
        moved: dict[tuple[int, torch.dtype], _Storage] = {}
        for saved in filter(None, (each() for each in now.saved)):
            tensor = saved.tensor
            assert tensor is not None
            storage = tensor.untyped_storage()
            if tensor.device != x.device or storage.nbytes() < tiling().offload_bytes:
                continue
            if storage._cdata in stay:
                continue
            key = storage._cdata, tensor.dtype
            if key not in moved:
                whole = tensor.detach().as_strided((storage.nbytes() // tensor.itemsize,), (1,), 0)
                moved[key] = _Storage(whole)
            saved.move(moved[key])
        now.storages = [ref(each) for each in moved.values()]
        self._leaving = [*moved.values()]
        pairs = []
        for each in self._leaving:
            assert each.here is not None
            each.home = self.host.home(each.here)
            pairs.append((each.home, each.here))
        self._left = self._copy(self._out, pairs)

    def _settle(self) -> None:
        """Free what the block before saved on the device, once it is in the host's memory."""
        if self._left is not None:
            torch.cuda.current_stream(self._device).wait_event(self._left)
        for each in self._leaving:
            each.here = None
        self._leaving, self._left = [], None

    @torch.no_grad()
    def _fetch(self, now: _BlockPass) -> None:
        """Start to copy what a block saved to the device, where that has not begun."""
        away = [each for each in (storage() for storage in now.storages) if each and each.here is None]
        now.storages = []
        pairs = []
        for each in away:
            assert each.home is not None
            each.here = self.host.room(each.home, self._device)
            pairs.append((each.here, each.home))
            each.home = None
        now.came = self._copy(self._in, pairs) or now.came

    def _copy(
        self, stream: torch.cuda.Stream | None, pairs: Sequence[tuple[Tensor, Tensor]]
    ) -> torch.cuda.Event | None:
        """Copy to each first tensor from its second, beside what is computed on a GPU; returns the end of it.

        The copies wait for all that was launched before: both ends may be memory that it reads or writes.
        """
        if not pairs:
            return None
        if stream is not None:
            stream.wait_stream(torch.cuda.current_stream(self._device))
        with nullcontext() if stream is None else torch.cuda.stream(stream):
            for to, source in pairs:
                to.copy_(source, non_blocking=True)
        return None if stream is None else stream.record_event()


def _storages(*tensors: Any) -> set[int]:
    """The storages of those that are tensors."""
    return {each.untyped_storage()._cdata for each in tensors if isinstance(each, Tensor)}
