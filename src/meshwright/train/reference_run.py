"""The log-probabilities of a run's reference, computed once before its first step and kept in its folder."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from meshwright.comm.collectives import start_all_reduce
from meshwright.comm.mesh import Mesh
from meshwright.data.corpus import Corpus
from meshwright.data.loader import Batch, SplitReader
from meshwright.data.split_samples import Split
from meshwright.parallel.preference import Preference
from meshwright.parallel.stored_reference import SIDES, Side, StoredReference
from meshwright.spec import UserError
from meshwright.train.digest import parameters_sha256
from meshwright.train.step import Trainer

FILE = "reference-log-probs.npz"
"""Name of the file in a run's folder."""
KEY = "preference.precompute_ref_log_probs"


class ReferenceRun:
    """The stored reference of a run in the folder `out`; does nothing in a run without one."""

    def __init__(self, trainer: Trainer, corpus: Corpus, out: Path) -> None:
        self._trainer, self._corpus, self._path = trainer, corpus, out / FILE
        parts = [part for part in trainer.parts if isinstance(part, Preference)]
        self._part = next((part for part in parts if part.how.precompute_ref_log_probs), None)

    def begin(self) -> None:
        """Compute it with the weights that the run begins with, or take what the folder has of them; all
        ranks call this. Raises `UserError` for one of another model or of other data."""
        if self._part is None:
            return
        mesh, model = self._trainer.mesh, parameters_sha256(self._trainer)
        kept = mesh.control.together(self._kept)
        if kept is None:
            kept = StoredReference({side: self._sums(side) for side in SIDES}, model, self._data)
            made = kept
            mesh.control.together(lambda: made.save(self._path) if mesh.rank == 0 else None)
        elif kept.model != model:
            raise UserError(
                f"{KEY}: {self._path} is of another model (digest {kept.model[:12]}, and the run begins with "
                f"{model[:12]}); remove it, or give another --out"
            )
        self._part.stored = kept

    def resume(self) -> None:
        """Take what the folder has. Raises `UserError` where that is nothing, or of other data; the
        checkpoint tells whether it is the same (`Preference.check`)."""
        if self._part is None:
            return
        kept = self._trainer.mesh.control.together(self._kept)
        if kept is None:
            raise UserError(
                f"{KEY}: {self._path} is not there, and the model that it was computed with has been trained "
                f"since; put it back, or begin a run in another --out"
            )
        self._part.stored = kept

    @property
    def _data(self) -> str:
        judged = self._trainer.spec.preference is not None and self._trainer.spec.preference.judged
        return f"{self._corpus.digest} {'judged' if judged else 'pairs'}"

    def _kept(self) -> StoredReference | None:
        if not self._path.exists():
            return None
        kept = StoredReference.open(self._path)
        if kept.data != self._data:
            raise UserError(
                f"{KEY}: {self._path} is of other data (digest {kept.data[:12]}, now {self._data[:12]}); "
                f"give the data that it had, or another --out"
            )
        return kept

    def _sums(self, side: Side) -> NDArray[np.float64]:
        """The sums of the samples of a side, which the ranks share out."""
        trainer, part = self._trainer, self._part
        assert part is not None
        mesh, split = trainer.mesh, self._corpus.train if side == "train" else self._corpus.validation
        found = [(batch.ids, part.reference_sums(batch)) for batch in _batches(trainer, split, mesh)]
        widest = max((sums.shape[1] for _, sums in found), default=0)
        width = mesh.control.broadcast(max(mesh.control.gather(widest), default=0))
        table = torch.zeros(split.samples, width, dtype=torch.float64, device=mesh.device)
        for ids, sums in found:
            real = (ids >= 0).to(mesh.device)
            if part.counts:
                table[ids.to(mesh.device)[real], : sums.shape[1]] = sums[real].double()
        start_all_reduce(table, mesh.world, "reference").wait()
        return table.cpu().numpy()


def _batches(trainer: Trainer, split: Split, mesh: Mesh) -> Iterator[Batch]:
    """All samples of a split as batches of this data rank."""
    reader = SplitReader(split, trainer.spec, mesh.data_rank, trainer.spec.layout.data_ranks)
    for source in range(len(reader.split.sizes)):
        yield from mesh.control.together(partial(reader.batches, None, source))
        mesh.control.together(reader.check)
