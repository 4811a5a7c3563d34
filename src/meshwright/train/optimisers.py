"""The class of each optimiser of `spec/optimisers.py`."""

from __future__ import annotations

from meshwright.spec.optimisers import OptimiserName
from meshwright.train.adamw_8bit import AdamW8bit
from meshwright.train.muon import Muon
from meshwright.train.optimiser import AdamW, Lion, Optimiser, Sgd

OPTIMISER_CLASSES: dict[OptimiserName, type[Optimiser]] = {
    "adamw": AdamW, "adamw8bit": AdamW8bit, "lion": Lion, "muon": Muon, "sgd": Sgd
}  # fmt: skip
