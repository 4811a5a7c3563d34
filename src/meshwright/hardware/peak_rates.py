"""What devices attain of their peaks: one set of constants a type, none a model or a run.

A100 and H100 are calibrated on the rows that `planner/validation/calibration.py` names, by
`bench/calibrate.py`; the H100 with HBM2e has its own share of matrix products, as 500 W do not let it run as
fast. Others have the constants of the nearest type: of their generation, or the default.
"""

from __future__ import annotations

from dataclasses import replace

from meshwright.hardware.cluster import Rates

AMPERE = Rates(
    matmul=0.83, attention=0.6, attention_backward=0.45, memory=0.9, link=0.9, network=0.65, fp8=1.0
)
HOPPER = Rates(
    matmul=0.72,
    fp8=0.85,
    attention=0.48,
    attention_backward=0.45,
    attention_ported=0.42,
    memory=0.87,
    link=0.745,
    network=0.62,
)
BY_DEVICE: dict[str, Rates] = {
    "A100": AMPERE,
    "RTX 3090": AMPERE,
    "H100 SXM 96 GB HBM2e": replace(HOPPER, matmul=0.62),
    "H100 PCIe": replace(HOPPER, matmul=0.58),
    "H": HOPPER,
    "GH200": HOPPER,
    "L4": AMPERE,
    "RTX 4090": AMPERE,
    "B": HOPPER,
    "GB": HOPPER,
    "MI300X": replace(HOPPER, matmul=0.55),
}
"""The start of a device's name -> its constants; the longest that fits."""


def rates_of(name: str) -> Rates:
    """The constants of a device."""
    found = [known for known in BY_DEVICE if name.startswith(known)]
    return BY_DEVICE[max(found, key=len)] if found else Rates()
