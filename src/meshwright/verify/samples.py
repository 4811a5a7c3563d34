"""Each rank's samples beside those that the reference has in the same slots of the global batch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from hashlib import sha256

from torch import Tensor

from meshwright.comm.mesh import Mesh
from meshwright.data.loader import Batch
from meshwright.spec import RunSpec
from meshwright.verify.compare import Difference
from meshwright.verify.reference.steps import SAMPLES


def gather_samples(batch: Batch, mesh: Mesh) -> list[tuple[int, list[str]]]:
    """Return each rank's data rank, and the SHA-256 of each of the `SAMPLES`; collective over the mesh."""
    return mesh.control.gather([mesh.data_rank, [_digest(getattr(batch, name)) for name in SAMPLES]])


def compare_samples(
    step: int, found: list[tuple[int, list[str]]], wanted: Mapping[str, Tensor], spec: RunSpec
) -> Iterator[Difference]:
    """Compare the ranks' samples with the reference's, (n, T) of the whole batch, field by field."""
    rows = spec.rank_sequences
    for number, name in enumerate(SAMPLES):
        parts = [_digest(part) for part in wanted[name].split(rows)]
        wrong = [rank for rank, (data, digests) in enumerate(found) if digests[number] != parts[data]]
        detail = ""
        if 0 < len(wrong) < len(found):
            detail = f"on rank{'s' if len(wrong) > 1 else ''} {', '.join(map(str, wrong))}"
        yield Difference(step, "samples", name, math.inf if wrong else 0.0, detail=detail)


def _digest(values: Tensor) -> str:
    return sha256(values.contiguous().numpy().tobytes()).hexdigest()
