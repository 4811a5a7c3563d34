"""A trainer's states in the host's memory while another program has the device.

What it saves: all of a rank's device memory but small buffers: master weights, their whole copies, moments,
averages. Storages are freed in place, so every view of them holds once they are back.
What crosses the link: master weights, moments and averages, once each way; whole copies are gathered anew.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from meshwright.train.step import Trainer


class StateOffload:
    """Moves the states of a trainer out of its device's memory and back, between two steps."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._homes: list[tuple[Tensor, Tensor]] = []
        """(tensor, copy of its storage on the host) of what is out."""

    @property
    def is_out(self) -> bool:
        """True while the states are in the host's memory."""
        return bool(self._homes)

    def offload(self) -> int:
        """Free the device's memory of the states; returns its bytes. Nothing where they are out already."""
        if self._homes:
            return 0
        freed = 0
        for unit in self._trainer.states.units:
            unit.expire()
            if not unit.aliased:
                freed += unit.full.untyped_storage().nbytes()
                unit.release_storage()
        for tensor in self._kept():
            storage = tensor.untyped_storage()
            copy = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=tensor.is_cuda)
            copy.copy_(_bytes_of(tensor))
            self._homes.append((tensor, copy))
            freed += storage.nbytes()
        if self._trainer.mesh.device.type == "cuda":
            torch.cuda.synchronize(self._trainer.mesh.device)
        for tensor, _ in self._homes:
            tensor.untyped_storage().resize_(0)
        if self._trainer.mesh.device.type == "cuda":
            torch.cuda.empty_cache()
        return freed

    def onload(self) -> None:
        """Put the states back where they were, to the bit."""
        for tensor, copy in self._homes:
            tensor.untyped_storage().resize_(copy.nbytes)
            _bytes_of(tensor).copy_(copy)
        self._homes = []

    def _kept(self) -> Iterator[Tensor]:
        """One tensor of each storage on the mesh's device that outlives a step."""
        trainer, seen = self._trainer, set[int]()
        tensors = [unit.stored for unit in trainer.states.units]
        tensors += [flat for flats in trainer.optimiser.moments.values() for flat in flats]
        tensors += [tensor for part in trainer.parts for _, tensor in part.held()]
        for tensor in tensors:
            storage = tensor.untyped_storage()
            kept = storage.nbytes() and storage.resizable()  # NumPy shares some of the host's, once saved
            if tensor.device == trainer.mesh.device and kept and storage._cdata not in seen:
                seen.add(storage._cdata)
                yield tensor


def _bytes_of(tensor: Tensor) -> Tensor:
    """All bytes of a tensor's storage, as a tensor that shares them."""
    empty = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return empty.set_(tensor.untyped_storage())
