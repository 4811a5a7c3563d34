"""Log-probabilities of the answers of all samples under a reference, which were computed before training.

They are numbers by sample and document, whole on every rank: 8 D bytes a sample of at most D document
numbers.
"""

from __future__ import annotations

import hashlib
import zipfile
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from meshwright import atomic
from meshwright.spec import UserError

Side = Literal["train", "validation"]
SIDES: tuple[Side, ...] = ("train", "validation")


@dataclass(frozen=True)
class StoredReference:
    """The sums (samples, D) in float64 of each side of a corpus, by the numbers of its samples.

    `model` is the digest of the weights that gave them, and `data` that of the corpus with the loss's kind.
    """

    sums: dict[Side, NDArray[np.float64]]
    model: str
    data: str

    @property
    def digest(self) -> str:
        """SHA-256 of all of it."""
        found = hashlib.sha256(f"{self.model} {self.data}".encode())
        for side in SIDES:
            found.update(self.sums[side].tobytes())
        return found.hexdigest()

    def of(self, side: Side, ids: Tensor, count: int) -> Tensor:
        """The sums (n, count) of samples; those of padding, which has the number -1, are 0."""
        table = self.sums[side]
        found = np.zeros((len(ids), count))
        real = ids.numpy() >= 0
        width = min(count, table.shape[1])
        found[real, :width] = table[ids.numpy()[real], :width]
        return torch.from_numpy(found)

    def save(self, path: Path) -> None:
        """Write them to a file, which appears whole. Raises `UserError` where that fails."""
        room = BytesIO()
        train, validation = (self.sums[side] for side in SIDES)
        np.savez(
            room, model=np.array(self.model), data=np.array(self.data), train=train, validation=validation
        )
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            atomic.write(path, room.getvalue())
        except OSError as error:
            raise UserError(
                f"preference.precompute_ref_log_probs: {path} cannot be written ({error}); give another --out"
            ) from error

    @classmethod
    def open(cls, path: Path) -> StoredReference:
        """Read them. Raises `UserError` for a file that is no such one."""
        try:
            with np.load(path, allow_pickle=False) as arrays:
                sums = {side: np.asarray(arrays[side], dtype=np.float64) for side in SIDES}
                return cls(sums, str(arrays["model"]), str(arrays["data"]))
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
            raise UserError(
                f"preference.precompute_ref_log_probs: {path} cannot be read ({error}); remove it to have "
                f"the log-probabilities of the reference computed again, in a run from step 0"
            ) from error
