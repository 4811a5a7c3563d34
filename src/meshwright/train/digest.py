"""Digests of parameters and of samples that no rank has to gather: each rank sums hashes of what it has.

The hash of an element depends on its place and its bits, and sums modulo 2^64 do not depend on order, so
equal parameters have equal digests in any layout. A sum of 64-bit hashes finds every accident, but withstands
no forger.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from meshwright.comm.collectives import start_all_reduce
from meshwright.comm.mesh import Mesh
from meshwright.data.loader import Batch
from meshwright.kernels.splitmix64 import mix64_, stream
from meshwright.model.init import flat_indices
from meshwright.parallel.flat_param import ParamSlot
from meshwright.spec.parameter_groups import run_parameters
from meshwright.train.step import Trainer

_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Bytes of an element -> integers of that width."""


def parameters_sha256(trainer: Trainer) -> str:
    """SHA-256 over names, formats, shapes and summed hashes of all parameters.

    It is equal for equal parameters in any layout. Every rank calls this, and all get it. Each hashes
    what it stores; what crosses the wire is 8 bytes for each parameter of the model.
    """
    mesh, states = trainer.mesh, trainer.states
    units = run_parameters(trainer.spec)
    shapes = {parameter.name: parameter.shape for listed in units.values() for parameter in listed}
    places = {name: place for place, name in enumerate(sorted(shapes))}
    formats = {
        p.name: states.formats.master if p.trainable else states.formats.compute
        for listed in units.values()
        for p in listed
    }
    sums = torch.zeros(len(places), dtype=torch.int64, device=mesh.device)
    for unit in states.units:
        for slot in unit.counted_slots(states.elsewhere):
            sums[places[slot.key]] += _sum_of_hashes(unit.values(slot), slot)
    start_all_reduce(sums, mesh.world, "digest").wait()
    rows = [
        f"{name} {formats[name]} {shapes[name]} {total}\n"
        for name, total in zip(places, sums.tolist(), strict=True)
    ]
    return hashlib.sha256("".join(rows).encode()).hexdigest()


@torch.no_grad()
def _sum_of_hashes(local: Tensor, slot: ParamSlot) -> Tensor:
    """The sum of hashes of (parameter, place in the whole, bits) of a part of a parameter, modulo 2^64."""
    key = int.from_bytes(hashlib.sha256(slot.key.encode()).digest()[:8], "little")
    first, *rest = slot.indices()
    first = first[first < slot.global_shape[0]]  # beyond the whole is padding
    bits = local[: len(first)].contiguous().view(_INTEGERS[local.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=local.device)
    for rows, index in flat_indices([first, *rest], slot.global_shape, local.device):
        total += mix64_(mix64_(stream(index, key)).bitwise_xor_(bits[rows])).sum()
    return total


class SampleRecord:
    """A hash chain over the samples of each step: d(s) = SHA-256(d(s-1), summed hashes of slots and ids).

    Ranks note what they were fed; `digest` sums the notes over all ranks, so that two runs have equal digests
    only if they consumed equal samples in an equal order.
    """

    def __init__(self, mesh: Mesh, digest: str = "", steps: int = 0) -> None:
        self.mesh, self.chain, self.steps = mesh, digest, steps
        """`chain` is the digest of the first `steps` steps; those after are noted only."""
        self._noted: list[Tensor] = []

    def note(self, batch: Batch) -> None:
        """Take down the samples of one step."""
        slots = mix64_(stream(batch.slots, 1))
        samples = mix64_(slots.bitwise_xor(stream(batch.ids, 2)))
        self._noted.append(torch.stack([torch.tensor(len(slots)), slots.sum(), samples.sum()]))

    def digest(self) -> str:
        """The chain up to the last noted step; every rank calls this and gets the same."""
        if not self._noted:
            return self.chain
        mesh = self.mesh
        # The stages of a pipeline read the same samples, and so do a sequence's ranks.
        first = mesh.pipeline.rank == mesh.context.rank == mesh.tensor.rank == 0
        sums = torch.stack(self._noted).to(mesh.device) * first
        start_all_reduce(sums, mesh.world, "digest").wait()
        for count, slots, samples in sums.tolist():
            expected = mix64_(stream(torch.arange(count), 1)).sum()
            if slots != int(expected):
                raise RuntimeError(f"the ranks' {count} samples are not each slot of the batch once")
            self.chain = hashlib.sha256(f"{self.chain} {samples}".encode()).hexdigest()
        self.steps += len(self._noted)
        self._noted.clear()
        return self.chain
