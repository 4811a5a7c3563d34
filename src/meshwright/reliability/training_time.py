"""Days and money of a planned run with failures, by round assumptions where nothing has been measured.

Every device saves an equal part of the state: it copies it to its host's memory, for which training stands
still, and storage takes it in the background, as in `checkpoint/store.py`.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from meshwright.reliability.goodput import HOUR, Faults, Goodput, goodput, system_mtbf
from meshwright.units import short

DEVICE_MTBF_HOURS = 50_000.0
"""Mean hours between failures of one device: Llama 3 had 419 in 54 days on 16,384 (arXiv 2407.21783)."""
COPIED = 10e9
"""Bytes a second that a device copies to its host. Source: assumed, less than half of PCIe 4.0's 16 lanes."""
STORED = 2e12 / 16384
"""Bytes a second that storage takes of a device: Llama 3's sustained 2 TB/s for 16,384 (arXiv 2407.21783)."""
RESTART_SECONDS = 600.0
"""From a failure until training continues. Source: assumed; Llama 3's share of above 90% allows it."""


@dataclass(frozen=True)
class TrainingTime:
    """A whole run with failures, and what they were assumed to be."""

    faults: Faults
    goodput: Goodput
    checkpoint_bytes: float
    days: float
    """Failures included."""
    usd: float | None
    """Failures included; None where no price is known."""

    @property
    def words(self) -> str:
        """The assumed failures and what they leave, in a sentence."""
        mtbf = self.faults.mtbf_seconds / HOUR
        return (
            f"Failures are included: one each {DEVICE_MTBF_HOURS:,.0f} hours of a device is assumed (as in "
            f"Llama 3's runs), here one each {short(mtbf)} hours, {self.goodput.failures:,.0f} in all, with "
            f"restarts of {RESTART_SECONDS:g} s; saves of {self.checkpoint_bytes / 1e9:,.4g} GB every "
            f"{self.goodput.interval_steps:,} steps leave {self.goodput.effective:.2%} of the time effective"
        )

    def to_json(self) -> dict[str, Any]:
        """Plain values: the assumptions, and the shares of the time as `meshwright goodput` has them."""
        found = self.goodput
        return {
            "device_mtbf_hours": DEVICE_MTBF_HOURS,
            **asdict(self.faults),
            "checkpoint_bytes": self.checkpoint_bytes,
            "interval_steps": found.interval_steps,
            "expected": found.failures,
            **{name: getattr(found, name) for name in ("effective", "saving", "lost_work", "restarting")},
        }


def training_time(
    checkpoint_bytes: float,
    devices: int,
    step_seconds: float,
    batch_tokens: int,
    tokens: float,
    price: float | None,
) -> TrainingTime:
    """A run of `tokens` on `devices`, each at `price` USD an hour, with saves at the best interval.

    Raises `UserError` where failures come so often that almost no checkpoint would be complete.
    """
    mtbf, each = system_mtbf(None, DEVICE_MTBF_HOURS, devices), checkpoint_bytes / devices
    faults = Faults(mtbf, each / COPIED, RESTART_SECONDS, each / STORED)
    found = goodput(
        step_seconds, faults, batch_tokens=batch_tokens, tokens=tokens, devices=devices, price=price or None
    )
    assert found.days is not None
    return TrainingTime(faults, found, checkpoint_bytes, found.days, found.cost)
