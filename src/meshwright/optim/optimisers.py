"""The class of each optimiser of `spec/optimisers.py`."""

from __future__ import annotations

from meshwright.optim.adamw_8bit import AdamW8bit
from meshwright.optim.muon import Muon
from meshwright.optim.optimiser import AdamW, Lion, Optimiser, Sgd
from meshwright.spec.optimisers import OptimiserName

OPTIMISER_CLASSES: dict[OptimiserName, type[Optimiser]] = {
    "adamw": AdamW, "adamw8bit": AdamW8bit, "lion": Lion, "muon": Muon, "sgd": Sgd
}  # fmt: skip
