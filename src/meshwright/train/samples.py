"""The record of which samples a run consumed, and in which order, whatever the layout."""

from __future__ import annotations

import hashlib

import torch

from meshwright.data.loader import Batch
from meshwright.parallel.collectives import gather_rows
from meshwright.parallel.mesh import Mesh


class SampleRecord:
    """A hash chain over the sample ids of each step: d(s) = SHA-256(d(s-1), ids of step s by their slots).

    Ranks note what they were fed; `digest` brings the notes together, so that two runs have equal digests
    only if they consumed equal samples in an equal order.
    """

    def __init__(self, mesh: Mesh, digest: str = "") -> None:
        self.mesh, self._chain = mesh, digest
        self._noted: list[torch.Tensor] = []

    def note(self, batch: Batch) -> None:
        """Take down the samples of one step; only one rank of those that read the same samples counts."""
        self._noted.append(torch.stack([batch.slots, batch.ids]))

    def digest(self) -> str:
        """The chain up to the last noted step; every rank calls this and gets the same."""
        if self._noted:
            noted = gather_rows(torch.stack(self._noted), self.mesh.data)  # (ranks, steps, 2, samples)
            # The stages of a pipeline read the same samples, and so do a sequence's ranks.
            noted = noted[: noted.shape[0] // self.mesh.pipeline.size : self.mesh.context.size]
            for step in range(noted.shape[1]):
                slots, ids = noted[:, step, 0].reshape(-1), noted[:, step, 1].reshape(-1)
                order = torch.argsort(slots)
                ids, slots = ids[order], slots[order]
                if not torch.equal(slots, torch.arange(len(slots))):
                    raise RuntimeError(
                        f"the ranks' samples are not each slot of the batch once: {slots.tolist()}"
                    )
                self._chain = hashlib.sha256(self._chain.encode() + ids.numpy().tobytes()).hexdigest()
            self._noted.clear()
        return self._chain
